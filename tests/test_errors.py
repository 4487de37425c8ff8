"""Errors as values."""

from __future__ import annotations

import pickle

import pytest
import torch

import neuron_merging as nm
from neuron_merging import extend
from neuron_merging.errors import describe_error
from tests.failing import compressing, failing


def test_errors_go_between_processes() -> None:
    error = failing(compressing(ratio=2))
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error) and str(twin) == str(error) and twin.fix == error.fix


@pytest.mark.parametrize("kind", [nm.NothingToPrune, nm.VerificationError])
def test_all_errors_are_merging_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, nm.MergingError)


def test_what_a_library_says_of_its_own_code_is_left_out() -> None:
    signature = "void onnxruntime::Check(const std::unordered_map<std::string, int>&, bool) "
    said = f"[ONNXRuntimeError] : 1 : FAIL : Load failed:/onnxruntime_src/core/load.h:46 {signature}Opset 28 is new"
    assert (
        describe_error(RuntimeError(f"\x1b[96m{said}\x1b[0m\nand more")) == "RuntimeError: Load failed:Opset 28 is new"
    )


def test_members_are_read_under_their_old_names_with_a_warning() -> None:
    axis = extend.Axis("conv.weight", 1, blocks=2)
    with pytest.warns(DeprecationWarning, match=r"Axis\.expose is now Axis\.join_blocks"):
        old = axis.expose  # type: ignore[attr-defined]
    assert old(torch.zeros(4, 3, 1, 1)).shape == (2, 6, 1, 1)
