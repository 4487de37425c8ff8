"""Build a network from its source: a registered name, timm, torchvision, the Hugging Face hub, the user's code, an
exported program or an ONNX file; and draw example inputs for transformers models.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging import models
from neuron_merging.errors import MergingError, ModelError, describe_error, suggest_names
from neuron_merging.graph.example_inputs import draw_example
from neuron_merging.graph.process_state import silence_logging, silence_stdout
from neuron_merging.graph.user_code import find_user_line, import_module_or_raise, import_object, split_reference
from neuron_merging.inputs.text import TEXT_LENGTH, find_gguf
from neuron_merging.models.state_dicts import WEIGHT_READERS, is_torchscript, make_torchscript_error
from neuron_merging.onnx.formats import find_format, list_suffixes

HF_PREFIX = "hf"
TRUST_CODE_ARGUMENT = "trust_remote_code"
TASK_ARGUMENT = "task"
ORIGINAL_CONFIG_FILE = "original_config.json"
"""The config of a folder's original network. `load` builds the network from it, wherever the folder lies."""
CODE_ENTRIES = ("implementation", "auto_map", "use_kernels", "quantization_config")
"""Ends of the names of config entries by which transformers may fetch and run code."""
EXAMPLE_TOKENS = 16
"""Length of an example sequence."""


def make_hub_factory(name: str) -> Callable[..., nn.Module]:
    """Return a factory for the network `hf:NAME`, with the head that its config names or that of a `task` argument."""

    def make(**arg: Any) -> nn.Module:
        library = _import_transformers()
        task, code, fresh = (
            arg.pop(TASK_ARGUMENT, None),
            bool(arg.pop(TRUST_CODE_ARGUMENT, False)),
            bool(arg.pop("fresh", False)),
        )
        if Path(name).is_absolute() and not Path(name).exists():
            raise ModelError("there is no such folder", where=name, fix="Give hf:FOLDER, or hf:NAME on the hub.")
        place: str | Path = Path(name) if Path(name).is_dir() else name
        if (gguf := find_gguf(name))[1]:
            return _read_gguf(library, *gguf)
        config = library.AutoConfig.from_pretrained(place, trust_remote_code=code, **arg)
        kind = _find_model_class(library, config, task)
        if fresh:
            network: nn.Module = (
                kind._from_config(config) if hasattr(kind, "_from_config") else kind.from_config(config)
            )
        else:
            with _hide_progress_in_files(library):
                network = kind.from_pretrained(place, config=config, **({TRUST_CODE_ARGUMENT: True} if code else {}))
        return network.eval()

    return make


@contextmanager
def _hide_progress_in_files(library: Any) -> Iterator[None]:
    """Switch transformers' progress bars off if stderr is no terminal: a file would hold each of their steps."""
    logging, shown = library.utils.logging, library.utils.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _read_gguf(library: Any, folder: str, file: str) -> nn.Module:
    """Return the language model of a .gguf file, its weights dequantised to float32."""
    import_module_or_raise("gguf", "pip install gguf.")
    with silence_logging(), silence_stdout():
        network: Any = library.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # The weights are plain tensors now, but transformers still treats the network as quantised and refuses to cast it.
    network.config.__dict__.pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        network.__dict__.pop(name, None)
    return network.eval()  # type: ignore[no-any-return]


def _import_transformers() -> Any:
    return import_module_or_raise("transformers", "pip install 'neuron-merging[zoo]'.")


def _find_model_class(library: Any, config: Any, task: str | None) -> Any:
    """Return the class of a network: for a task such as `sequence-classification`, or the class that was saved."""
    if task is not None:
        # "causal-lm" is AutoModelForCausalLM; compared in lower case, because heads differ in their capitals.
        name = "AutoModelFor" + "".join(part.capitalize() for part in task.replace("-lm", "-l-m").split("-"))
        names = [entry for entry in dir(library) if entry.startswith("AutoModelFor")]
        by_letters = {entry.lower(): entry for entry in names}
        if name.lower() not in by_letters:
            what = f"transformers has no head for the task {task!r}"
            raise ModelError(what, where=f"--arg {TASK_ARGUMENT}=", fix=suggest_names(name, names))
        return getattr(library, by_letters[name.lower()])
    saved = (getattr(config, "architectures", None) or [None])[0]
    return getattr(library, saved, library.AutoModel) if saved else library.AutoModel


def build_from_config(text: str | bytes) -> nn.Module:
    """Build a fresh network of transformers from the text of a config.json. No code beside the library's own runs."""
    library = _import_transformers()
    try:
        entries = json.loads(text, object_hook=_drop_code_entries)
        kind: Any = getattr(library, entries["architectures"][0])
        config = type(library.AutoConfig.for_model(entries["model_type"])).from_dict(entries)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        what = f"transformers builds no network from this configuration: {describe_error(error)}"
        raise ModelError(what, where="config.json", fix="Install the version of transformers that wrote it.") from error
    if library.PreTrainedModel not in getattr(kind, "__mro__", ()):
        raise ModelError(f"{kind} is no network of transformers", where="config.json")
    with silence_logging(), silence_stdout():
        network: nn.Module = kind._from_config(config)
    return network.eval()


def _drop_code_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Leave out the entries of a config by which transformers fetches code, such as kernels from the hub."""
    return {key: value for key, value in entries.items() if not key.endswith(CODE_ENTRIES)}


def make_transformers_inputs(network: nn.Module) -> dict[str, Tensor]:
    """Draw example inputs for a network of transformers, by name."""
    config: Any = network.config
    generator = torch.Generator("cpu").manual_seed(0)
    main = str(getattr(network, "main_input_name", "input_ids"))
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, int(getattr(config, "num_channels", 3)), int(height), int(width))
        return {main: draw_example(shape, next(network.parameters()).dtype, generator)}
    if main != "input_ids":
        raise ModelError(f"the length of {main} is unknown", where="--input", fix="Give a shape: --input 1,16000")
    text = getattr(config, "get_text_config", lambda: config)()
    length = min(_choose_example_length(network), getattr(text, "max_position_embeddings", None) or EXAMPLE_TOKENS)
    tokens = draw_example((1, length), torch.int64, generator, kinds=int(text.vocab_size))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {**inputs, "decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else inputs


def _choose_example_length(network: Any) -> int:
    """Return the length of an example: that of generated texts for a language model, so that it is captured once."""
    writes = callable(getattr(network, "can_generate", None)) and network.can_generate()
    return TEXT_LENGTH if writes and not getattr(network.config, "is_encoder_decoder", False) else EXAMPLE_TOKENS


PRETRAINED_ARGUMENTS = {"timm": ("pretrained", "checkpoint_path"), "torchvision": ("weights", "pretrained")}
"""By zoo, the arguments that load pretrained weights."""
FETCHING_PREFIXES = ("pretrained_", "checkpoint", "cache_dir", "weights_")
"""Prefixes of further arguments that make a zoo open or fetch files."""


def build_from_source(model: str, arg: Mapping[str, Any], *, fresh: bool = False) -> nn.Module:
    """Build the network that MODEL names; `fresh` skips weights that would have to be fetched."""
    zoo, name = split_reference(model)
    if not name and find_gguf(model)[1]:
        zoo, name = HF_PREFIX, model
    if (form := find_format(model)) is not None:
        return form.read(model, None)[0]
    if zoo == HF_PREFIX and name:
        fix = "Check the name or folder, that its files are there or can be fetched, and --arg NAME=VALUE."
        return _call_factory(make_hub_factory(name), model, {**arg, "fresh": fresh}, fix)
    if zoo in PRETRAINED_ARGUMENTS and name:
        settings = {k: v for k, v in arg.items() if not fresh or k not in PRETRAINED_ARGUMENTS[zoo]}
        return _call_factory(_find_zoo_factory(zoo, name), model, settings)
    if zoo and name:
        return _call_factory(import_object(zoo, name), model, arg)
    return _call_factory(_find_registered_factory(model), model, arg)


def is_registered_network(model: str) -> bool:
    """Whether the name is that of a registered network."""
    try:
        models.find_network(model)
    except ValueError:
        return False
    return True


def describe_foreign_code(model: str, arg: Mapping[str, Any]) -> str | None:
    """Describe what building a network would run or fetch beyond this package and the zoos; None if nothing.

    >>> describe_foreign_code("resnet-56", {}), describe_foreign_code("timm:resnet18", {"num_classes": 10})
    (None, None)
    >>> describe_foreign_code("os:system", {"command": "ls"})
    'import os and call system'
    """
    zoo, name = split_reference(model)
    if (form := find_format(model)) is not None:
        return f"open {model}, {form.risk}" if form.risk else None
    if zoo == HF_PREFIX and name:
        return (
            f"run code that lies beside {name}"
            if arg.get(TRUST_CODE_ARGUMENT)
            else f"have transformers open or fetch {name}"
        )
    if zoo in PRETRAINED_ARGUMENTS and name:
        fetching = [key for key in arg if key.startswith(FETCHING_PREFIXES)]
        if ":" in name or fetching:
            return f"have {zoo} open or fetch files ({', '.join([name, *fetching])})"
        return None
    return f"import {zoo} and call {name}" if name else None


def is_untrained(model: str, arg: Mapping[str, Any]) -> bool:
    """Whether the network can only have random weights."""
    zoo, name = split_reference(model)
    if zoo in PRETRAINED_ARGUMENTS and name:
        return not any(arg.get(key) for key in PRETRAINED_ARGUMENTS[zoo])
    return not name and not _is_model_file(model)


def is_user_factory(model: str) -> bool:
    """Whether the user's own code builds the network."""
    zoo, name = split_reference(model)
    return bool(name) and zoo not in (HF_PREFIX, *PRETRAINED_ARGUMENTS)


def can_rebuild(model: str | None) -> bool:
    """Whether `build_from_source` can build the network again without the user's help."""
    return model is not None and (not _is_model_file(model) or os.path.exists(model))


def _is_model_file(model: str) -> bool:
    is_path = not split_reference(model)[1] and any(separator in model for separator in ("/", "\\"))
    return find_format(model) is not None or is_path or os.path.exists(model)


def _call_factory(
    make: Callable[..., Any], model: str, arg: Mapping[str, Any], fix: str = "Check its arguments (--arg NAME=VALUE)."
) -> nn.Module:
    try:
        network = make if isinstance(make, nn.Module) else make(**arg)
    except MergingError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{model} could not be built: {describe_error(error)}",
            where=find_user_line(error),
            fix=fix,
        ) from error
    if not isinstance(network, nn.Module):
        kind = type(network).__name__
        raise ModelError(f"{model} gives a {kind}, not a torch.nn.Module", fix="Name a class or function that does.")
    return network


def _find_registered_factory(name: str) -> Callable[..., Any]:
    if is_torchscript(name):
        raise make_torchscript_error(name)
    if Path(name).suffix in WEIGHT_READERS:
        raise ModelError(
            "such a file holds weights, or a pickled module, which could run any code and is not opened",
            where=name,
            fix=f"Name the network and give a state dict beside it: package.module:factory --weights {name}",
        )
    if Path(name).suffix:
        given = (
            f"{Path(name).stem}:FUNCTION"
            if name.endswith(".py")
            else f"a file ({list_suffixes()}), or package.module:factory"
        )
        raise ModelError("not a known network and not a supported file", where=name, fix=f"Give {given}.")
    try:
        spec = models.find_network(name)
    except ValueError as error:
        fix = "Or give package.module:factory, timm:NAME, torchvision:NAME, hf:NAME, a folder, or a file"
        raise ModelError(str(error), where="MODEL", fix=f"{fix} ({list_suffixes()}).") from error
    return lambda **arg: spec.build(**{"classes": spec.classes, **arg})


def _find_zoo_factory(zoo: str, name: str) -> Callable[..., Any]:
    library = import_module_or_raise(
        "timm" if zoo == "timm" else "torchvision.models", f"pip install {zoo}, to fit your torch."
    )
    known = library.list_models()
    if ":" not in name and name.partition(".")[0] not in known:
        raise ModelError(f"{zoo} has no network {name!r}", where="MODEL", fix=suggest_names(name, known))
    create = library.create_model if zoo == "timm" else library.get_model
    return lambda **arg: create(name, **arg)
