"""Files for other programs: free sizes, compared at several batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.errors import MergingError
from neuron_merging.graph import batch_size
from neuron_merging.onnx.export import export_model

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Run = Callable[[Tensor], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()


class OneAtATime(nn.Module):
    """Its code says that there is one image."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.reshape(1, 3, 8, 8))
        return found


def opened(path: Path) -> Run:
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    session = onnxruntime.InferenceSession(str(path))
    (given,) = session.get_inputs()
    return lambda x: torch.from_numpy(np.array(session.run(None, {given.name: x.numpy()})[0]))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_batch_and_named_sizes_are_free(suffix: str, tmp_path: Path) -> None:
    model, path = net(), tmp_path / f"out{suffix}"
    written = export_model(model, (X,), path, ["2", "0:3"])
    assert written.batches == (1, 3, 16) and written.difference < 1e-5 and not written.note
    run = opened(path)
    for shape in ((1, 3, 8, 8), (3, 3, 9, 8), (16, 3, 8, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), model(x), atol=1e-5, rtol=1e-4)


def test_an_expensive_network_is_compared_on_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "MAX_CHECK_MACS", 1000)
    assert export_model(net(), (X,), tmp_path / "out.onnx").batches == (1, 3)


def test_free_sizes_have_names(tmp_path: Path) -> None:
    export_model(net(), (X,), tmp_path / "out.onnx", ["2"])
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
    assert session.get_inputs()[0].shape == ["batch", 3, "size_2", 8]
    assert session.get_outputs()[0].shape == ["batch", 2]


def test_a_batch_that_the_code_fixes_is_said_to_be(tmp_path: Path) -> None:
    written = export_model(OneAtATime(), (X,), tmp_path / "out.onnx")
    assert written.batches == (1,) and "the batch size is fixed" in written.note


@pytest.mark.parametrize("dimension", ["9", "1:2", "x", "-1"])
def test_dimensions_that_no_input_has(dimension: str, tmp_path: Path) -> None:
    with pytest.raises(MergingError, match="--dynamic"):
        export_model(net(), (X,), tmp_path / "out.onnx", [dimension])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "says"), [("a.onnx", "InferenceSession"), ("a.pt2", "torch.export.load"), ("a", "folder")]
)
def test_a_file_is_not_loaded_like_a_folder(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(MergingError, match="a file, not a folder") as error:
        nm.load(tmp_path / name)
    assert says in error.value.fix


@torch.library.custom_op("neuron_merging_tests::own", mutates_args=())
def own(x: Tensor) -> Tensor:
    return x + 1


@own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OfItsOwn(nn.Module):
    """An operator that the exporter has never heard of."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = own(x)
        return out


def test_what_the_exporter_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(MergingError, match=r"No ONNX function found for .*neuron_merging_tests.own"):
        export_model(OfItsOwn(), (torch.zeros(2, 3),), tmp_path / "m.onnx")


class Padded(nn.Module):
    """Zeros around what is negative are larger than it; onnxruntime makes them a pooling's own padding."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(nn.functional.pad(-1 - x.abs(), (1, 1, 1, 1)), 3)


def test_what_only_onnxruntimes_optimisation_changes_is_exported_and_said(tmp_path: Path) -> None:
    assert "optimisation" in export_model(Padded(), (torch.randn(2, 3, 8, 8),), tmp_path / "m.onnx").note


class Amplifying(nn.Module):
    """A network that makes much of its rounding: what two sums differ by in the last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.kept = {"shift": torch.zeros(1, 64)}  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.kept["shift"]
        once, again = self.first(x), nn.functional.linear(x.flip(1), self.first.weight.flip(1), self.first.bias)
        return (once - again) * 1e6


class Wrong(nn.Module):
    """Another network in onnxruntime than in torch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting())


def test_what_rounding_makes_of_a_network_is_no_fault_of_its_export(tmp_path: Path) -> None:
    torch.manual_seed(0)
    export_model(Amplifying(), (torch.randn(2, 64),), tmp_path / "m.onnx")
    with pytest.raises(MergingError, match="differs from the module by 1"):
        export_model(Wrong(), (torch.randn(2, 64),), tmp_path / "wrong.onnx")
