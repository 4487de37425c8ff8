"""Images and arrays of the user's own: folders, files, functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.checkpoint.recipe import DATASETS_NAMED_LIKE_MODULES
from neuron_merging.data.images import Normalization
from neuron_merging.data.open_data import FunctionBatches, list_dataset_names, open_batches, open_dataset
from neuron_merging.graph.user_code import is_code_reference, split_reference
from neuron_merging.models.sources import can_rebuild, describe_foreign_code, is_user_factory
from tests.data.tiny_datasets import pixels, refused

EXAMPLE = torch.zeros(1, 3, 12, 10)


def photos(place: Path, *names: str, size: tuple[int, int] = (16, 20)) -> Path:
    image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(names):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels((*size, 3), i)).save(place / name)
    return place


def test_class_folders_are_labels_and_loose_images_have_none(tmp_path: Path) -> None:
    classes = nm.images(photos(tmp_path / "a", "cat/1.png", "dog/1.png", "dog/2.bmp")).adapt_to(EXAMPLE)
    assert classes.has_labels and classes.classes == 2 and classes.y.tolist() == [0, 1, 1] and classes.name == "a"
    assert [tuple(x.shape) for x, _ in classes] == [(3, 3, 12, 10)]
    loose = nm.images(photos(tmp_path / "b", "1.png", "2.png")).adapt_to(EXAMPLE)
    assert not loose.has_labels and [tuple(x.shape) for x in loose] == [(2, 3, 12, 10)]


def test_pixels_are_framed_and_normalised_as_asked(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    place = photos(tmp_path, "1.png")
    whole = np.array(image.open(place / "1.png")) / 255
    (x,) = nm.images(place, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop=8).adapt_to(EXAMPLE)
    expected = (whole[4:12, 6:14] - np.array((0.5, 0.4, 0.3))) / np.array((0.2, 0.3, 0.4))
    assert np.allclose(x[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)
    (grey,) = nm.images(place, mean=[0.5], std=[0.5], resize=8, crop=(8, 9)).adapt_to(torch.zeros(1, 1, 5, 5))
    assert grey.shape == (1, 1, 8, 9)
    (known,) = nm.images(place).adapt_to(EXAMPLE, Normalization((0, 0, 0), (1, 1, 1)))
    assert float(known.min()) >= 0 and float(known.max()) <= 1


def test_what_is_no_data_is_told(tmp_path: Path) -> None:
    photos(tmp_path / "mixed", "1.png", "cat/1.png")
    (tmp_path / "empty").mkdir()
    refused(lambda: nm.images(tmp_path / "mixed"), "beside folders of images")
    refused(lambda: nm.images(tmp_path / "empty"), "no images")
    refused(lambda: nm.images(tmp_path / "none"), ".npz")
    refused(lambda: nm.images(tmp_path / "empty", mean=(0.5,)), "no normalisation")
    refused(lambda: nm.images(tmp_path / "empty", mean=(0.5,), std=(0.0,)), "positive")
    sizes = photos(photos(tmp_path / "sizes", "1.png"), "2.png", "3.png", size=(8, 9))
    refused(lambda: list(nm.images(sizes, mean=(0.5,), std=(0.5,))), "different sizes")
    refused(lambda: list(nm.images(sizes, crop=30).adapt_to(EXAMPLE)), "too few to cut")


@pytest.mark.parametrize("kind", [".npz", ".safetensors"])
def test_arrays(tmp_path: Path, kind: str) -> None:
    def write(name: str, **arrays: np.ndarray) -> Path:
        file = tmp_path / f"{name}{kind}"
        if kind == ".npz":
            np.savez(file, **arrays)  # type: ignore[arg-type]
        else:
            safetensors.torch.save_file({k: torch.from_numpy(v) for k, v in arrays.items()}, file)
        return file

    last = nm.images(
        write("last", images=pixels((5, 12, 10, 3), 0), labels=np.arange(5)), mean=[0.5] * 3, std=[0.25] * 3
    )
    ((x, y),) = last.adapt_to(EXAMPLE)
    assert x.shape == (5, 3, 12, 10) and y.tolist() == [0, 1, 2, 3, 4] and last.classes == 5
    assert torch.allclose(
        x, (torch.from_numpy(pixels((5, 12, 10, 3), 0)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25, atol=1e-5
    )
    floats = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    (rows,) = nm.images(write("floats", anything=floats)).adapt_to(torch.zeros(1, 7))
    assert torch.equal(rows, torch.from_numpy(floats))
    (tokens,) = nm.images(write("tokens", x=np.arange(12).reshape(3, 4))).adapt_to(torch.zeros(1, 4, dtype=torch.int64))
    assert tokens.dtype == torch.int64
    several = nm.images(write("two", a=np.tile(floats, (40, 1)), b=np.arange(240)))
    assert [(len(batch["a"]), batch["b"][-1].item()) for batch in several] == [(128, 127), (112, 239)]
    refused(lambda: nm.images(write("uneven", a=floats, b=floats[:3] + 1)), "different lengths: a 6, b 3")
    refused(lambda: open_dataset(str(write("two", a=floats, b=floats + 1)), "test"), "several inputs")
    refused(lambda: nm.images(write("none", x=floats[:0])), "empty")
    refused(lambda: nm.images(write("short", x=floats, y=np.arange(4))), "one for each input")
    refused(lambda: nm.images(write("negative", x=floats, y=np.arange(6) - 1)), "from 0 on")
    (tmp_path / f"broken{kind}").write_bytes(b"nothing")
    refused(lambda: nm.images(tmp_path / f"broken{kind}"), "cannot read this file")


def test_pickles_in_arrays_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}, {}], dtype=object))
    refused(lambda: nm.images(tmp_path / "a.npz"), "allow_pickle")


def test_some_are_taken_at_equal_distances(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(10, dtype=np.float32)[:, None], y=np.arange(10))
    assert nm.images(tmp_path / "a.npz").subsample(3).y.tolist() == [0, 3, 6]
    assert nm.images(tmp_path / "a.npz").subsample(99).y.tolist() == list(range(10))


def test_functions_yield_batches_anew(folder_with: Callable[[str], Path]) -> None:
    folder_with(
        "import torch\n"
        "def batches():\n    yield torch.zeros(2, 3), torch.tensor([0, 1])\n"
        "def broken():\n    yield torch.zeros(2, 3)\n    raise OSError('no more')\n"
    )
    found = open_batches("nets:batches", "test")
    assert isinstance(found, FunctionBatches) and len(list(found)) == len(list(found)) == 1
    refused(lambda: list(open_batches("nets:broken", "test")), "nets:broken raised OSError: no more", "nets.py:6")


def test_a_text_is_code_only_if_it_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        is_code_reference("a.b:c", list_dataset_names())
        and not is_code_reference("imagenet:val", list_dataset_names())
        and not is_code_reference("cifar-10:x", list_dataset_names())
    )
    for path in (r"C:\Users\me\small", "C:/Users/me/small"):
        assert not is_code_reference(path) and split_reference(path) == (path, "")
        assert describe_foreign_code(path, {}) is None and not is_user_factory(path) and not can_rebuild(path)
    assert describe_foreign_code("m:net", {}) == "import m and call net"
    assert {name for name in list_dataset_names() if name.isidentifier()} == set(DATASETS_NAMED_LIKE_MODULES)
    assert len(open_dataset("digits", "test")) == 445


def test_images_in_python(tmp_path: Path) -> None:
    place = photos(tmp_path, *(f"{name}/{i}.png" for name in "ab" for i in range(4)))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(384, 2))
    own = nm.images(place)
    verdict = nm.compress(net, EXAMPLE, ratio=0.25, calibration=own, evaluate=own).summary.verdict
    assert verdict is not None and verdict.inputs == f"8 images of {tmp_path.name}" and verdict.accuracy is not None
    three = photos(tmp_path / "more", "a/1.png", "b/1.png", "c/1.png")
    with pytest.raises(nm.MergingError, match="3 classes, the network has 2 outputs"):
        nm.compress(net, EXAMPLE, evaluate=nm.images(three))
