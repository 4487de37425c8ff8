"""Define the networks of the zoo by package: small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

PACKAGES = (
    "torchvision timm transformers ultralytics diffusers segmentation_models_pytorch monai open_clip kornia "
    "efficientnet_pytorch pretrainedmodels vit_pytorch x_transformers facenet_pytorch"
).split()
INSTALL = (
    "ultralytics diffusers segmentation-models-pytorch monai open_clip_torch kornia kornia_rs efficientnet_pytorch "
    "pretrainedmodels vit-pytorch x-transformers einops einx facenet-pytorch ftfy wcwidth munch opencv-python-headless "
    "py-cpuinfo importlib_metadata zipp six loguru frozendict torch_einops_utils requests "
    "urllib3 certifi idna charset-normalizer"
)
"""The packages that `make zoo` installs without their dependencies."""
TOKENS, TEXT = 64, (2, 16)


@dataclass(frozen=True)
class Entry:
    """A network of a package: its name, its factory and its inputs."""

    package: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]


def image(size: int, channels: int = 3, batch: int = 2) -> Callable[[], Any]:
    return lambda: torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def words() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, TOKENS, TEXT, generator=torch.Generator().manual_seed(1))}


# torchvision

CLASSIFIERS = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 "
    "mobilenet_v2 mobilenet_v3_small mobilenet_v3_large regnet_x_400mf regnet_y_400mf resnet18 resnet34 resnet50 "
    "resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn vit_b_32 "
    "wide_resnet50_2"
).split()
SEGMENTERS = "deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large".split()
SIZES = {"inception_v3": 96, "maxvit_t": 224, "vit_b_32": 224, "alexnet": 96}


def torchvision() -> list[Entry]:
    def make(name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: import_module("torchvision.models").get_model(name, weights=None, **options)

    plain = {"init_weights": False, "aux_logits": False}  # the further heads of training are no part of what runs
    extra: dict[str, dict[str, Any]] = {"inception_v3": plain, "googlenet": plain}
    found = [
        Entry("torchvision", n, make(n, num_classes=10, **extra.get(n, {})), image(SIZES.get(n, 64)))
        for n in CLASSIFIERS
    ]
    backbones = {"weights_backbone": None, "num_classes": 5}
    return found + [Entry("torchvision", n, make(n, **backbones), image(64)) for n in SEGMENTERS]


# timm

TIMM = (
    "test_vit test_resnet test_convnext test_efficientnet test_nfnet test_byobnet test_vit2 test_vit3 test_vit4 "
    "test_convnext2 test_convnext3 test_efficientnet_ln test_efficientnet_gn test_efficientnet_evos test_mambaout "
    "bat_resnext26ts botnet26t_256 caformer_s18 cait_xxs24_224 coat_tiny coatnet_0_rw_224 convformer_s18 "
    "convmixer_768_32 convnext_atto convnextv2_atto convit_tiny crossvit_tiny_240 cs3darknet_s cspresnet50 "
    "cspdarknet53 darknet53 davit_tiny deit_tiny_patch16_224 densenet121 dla34 dm_nfnet_f0 dpn48b eca_nfnet_l0 "
    "ecaresnet26t edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientvit_b0 "
    "efficientvit_m0 fastvit_t8 fbnetc_100 focalnet_tiny_srf gcresnet33ts gernet_s ghostnet_050 ghostnetv2_100 "
    "gmixer_12_224 gmlp_ti16_224 hardcorenas_a hgnet_tiny hgnetv2_b0 hrnet_w18_small inception_next_atto "
    "lcnet_050 levit_128s maxvit_rmlp_pico_rw_256 mixer_s32_224 mixnet_s mnasnet_small mobilenetv2_050 "
    "mobilenetv3_small_050 mobilenetv4_conv_small mobileone_s0 mobilevit_xxs mobilevitv2_050 nextvit_small pit_ti_224 "
    "poolformer_s12 pvt_v2_b0 regnetx_002 regnety_002 regnetz_005 repghostnet_050 repvgg_a0 repvit_m0_9 "
    "res2net50_14w_8s resmlp_12_224 resnest14d resnet18 resnetv2_18 resnext26ts rexnet_100 sebotnet33ts_256 "
    "selecsls42b seresnet18 skresnet18 starnet_s1 tf_efficientnet_lite0 tiny_vit_5m_224 tinynet_e tresnet_m vgg11_bn "
    "visformer_tiny vit_tiny_patch16_224 vovnet39a xception41 xcit_nano_12_p16_224"
).split()
FIXED = (
    "_224 _240 _256 vit swin levit coat mixer cait crossvit edgenext focalnet efficientformer bat_resnext visformer"
).split()
"""Networks whose names contain one of these get images of their native size."""


def timm() -> list[Entry]:
    def make(name: str) -> Callable[[], nn.Module]:
        return lambda: import_module("timm").create_model(name, pretrained=False, num_classes=10)

    def inputs(name: str) -> Callable[[], Any]:
        def made() -> Any:
            known = import_module("timm.models").get_pretrained_cfg(name).input_size
            whole = any(part in name for part in FIXED) or name.startswith("test_")
            return image(known[-1] if whole else 96, known[0])()

        return made

    return [Entry("timm", name, make(name), inputs(name)) for name in TIMM]


# transformers: every family by its own configuration, made small by the names that sizes have

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "encoder_num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "kv_channels"), 8),
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), TOKENS),
    **dict.fromkeys(("num_labels",), 10),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions"), 64),
    **dict.fromkeys(("max_2d_position_embeddings", "max_target_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("image_size",), 64),
    **dict.fromkeys(("patch_size",), 16),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("decoder_start_token_id",), 1),
    **dict.fromkeys(("rotary_dim",), 4),
}
TEXTS = (
    "albert bert bert-generation big_bird bloom camembert codegen convbert data2vec-text deberta-v2 distilbert electra "
    "ernie esm falcon fnet funnel gemma gemma2 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite ibert layoutlm llama "
    "mistral mixtral mobilebert modernbert mpnet mpt nystromformer olmo olmo2 openai-gpt opt phi phi3 qwen2 qwen3 "
    "rembert roberta roformer squeezebert stablelm starcoder2 xglm xlm-roberta"
).split()
PAIRS = "bart blenderbot fsmt m2m_100 marian mbart pegasus plbart t5 mt5 prophetnet".split()
VISIONS = (
    "beit bit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers efficientnet focalnet levit "
    "mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer swin swinv2 vit vit_msn vitdet"
).split()


HEADS = ("MaskedLM", "CausalLM", "ImageClassification")
"""Task heads, the first available one is used: a network without a head returns its residual stream."""

PATCHES = "beit data2vec-vision deit dinov2 dinov2_with_registers vit vit_msn vitdet".split()
"""Plain vision transformers get small patches; otherwise the patch embedding would dominate a small network."""


def _family(name: str, heads: Sequence[str] = HEADS) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = import_module("transformers")
        known = vars(library.AutoConfig.for_model(name))
        sizes = {
            key: value for key, value in SMALL.items() if key in known and isinstance(known[key], (int, type(None)))
        }
        patches = {"image_size": 32, "patch_size": 4} if name in PATCHES else {}
        config = library.AutoConfig.for_model(name, **{**sizes, **SPECIAL.get(name, {}), **patches})
        kinds = [*(getattr(library, f"AutoModelFor{head}") for head in heads), library.AutoModel]
        found = next(kind._model_mapping[type(config)] for kind in kinds if type(config) in kind._model_mapping)
        model: nn.Module = (found[0] if isinstance(found, tuple) else found)(config)
        return model

    return make


SPECIAL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts_per_tok": 2},
    "modernbert": {"global_attn_every_n_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "d_inner": 64, "d_head": 8},
    "prophetnet": {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "mpt": {"expansion_ratio": 2},
    "squeezebert": {"q_groups": 2, "k_groups": 2, "v_groups": 2},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4]},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_size": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "resnet": {"hidden_sizes": [16, 32], "depths": [1, 2], "embedding_size": 16, "layer_type": "basic"},
    "regnet": {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16, "groups_width": 8},
    "bit": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "embedding_size": 16, "num_groups": 4},
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "poolformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 16},
    "vitdet": {"window_block_indices": [], "residual_block_indices": []},
}


def transformers() -> list[Entry]:
    def pair() -> dict[str, Any]:
        mask = torch.ones(TEXT, dtype=torch.long)  # some look for padding in the tokens where there is none
        return {**words(), "decoder_input_ids": words()["input_ids"], "decoder_attention_mask": mask}

    def pixels(name: str) -> Callable[[], Any]:
        return lambda: {"pixel_values": image(32 if name in PATCHES else 64)()}

    texts = [Entry("transformers", name, _family(name), words) for name in TEXTS]
    pairs = [Entry("transformers", name, _family(name, ("Seq2SeqLM",)), pair) for name in PAIRS]
    return texts + pairs + [Entry("transformers", name, _family(name), pixels(name)) for name in VISIONS]


# ten other packages


def others() -> list[Entry]:
    return [
        Entry("ultralytics", "yolov8n", lambda: _yolo("yolov8n.yaml"), image(64)),
        Entry("ultralytics", "yolo11n", lambda: _yolo("yolo11n.yaml"), image(64)),
        Entry("diffusers", "UNet2DModel", _unet, lambda: (image(16)(), torch.tensor([1, 5]))),
        Entry("diffusers", "AutoencoderKL", _autoencoder, image(32)),
        *(_smp(name) for name in ("Unet", "FPN", "Linknet", "PSPNet", "DeepLabV3Plus", "MAnet", "Segformer")),
        Entry("monai", "UNet", _monai("UNet", channels=(8, 16, 32), strides=(2, 2)), image(32, 1)),
        Entry("monai", "BasicUNet", _monai("BasicUNet", features=(8, 8, 16, 16, 32, 8)), image(32, 1)),
        Entry("open_clip", "ViT-B-32", _clip, lambda: (image(64)(), words()["input_ids"])),
        Entry("kornia", "HardNet", lambda: import_module("kornia.feature").HardNet(pretrained=False), image(32, 1)),
        Entry("efficientnet_pytorch", "efficientnet-b0", _efficientnet, image(64)),
        Entry("pretrainedmodels", "bninception", lambda: _pretrained("bninception"), image(224)),
        Entry("pretrainedmodels", "se_resnet50", lambda: _pretrained("se_resnet50"), image(224)),
        Entry("vit_pytorch", "SimpleViT", _simple_vit, image(64)),
        Entry("x_transformers", "Decoder", _x_transformer, lambda: words()["input_ids"]),
        Entry("facenet_pytorch", "InceptionResnetV1", _facenet, image(96)),
    ]


def _yolo(name: str) -> nn.Module:
    model: nn.Module = import_module("ultralytics.nn.tasks").DetectionModel(name, verbose=False)
    return model


def _unet() -> nn.Module:
    kind = import_module("diffusers").UNet2DModel
    model: nn.Module = kind(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model


def _autoencoder() -> nn.Module:
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model: nn.Module = import_module("diffusers").AutoencoderKL(
        **kinds, block_out_channels=(16, 32), norm_num_groups=4, layers_per_block=1
    )
    return model


def _smp(name: str) -> Entry:
    def make() -> nn.Module:
        kind = getattr(import_module("segmentation_models_pytorch"), name)
        model: nn.Module = kind("mit_b0" if name == "Segformer" else "resnet18", encoder_weights=None, classes=3)
        return model

    return Entry("segmentation_models_pytorch", name, make, image(64))


def _monai(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module("monai.networks.nets"), name)(
        spatial_dims=2, in_channels=1, out_channels=2, **sizes
    )


def _clip() -> nn.Module:
    library = import_module("open_clip")
    vision_tower = {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16, "head_width": 16}
    text_tower = {"context_length": TEXT[1], "vocab_size": TOKENS, "width": 32, "heads": 4, "layers": 2}
    model: nn.Module = library.model.CLIP(32, vision_tower, text_tower)
    return model


def _efficientnet() -> nn.Module:
    model: nn.Module = import_module("efficientnet_pytorch").EfficientNet.from_name("efficientnet-b0")
    model.set_swish(memory_efficient=False)
    return model


def _pretrained(name: str) -> nn.Module:
    model: nn.Module = getattr(import_module("pretrainedmodels"), name)(num_classes=1000, pretrained=None)
    return model


def _simple_vit() -> nn.Module:
    kind = import_module("vit_pytorch").SimpleViT
    model: nn.Module = kind(image_size=64, patch_size=16, num_classes=10, dim=32, depth=2, heads=4, mlp_dim=64)
    return model


def _x_transformer() -> nn.Module:
    library = import_module("x_transformers")
    layers = library.Decoder(dim=32, depth=2, heads=4)
    model: nn.Module = library.TransformerWrapper(num_tokens=TOKENS, max_seq_len=64, attn_layers=layers)
    return model


def _facenet() -> nn.Module:
    model: nn.Module = import_module("facenet_pytorch").InceptionResnetV1(
        pretrained=None, classify=True, num_classes=10
    )
    return model


def everything() -> dict[str, Entry]:
    """Return all networks by `package:name`."""
    entries = [*torchvision(), *timm(), *transformers(), *others()]
    return {f"{entry.package}:{entry.name}": entry for entry in entries}


SAMPLE = (
    "torchvision:resnet18 torchvision:mobilenet_v3_small timm:test_vit timm:test_convnext timm:test_byobnet "
    "timm:mobileone_s0 transformers:bert transformers:gpt2 transformers:llama transformers:t5 transformers:segformer "
    "segmentation_models_pytorch:Unet"
).split()
"""The networks that CI runs."""
