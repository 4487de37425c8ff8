"""How often a network is exported: the slowest step, by far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

MOST = 4
"""Exports of a network with doubtful sizes: one to read it, two of trial cuts, one of a trial cut of heads."""


@contextmanager
def counted() -> Iterator[list[str]]:
    """The classes of the models that are exported inside, one entry for each export."""
    seen: list[str] = []
    export = torch.export.export

    def counting(model: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(type(model).__name__)
        return export(model, *arguments, **options)

    with mock.patch.object(torch.export, "export", counting):
        yield seen
