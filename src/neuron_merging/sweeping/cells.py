"""cells: one measurement as a value, and its result in a file of its own.

The file's name is the sum of everything that the result depends on, so a result is found again
exactly as long as it still holds, and an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from neuron_merging.atomic import replace_file

SCHEMA = 1
"""To be raised when a measurement of this package changes its meaning."""
ROOT = Path(__file__).parent.parent
ENGINE = ("pipeline.py", "measuring/__init__.py", "data/__init__.py", "sweeping/scores.py")
Result = dict[str, Any]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; its fields are all that the result depends on, beside the engine and torch."""

    @property
    def key(self) -> str:
        """The name of its file."""
        return hashlib.sha256(msgspec.json.encode([SCHEMA, str(torch.__version__), engine(), self])).hexdigest()[:32]


class _Entry(msgspec.Struct, frozen=True):
    cell: Any
    result: Result


@dataclass(frozen=True)
class Cache:
    """Results by cell, as small JSON files in one folder."""

    folder: Path

    def get(self, cell: Cell) -> Result | None:
        """The result of an earlier run; a file that is no such thing counts as none."""
        try:
            entry = msgspec.json.decode((self.folder / f"{cell.key}.json").read_bytes(), type=_Entry)
        except (OSError, msgspec.MsgspecError):
            return None
        whole = entry.cell == msgspec.to_builtins(cell) and entry.result and None not in entry.result.values()
        return entry.result if whole else None

    def put(self, cell: Cell, result: Result) -> Result:
        """Keep a result; what comes back is what a later run will read."""
        encoded = msgspec.json.encode(_Entry(cell, result))
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{cell.key}.json", msgspec.json.format(encoded, indent=1))
        return msgspec.json.decode(encoded, type=_Entry).result


@cache
def engine() -> str:
    """The sum of the code between a network's weights and the figures measured on it."""
    found = hashlib.sha256()
    for path in sorted(_imported([ROOT / file for file in ENGINE])):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def _imported(waiting: list[Path]) -> set[Path]:
    """Files, with all files of this package that they import when they are loaded."""
    found = {*ROOT.glob("networks/*.py")}
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(ast.parse(path.read_bytes()))
    return found


def _imports(module: ast.Module) -> Iterator[Path]:
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(ROOT.name):
            home = ROOT.parent.joinpath(*(statement.module or "").split("."))
            places = [home, *(home / alias.name for alias in statement.names)]
            files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
            yield from (file for file in files if file.is_file() and file.parent != ROOT.parent)
