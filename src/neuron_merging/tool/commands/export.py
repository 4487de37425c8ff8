"""export: the small network as a file for other programs."""

from __future__ import annotations

from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Folder, Json, Rebuild, Texts, reopen


def export(
    out: Folder,
    target: str,
    /,
    *,
    dynamic: Texts = None,
    rebuild: Rebuild | None = None,
    json: Json = False,
) -> None:
    """Write the small network as ONNX or .pt2, for any batch size, and check the file against the module.

    Parameters
    ----------
    target
        The file to write: model.onnx or model.pt2.
    dynamic
        A further dimension whose size shall be free, as 2, or 1:2 for dimension 2 of the input 1 alone; may be
        repeated.
    """
    from neuron_merging.folder.exporting import export as write

    small, _, inputs = reopen(out, rebuild)
    with show.working(f"writing {target}"):
        written = write(small, inputs, target, dynamic or ())
    show.facts(written.facts(), json)
