"""Errors as values."""

from __future__ import annotations

import pickle

import pytest

import neuron_merging as nm
from tests.failing import compressing, failing


def test_errors_go_between_processes() -> None:
    error = failing(compressing(ratio=2))
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error) and str(twin) == str(error) and twin.fix == error.fix


@pytest.mark.parametrize("kind", [nm.NothingToPrune, nm.VerificationError])
def test_all_errors_are_merging_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, nm.MergingError)
