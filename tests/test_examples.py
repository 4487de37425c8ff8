"""Every example in a docstring is run. Available names: nm, nn, torch, and the small network `net`."""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.channels.rules.table import OPERATORS
from neuron_merging.merging.protocol import MERGERS
from neuron_merging.selection.criteria import CRITERIA

SOURCE = Path(nm.__file__).parent
AT_LEAST = 90
"""Examples that the package had when this was written: they must not vanish unnoticed."""
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstrings() -> Iterator[tuple[str, str, int]]:
    """Module, text and line of every docstring, read from the source: decorators hide some from doctest's finder."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield module_of(file), text, getattr(node, "lineno", 0)


EXAMPLES = {
    f"{module}:{line}": (module, text)
    for module, text, line in docstrings()
    if any(not example.options.get(doctest.SKIP) for example in doctest.DocTestParser().get_examples(text))
}


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, and registries without what an example has registered."""
    monkeypatch.chdir(tmp_path)
    registries = [(registry, dict(registry)) for registry in (CRITERIA, MERGERS, OPERATORS)]
    yield
    for registry, before in registries:
        for added in registry.keys() - before.keys():
            del registry[added]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_happens(name: str, untouched: None) -> None:
    module, text = EXAMPLES[name]
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    known = {**vars(import_module(module)), "nm": nm, "nn": nn, "torch": torch, "net": net}
    test = doctest.DocTestParser().get_doctest(text, known, name, module, 0)
    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append).failed
    assert not failed, "".join(said)


def test_examples_do_not_vanish() -> None:
    examples = [example for _, text in EXAMPLES.values() for example in doctest.DocTestParser().get_examples(text)]
    assert sum(not example.options.get(doctest.SKIP) for example in examples) >= AT_LEAST
