"""All facts about an operator are in its row of the table: no other code tests operators by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import neuron_merging as nm
from neuron_merging.channels.rules.table import OPERATORS

SOURCE = Path(nm.__file__).parent
OTHER_TABLES = ("onnx",)
"""ONNX files have operators of their own, with a table of their own; patterns of them are fused by name."""
OTHER_NODES = ("fx",)
"""What a node of torch.fx has as `op` is no operator, but the kind of the node."""


def mentions_operator(expression: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == "op"
        and not (isinstance(part.value, ast.Name) and part.value.id in OTHER_NODES)
        for part in ast.walk(expression)
    )


def asks_by_name(tree: ast.AST) -> Iterator[str]:
    """Comparisons of a node's operator with anything but another node's, and questions about its spelling."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Compare):
            mentioned = {mentions_operator(side) for side in (part.left, *part.comparators)}
            if mentioned == {True, False}:
                yield ast.unparse(part)
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            if part.func.attr in ("startswith", "endswith") and mentions_operator(part.func.value):
                yield ast.unparse(part)
        elif isinstance(part, ast.Match) and mentions_operator(part.subject):
            yield ast.unparse(part.subject)


@pytest.mark.parametrize(
    "code",
    [
        "node.op == 'relu'",
        "node.op in ('relu', 'gelu')",
        "'embedding' in node.op",
        "node.op not in NAMES",
        "self.op.startswith('pad')",
        "match node.op:\n    case 'relu': pass",
    ],
)
def test_a_question_by_name_is_seen(code: str) -> None:
    assert list(asks_by_name(ast.parse(code)))


@pytest.mark.parametrize("code", ["node.op != new.op", "fx.op == 'output'", "OPERATORS.get(node.op)"])
def test_other_comparisons_are_not(code: str) -> None:
    assert not list(asks_by_name(ast.parse(code)))


def test_no_code_asks_for_an_operator_by_its_name() -> None:
    files = [file for file in SOURCE.rglob("*.py") if file.relative_to(SOURCE).parts[0] not in OTHER_TABLES]
    found = {file.name: list(asks_by_name(ast.parse(file.read_text(encoding="utf-8")))) for file in files}
    assert len(files) > 100 and {name: asks for name, asks in found.items() if asks} == {}


def test_an_operator_has_one_row() -> None:
    tree = ast.parse((SOURCE / "channels/rules/table.py").read_text(encoding="utf-8"))
    calls = [part for part in ast.walk(tree) if isinstance(part, ast.Call) and ast.unparse(part.func) == "operator"]
    names = [name for call in calls for name in ast.literal_eval(call.args[0]).split()]
    assert len(names) == len(set(names)) > 250 and OPERATORS.keys() >= set(names)
