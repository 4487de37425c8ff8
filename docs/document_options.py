"""Show functions of `**options` in the reference as Python shows them: the generator of the site runs no code."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe

DOCUMENTED = ("neuron_merging.api.compress", "neuron_merging.sweeps.grid.sweep")
"""Functions that take their signature and docstring from `CompressConfig`."""


class DocumentOptions(griffe.Extension):
    """Replaces the signature and the docstring that stand in the file by those of the imported function."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if func.path not in DOCUMENTED:
            return
        module, _, name = func.path.rpartition(".")
        found = getattr(import_module(module), name)
        func.docstring = griffe.Docstring(inspect.getdoc(found) or "", parent=func)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    each.name,
                    annotation=str(each.annotation),
                    kind=griffe.ParameterKind[each.kind.name.lower()],
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(found).parameters.values()
            )
        )
