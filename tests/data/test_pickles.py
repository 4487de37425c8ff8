"""Hostile pickles run nothing."""

from __future__ import annotations

import collections
import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuron_merging.reproduction import dataset_files
from neuron_merging.reproduction.datasets import load_dataset
from tests.data.tiny_datasets import refused, write


class Payload:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


RAN: list[str] = []


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [
    (os.system, "touch {ran}"), (eval, "open('{ran}', 'w')"), (exec, "open('{ran}', 'w')"),
    (open, "{ran}", "w"), (os.mkdir, "{ran}"), (RAN.append, "ran"),
    (functools.partial, os.mkdir, "{ran}"), (getattr, os, "mkdir"),
    (np.save, "{ran}.npy", 1), (collections.OrderedDict,),
])  # fmt: skip
def test_hostile_pickles_are_refused_and_nothing_runs(tmp_path: Path, call: tuple[Any, ...], protocol: int) -> None:
    ran = tmp_path / "ran"
    arguments = [a.format(ran=ran) if isinstance(a, str) else a for a in call[1:]]
    if any(a is os for a in arguments):
        arguments[0] = Payload(__import__, "os")
    payload = pickle.dumps({"data": Payload(call[0], *arguments), "labels": []}, protocol)
    write(tmp_path / "root", {"cifar-10-batches-py/test_batch": payload})
    refused(lambda: load_dataset("cifar-10", root=tmp_path / "root"), "refused", "test_batch")
    assert not RAN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_a_type_that_hides_pointers_is_refused(tmp_path: Path) -> None:
    """With numpy's own dtype this pickle makes bytes into object pointers and kills the process."""
    forged = (
        b"\x80\x02}(X\x04\0\0\0datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\x01btR"
        b"(K\1(K\1tcnumpy\ndtype\n(X\x01\0\0\0OK\0K\1tR(K\3X\x01\0\0\0|NNNK\x08K\x08K\0tb"
        b"\x89U\x08AAAAAAAAtbX\x06\0\0\0labels](K\1eu."
    )
    write(tmp_path, {"cifar-10-batches-py/test_batch": forged})
    refused(lambda: load_dataset("cifar-10", root=tmp_path), "'O'", "test_batch")


@pytest.mark.parametrize("name", [b"numpy\ndtype", b"numpy\nndarray", b"_codecs\nencode"])
def test_a_pickle_cannot_change_what_it_names(tmp_path: Path, name: bytes) -> None:
    before = [dict(vars(kind)) for kind in (dataset_files._PickledArray, dataset_files._PickledDtype)]
    blob = b"\x80\x02c" + name + b"\n(N}X\x08\0\0\0__init__K\1stb."
    write(tmp_path, {"cifar-10-batches-py/test_batch": blob})
    refused(lambda: load_dataset("cifar-10", root=tmp_path), "test_batch")
    assert before == [dict(vars(kind)) for kind in (dataset_files._PickledArray, dataset_files._PickledDtype)]
