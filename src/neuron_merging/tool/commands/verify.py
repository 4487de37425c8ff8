"""verify: whether a folder is whole and computes what its plan says."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Folder, Json, Rebuild, reopen

if TYPE_CHECKING:
    from torch import nn


def verify(
    out: Folder,
    /,
    *,
    against: str | None = None,
    weights: str | None = None,
    rebuild: Rebuild | None = None,
    json: Json = False,
) -> None:
    """Check a folder: its sums, that it loads, and that it computes what its plan says.

    Parameters
    ----------
    against
        The original network, to compare outputs with; weights, input and arg are for it.
    weights
        Its state dict.
    """
    from neuron_merging import pipeline
    from neuron_merging.errors import FolderError, VerificationError
    from neuron_merging.folder import store

    rebuild = rebuild or Rebuild()
    try:
        manifest = store.check(out)
    except FolderError as fault:
        if not os.path.isdir(out):
            raise
        raise VerificationError(fault.what, where=fault.where, fix=fault.fix) from fault
    small, base, inputs = reopen(out, replace(rebuild, model=against or rebuild.model), weights)
    with show.working("comparing"):
        found = pipeline.verify_plan(manifest.plan, pipeline.analyse(base, inputs), small)
        more = _compared(base, small, inputs) if against else {}
    distance = "no numbers to compare" if found.distance is None else found.distance
    facts = {"files": "sums match", "distance to the zeroed network": distance, "compared": found.compared}
    show.facts({**facts, **more}, json)


def _compared(base: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> dict[str, float]:
    from neuron_merging.cutting.verify import run_small
    from neuron_merging.graph.trees import flatten_outputs

    pairs = zip(*(flatten_outputs(run_small(net, inputs)) for net in (base, small)), strict=True)
    return {"largest difference to the original": max(float((a.double() - b.double()).abs().amax()) for a, b in pairs)}
