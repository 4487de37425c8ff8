"""Shuffles and other nodes that pick channels by position, in the spellings of exporters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import neuron_merging as nm
from neuron_merging.onnx.channel_selections import MATRIX_SUFFIX, find_picked_channels
from neuron_merging.onnx.open_model import open_onnx_file
from neuron_merging.onnx.write_model import write_onnx_file
from tests.onnx import small_files
from tests.onnx.small_files import node, weights

WIDTH = 8


def halves_without_batch(x: str, tag: str) -> tuple[list[Any], dict[str, Any]]:
    """Even and odd channels, as FastestDet and NanoDet are exported: the reshapes have lost the batch."""
    constants = {
        f"{tag}.pairs": np.array([WIDTH // 2, 2, 64]),
        f"{tag}.sides": np.array([2, -1, WIDTH // 2, 8, 8]),
        f"{tag}.zero": np.array(0),
        f"{tag}.one": np.array(1),
    }
    nodes = [
        node("Reshape", [x, f"{tag}.pairs"], f"{tag}.a"),
        node("Transpose", [f"{tag}.a"], f"{tag}.b", perm=[1, 0, 2]),
        node("Reshape", [f"{tag}.b", f"{tag}.sides"], f"{tag}.c"),
        node("Gather", [f"{tag}.c", f"{tag}.zero"], f"{tag}.even", axis=0),
        node("Gather", [f"{tag}.c", f"{tag}.one"], f"{tag}.odd", axis=0),
    ]
    return nodes, constants


def halves_of_a_shuffle(x: str, tag: str) -> tuple[list[Any], dict[str, Any]]:
    """A shuffle of two groups and a split, as torchvision's ShuffleNet is exported."""
    constants = {
        f"{tag}.groups": np.array([-1, WIDTH // 2, 2, 8, 8]),
        f"{tag}.back": np.array([-1, WIDTH, 8, 8]),
        f"{tag}.sizes": np.array([WIDTH // 2, WIDTH // 2]),
    }
    nodes = [
        node("Reshape", [x, f"{tag}.groups"], f"{tag}.a"),
        node("Transpose", [f"{tag}.a"], f"{tag}.b", perm=[0, 2, 1, 3, 4]),
        node("Reshape", [f"{tag}.b", f"{tag}.back"], f"{tag}.c"),
        node("Split", [f"{tag}.c", f"{tag}.sizes"], [f"{tag}.even", f"{tag}.odd"], axis=1),
    ]
    return nodes, constants


def halves_by_steps(x: str, tag: str) -> tuple[list[Any], dict[str, Any]]:
    """Every other channel by a slice, the rest by its indices."""
    constants = {
        **{f"{tag}.{name}": np.array([value]) for name, value in (("from", 0), ("to", WIDTH), ("dim", 1), ("by", 2))},
        f"{tag}.indices": np.arange(1, WIDTH, 2),
    }
    nodes = [
        node("Slice", [x, *(f"{tag}.{name}" for name in ("from", "to", "dim", "by"))], f"{tag}.even"),
        node("Gather", [x, f"{tag}.indices"], f"{tag}.odd", axis=1),
    ]
    return nodes, constants


SPELLINGS = {"no batch": halves_without_batch, "shuffle": halves_of_a_shuffle, "steps": halves_by_steps}


def shuffle_network(path: Path, spelling: str, blocks: int = 2) -> Path:
    """Blocks in which half of the channels pass by: odd channels go through two layers, even ones do not."""
    nodes = [node("Conv", ["x", "stem.weight", "stem.bias"], "stem", pads=[1, 1, 1, 1]), node("Relu", ["stem"], "b0")]
    constants: dict[str, Any] = {"stem.weight": weights(WIDTH, 3, 3, 3), "stem.bias": np.linspace(-0.1, 0.3, WIDTH)}
    for i in range(blocks):
        picked, known = SPELLINGS[spelling](f"b{i}", f"s{i}")
        constants |= known
        nodes += picked
        for part, read in (("in", f"s{i}.odd"), ("out", f"i{i}")):
            constants[f"{part}{i}.weight"] = 2 * weights(WIDTH // 2, WIDTH // 2, 1, 1)
            constants[f"{part}{i}.bias"] = np.linspace(-0.2, 0.4, WIDTH // 2)
            nodes.append(node("Conv", [read, f"{part}{i}.weight", f"{part}{i}.bias"], f"{part}{i}"))
            nodes.append(node("Relu", [f"{part}{i}"], f"{part[0]}{i}"))
        nodes.append(node("Concat", [f"s{i}.even", f"o{i}"], f"b{i + 1}", axis=1))
    nodes += [
        node("GlobalAveragePool", [f"b{blocks}"], "pooled"),
        node("Flatten", ["pooled"], "flat"),
        node("Gemm", ["flat", "last.weight", "last.bias"], "y", transB=1),
    ]
    constants |= {"last.weight": weights(5, WIDTH), "last.bias": np.zeros(5)}
    floats = {n: v.astype(np.float32) if v.dtype.kind == "f" else v for n, v in constants.items()}
    batch = 1 if spelling == "no batch" else "batch"
    return small_files.write(path, nodes, floats, inputs={"x": (batch, 3, 8, 8)})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_channels_that_are_shuffled_can_be_removed_one_by_one(spelling: str, tmp_path: Path) -> None:
    source = shuffle_network(tmp_path / "m.onnx", spelling)
    analysis = nm.analyse(source)
    assert sorted(group.size for group in analysis.channels.groups) == [4, 4, 4, 4, 8]
    small = nm.compress(analysis, ratio=0.25)
    assert small.summary.verified is not None
    small.save(tmp_path / "small.onnx")
    written = onnx.load(str(tmp_path / "small.onnx"))
    names = {name for n in written.graph.node for name in n.input} | {t.name for t in written.graph.initializer}
    assert not any(name.endswith(MATRIX_SUFFIX) for name in names)
    assert {n.op_type for n in written.graph.node}.isdisjoint({"ArgMax", "Transpose", "Reshape", "Split"})
    x = small_files.images(1 if spelling == "no batch" else 3)
    want = small.model(torch.from_numpy(x))[0].numpy()
    np.testing.assert_allclose(small_files.run(tmp_path / "small.onnx", x)[0], want, atol=1e-5)
    shapes = {t.name: numpy_helper.to_array(t).shape for t in written.graph.initializer}
    assert shapes["stem.weight"][0] == 6 and shapes["in0.weight"][0] == 3
    # The smaller file is a file like any other.
    again = nm.compress(tmp_path / "small.onnx", ratio=0.4)
    assert len(again.summary.groups) == 5


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_file_of_which_nothing_is_removed_computes_the_same(spelling: str, tmp_path: Path) -> None:
    source = shuffle_network(tmp_path / "m.onnx", spelling)
    network, _ = open_onnx_file(source)
    write_onnx_file(network, tmp_path / "same.onnx")
    x = small_files.images(1)
    np.testing.assert_allclose(small_files.run(tmp_path / "same.onnx", x)[0], small_files.run(source, x)[0], atol=1e-5)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_selection_becomes_empty(spelling: str, tmp_path: Path) -> None:
    source = shuffle_network(tmp_path / "m.onnx", spelling, blocks=3)
    small = nm.compress(source, ratio=0.97, merger="none")
    small.save(tmp_path / "small.onnx")
    assert all(count >= 1 for group in small.summary.groups for count in [group.after])
    assert small_files.run(tmp_path / "small.onnx", small_files.images(1))[0].shape == (1, 5)


def test_gradients_flow_to_the_channels_that_were_picked(tmp_path: Path) -> None:
    network, (x,) = open_onnx_file(shuffle_network(tmp_path / "m.onnx", "shuffle"))
    given = x.clone().requires_grad_()
    network(given)[0].square().sum().backward()
    moved = (x + 1e-3).requires_grad_()
    slope = (network(moved)[0].square().sum() - network(x)[0].square().sum()) / 1e-3
    assert given.grad is not None and torch.isclose(given.grad.sum(), slope, rtol=0.05)


def test_only_whole_channels_of_the_same_samples_are_selections() -> None:
    shape = (2, 4, 3, 3)
    entries = np.arange(72).reshape(shape)
    assert find_picked_channels(entries[:, [2, 0]], shape).tolist() == [2, 0]  # type: ignore[union-attr]
    for other in (
        entries[::-1, [2, 0]],  # other samples
        entries[:, [2, 0], ::-1],  # other positions
        entries[:, 1:3],  # neighbours, which a slice takes
        entries[:, [1, 1]],  # a channel twice
        entries.reshape(2, 3, 4, 3)[:, :2].transpose(0, 1, 3, 2),  # no channels at all
    ):
        assert find_picked_channels(other, shape) is None


def test_exported_programs_run_without_this_package(tmp_path: Path) -> None:
    small = nm.compress(shuffle_network(tmp_path / "m.onnx", "shuffle"), ratio=0.25)
    small.save(tmp_path / "small.pt2")
    program = torch.export.load(str(tmp_path / "small.pt2"))
    assert not any("neuron_merging" in str(n.target) for n in program.graph.nodes)
    x = torch.from_numpy(small_files.images(3))
    torch.testing.assert_close(program.module()(x)[0], small.model(x)[0])
