"""export: the small network as a file for other programs."""

from __future__ import annotations

from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Folder, Json, Rebuild, reopen


def export(out: Folder, target: str, /, *, rebuild: Rebuild | None = None, json: Json = False) -> None:
    """Write the small network as ONNX or .pt2 and check the file against the module.

    Parameters
    ----------
    target
        The file to write: model.onnx or model.pt2.
    """
    from neuron_merging.tool.export import export as write

    small, _, inputs = reopen(out, rebuild)
    with show.working(f"writing {target}"):
        difference = write(small, inputs, target)
    show.facts({"file": target, "largest difference": difference}, json)
