"""Networks as people write them: each works and is verified, or is refused for the right reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import report


class Plain(nn.Module):
    """Two layers around a ReLU; the cases below add one oddity each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).relu())


class UnderNoGrad(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = torch.tanh(x).mean()
        result: Tensor = super().forward(x) + shift
        return result


class UnderAutocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            shift = torch.tanh(x.float()).mean()
        result: Tensor = super().forward(x) + shift
        return result


class Masked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b((self.mask.softmax(-1) @ self.a(x)).relu())
        return result


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(6))
        self.steps: Tensor
        self.average: Tensor

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.average.mul_(0.9).add_(x.mean(0) * 0.1)
        return super().forward(x - self.average)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x, src_key_padding_mask=padding).mean(1))
        return result


@dataclass
class Scores:
    logits: Tensor


torch.export.register_dataclass(Scores)


class ReturningADataclass(Plain):
    def forward(self, x: Tensor) -> Scores:
        return Scores(super().forward(x))


class Autoencoder(nn.Module):
    """A latent value with noise, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean = nn.Linear(6, 32), nn.Linear(32, 8)
        self.decode, self.last = nn.Linear(8, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(self.encode(x).relu())
        return self.last(self.decode(mean + torch.randn_like(mean)).relu()), mean


class AlwaysDropping(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.b(F.dropout(self.a(x).relu(), 0.3, True)) + self.b(self.a(x).relu())


class Attention(nn.Module):
    """The usual block, which takes its width from its input and so needs all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.qkv, self.out, self.head = (nn.Linear(*s) for s in ((6, 16), (16, 48), (16, 16), (16, 3)))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))
        result: Tensor = self.head(x + self.down(self.up(x).relu()))
        return result


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.more = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.attend = nn.MultiheadAttention(16, 4, kdim=7, vdim=9, batch_first=True)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self.more(self.out(self.attend(self.into(x), other[..., :7], other)[0]).relu())
        return result


class Unpooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(self.a(x).relu(), 2, return_indices=True)
        result: Tensor = self.d(self.c(F.max_unpool2d(self.b(y).relu(), places, 2)).relu())
        return result


class Complex(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(x))


class Sum(nn.Module):
    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        return x + token


class HandingOn(Plain):
    """A parameter goes through a module of its own, as class tokens do."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.sum = nn.Parameter(torch.randn(1, 6)), Sum()

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.sum(x, self.token.expand(len(x), -1)))


def padding() -> Tensor:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return mask


def generator() -> nn.Module:
    last = nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False)
    return nn.Sequential(nn.ConvTranspose2d(8, 16, 4), nn.ReLU(), last)


VECTORS, WORDS = torch.randn(3, 6), torch.randn(2, 5, 6)
WORKING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a block without gradients": (UnderNoGrad, VECTORS),
    "a block without autocast": (UnderAutocast, VECTORS),
    "a transposed reader without a bias": (generator, torch.randn(2, 8, 4, 4)),
    "a mask of minus infinities": (Masked, WORDS),
    "buffers that the network writes": (Counting, VECTORS),
    "padded attention": (Encoder, (torch.randn(2, 5, 16), padding())),
    "a dataclass": (ReturningADataclass, VECTORS),
    "noise in a latent value": (Autoencoder, VECTORS),
    "self-attention": (Attention, WORDS),
    "cross-attention": (CrossAttention, (WORDS, torch.randn(2, 4, 9))),
    "unpooling": (Unpooling, torch.randn(1, 3, 8, 8)),
    "complex numbers": (Complex, VECTORS),
    "a parameter that modules hand on": (HandingOn, VECTORS),
    "a wrapper for several devices": (lambda: nn.DataParallel(Plain()), VECTORS),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "moments": {},
    "pruned": {"merger": "none"},
    "cosine": {"merger": "cosine"},
    "everything": {"scope": "all"},
}


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("name", list(WORKING))
def test_it_works_and_nothing_of_the_users_changes(name: str, options: str) -> None:
    build, inputs = WORKING[name]
    model = build().eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    chance = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = nm.compress(model, inputs, ratio=0.5, **OPTIONS[options])
    assert found.summary.error is not None and found.summary.error < 1e-4
    assert found.summary.parameters[1] < found.summary.parameters[0]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(chance, torch.get_rng_state())


def test_layers_that_the_code_counts_on_stay_whole_with_the_line() -> None:
    found = nm.compress(CrossAttention(), (WORDS, torch.randn(2, 4, 9)))
    (why,) = [str(refusal) for refusal in found.summary.refusals if refusal.layer == "into"]
    assert "counts on" in why and "embedding dimension of 16" in why and "test_unseen.py" in why


def test_chance_refuses_the_channels_that_it_touches() -> None:
    with pytest.raises(nm.NothingToPrune, match="dropout draws at random"):
        nm.compress(AlwaysDropping(), VECTORS)


class Selecting(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x[:, 0] > 0).nonzero()


class Deciding(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).argmax(1)


class KeywordOnly(Plain):
    def forward(self, *, x: Tensor) -> Any:
        return super().forward(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nm.compress(Selecting(), VECTORS), ("nonzero returns depends on the data", "test_unseen.py", "mask")),
        (lambda: nm.compress(KeywordOnly(), VECTORS), ("example_inputs", "by position")),
        (lambda: nm.compress(Plain(), torch.zeros(0, 6)), ("empty batch", "(0, 6)")),
        (lambda: nm.compress(Plain(), VECTORS, calibration=[torch.zeros(0, 6)]), ("calibration batch is empty",)),
        (lambda: nm.compress(Plain(), VECTORS, calibration=[torch.full((2, 6), torch.nan)]), ("no numbers",)),
        (lambda: nm.compress(Plain(), VECTORS, ignore=None), ("NoneType is not a pattern",)),  # type: ignore[arg-type]
        (lambda: nm.compress(Plain(), VECTORS, ignore=[3]), ("int is not a pattern",)),  # type: ignore[list-item]
        (lambda: nm.compress(nn.Linear(3, 2), torch.ones(1, 3), ratio={"a": 0.5}), ("nothing can be removed",)),
    ],
)
def test_one_clear_error(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(nm.MergingError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_whole_numbers_are_not_called_verified() -> None:
    found = nm.compress(Deciding(), VECTORS)
    assert found.summary.error is None and any("not verified" in note for note in found.summary.notes)


def test_calibration_with_masks_of_minus_infinities_and_single_numbers() -> None:
    class Biased(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Any:
            assert mask is not None and scale is not None
            return super().forward(mask.softmax(-1) @ x) * scale

    mask = torch.full((5, 5), -torch.inf).triu(1)
    found = nm.compress(Biased(), (WORDS, mask, torch.tensor(2.0)), calibration=[(WORDS, mask, torch.tensor(3.0))])
    assert found.summary.error is not None


def test_numbers_of_numpy_are_numbers() -> None:
    ratio, multiple = np.float32(0.5), np.int64(4)
    assert nm.compress(Plain(), VECTORS, ratio=ratio, round_to=multiple).model.a.out_features == 8  # type: ignore[arg-type,union-attr]


def test_inference_mode_leaves_no_trace() -> None:
    model = Plain()
    with torch.inference_mode():
        found = nm.compress(model, torch.randn(3, 6))
    found.model(VECTORS).sum().backward()
    assert all(parameter.grad is not None for parameter in found.model.parameters())


def test_a_loss_for_an_output_has_a_page(tmp_path: Path) -> None:
    class Loss(Plain):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).square().mean()

    model = Loss()
    report.write(tmp_path / "page.html", nm.compress(model, VECTORS), model, VECTORS)
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("build", [lambda: None, Plain(), 3])
def test_a_builder_that_builds_nothing_is_told(build: Any, tmp_path: Path) -> None:
    nm.compress(Plain(), VECTORS).save(tmp_path / "small")
    with pytest.raises(nm.MergingError, match="build"):
        nm.load(tmp_path / "small", build=build)


class Words(nn.Module):
    """Tokens without a layer norm behind them."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 16, mode="sum") if bag else nn.Embedding(50, 16)
        self.hidden, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, words: Tensor) -> Tensor:
        found = self.table(words)
        result: Tensor = self.last(self.hidden(found if found.ndim == 2 else found.mean(1)).relu())
        return result


class Table(Words):
    def forward(self, words: Tensor, numbers: Tensor | None = None) -> Tensor:
        assert numbers is not None
        result: Tensor = self.last(self.hidden(self.table(words).mean(1) + numbers).relu())
        return result


@pytest.mark.parametrize(
    ("model", "example", "many"),
    [
        (Words(True), (torch.zeros(3, 4, dtype=torch.int64),), (torch.randint(50, (200, 4)),)),
        (Words(False), (torch.zeros(3, 4, dtype=torch.int64),), (torch.randint(50, (200, 4)),)),
        (
            Table(False),
            (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 16)),
            (torch.randint(50, (200, 4)), torch.randn(200, 16)),
        ),
    ],
)
def test_made_up_tokens_are_all_that_there_are(
    model: nn.Module, example: tuple[Tensor, ...], many: tuple[Tensor, ...]
) -> None:
    with torch.no_grad():
        want = model(*many)
        errors = {
            merger: float((nm.compress(model, example, merger=merger).model(*many) - want).norm() / want.norm())
            for merger in ("none", "cosine", "moments")
        }
    assert errors["moments"] < errors["cosine"] and errors["moments"] < errors["none"], errors
