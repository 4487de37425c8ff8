"""outcome: a sweep as it came out, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Row:
    """One cell as it came out; what is None was not measured, and `refused` says why nothing was."""

    target: str
    criterion: str
    merger: str
    parameters: int | None = None
    macs: int | None = None
    fidelity: float | None = None
    score: float | None = None
    seconds: float | None = None
    refused: str = ""

    @property
    def mark(self) -> float | None:
        """What rows are ranked by: the score, else fidelity."""
        return self.fidelity if self.score is None else self.score


@dataclass(frozen=True)
class Sweep:
    """Every combination that was tried, and how good it is. Printed, a table for people.

    Attributes
    ----------
    original
        The network itself.
    rows
        One for each combination, in the order in which they were asked for.
    metric
        What the score is: "accuracy %" of labelled images, "score" of a function, otherwise "fidelity".

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> found = nm.sweep(net, torch.zeros(1, 4), ratio=[0.25, 0.5], merger=["none", "moments"], jobs=1)
    >>> [(row.target, row.merger, row.parameters) for row in found.rows][:2]
    [('ratio 0.25', 'none', 86), ('ratio 0.25', 'moments', 86)]
    """

    original: Row
    rows: tuple[Row, ...]
    metric: str = "fidelity"

    @property
    def best(self) -> dict[str, Row]:
        """For each target the combination with the highest score."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if row.mark is not None and (row.target not in found or row.mark > (found[row.target].mark or 0.0)):
                found[row.target] = row
        return found

    @property
    def size(self) -> str:
        """What networks differ in: multiply-accumulates, or parameters where those were limited."""
        return "parameters" if self.rows and all(row.target.startswith("params") for row in self.rows) else "macs"

    def curves(self) -> dict[str, list[tuple[float, float, Row]]]:
        """By criterion and merger: share of the size that is left, score, and the row, from small to large."""
        several = {name: len({getattr(row, name) for row in self.rows}) > 1 for name in ("criterion", "merger")}
        found: dict[str, list[tuple[float, float, Row]]] = {}
        whole = getattr(self.original, self.size)
        for row in self.rows:
            if row.mark is not None:
                names = [getattr(row, name) for name in ("criterion", "merger") if several[name]]
                kind = "ratio" if row.target.startswith("ratio") and self._mixed else ""
                key = ", ".join(filter(None, [*names, kind])) or row.merger
                found.setdefault(key, []).append((getattr(row, self.size) / max(1, whole), row.mark, row))
        return {key: sorted(line, key=lambda point: point[0]) for key, line in found.items()}

    @property
    def _mixed(self) -> bool:
        """Whether budgets and ratios stand side by side."""
        return len({row.target.startswith("ratio") for row in self.rows}) > 1

    def pivot(self) -> tuple[list[str], list[tuple[str, list[Row | None]]]]:
        """Targets, and for each criterion and merger its row at each of them."""
        targets = list(dict.fromkeys(row.target for row in self.rows))
        found: dict[str, dict[str, Row]] = {}
        for row in self.rows:
            found.setdefault(f"{row.criterion}, {row.merger}", {})[row.target] = row
        return targets, [(name, [own.get(target) for target in targets]) for name, own in found.items()]

    def lines(self) -> list[dict[str, object]]:
        """One for each row, the original first, for files."""
        return [_line(row, self.original) for row in (self.original, *self.rows)]

    def __str__(self) -> str:
        return "\n".join("  ".join(cells) for cells in padded([HEADINGS, *self.table()]))

    def table(self) -> list[tuple[str, ...]]:
        """One line for each row, as texts; a star marks the best of its target."""
        best = {id(row) for row in self.best.values()}
        return [_shown(row, self, id(row) in best) for row in (self.original, *self.rows)]


SIZES = {"macs": "multiply-accumulates", "parameters": "parameters"}
HEADINGS = ("target", "criterion", "merger", "parameters", "MACs", "fidelity", "score", "seconds")


def _line(row: Row, original: Row) -> dict[str, object]:
    shares = {
        "parameters share": row.parameters / max(1, original.parameters or 1) if row.parameters else None,
        "macs share": row.macs / max(1, original.macs or 1) if row.macs else None,
    }
    return {**msgspec.to_builtins(row), **shares}


def _shown(row: Row, sweep: Sweep, best: bool) -> tuple[str, ...]:
    names = (row.target, row.criterion, row.merger)
    if row.refused:
        return (*names, f"refused: {row.refused}", "", "", "", "")
    line = _line(row, sweep.original)
    sizes = [f"{line[key]:.1%}" if line[key] is not None else "" for key in ("parameters share", "macs share")]
    fidelity = "" if row.fidelity is None else f"{row.fidelity:.4f}"
    score = "" if row.score is None else f"{row.score:.2f}" if sweep.metric == "accuracy %" else f"{row.score:.4g}"
    star = ("*" if best else " ") if row is not sweep.original else ""
    marked = (fidelity, score + star) if row.score is not None else (fidelity + star, score)
    return (*names, *sizes, *marked, "" if row.seconds is None else f"{row.seconds:.1f}")


def padded(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Texts of equal width in each column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
