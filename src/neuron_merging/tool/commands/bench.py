"""bench: measured latency of the original network and of the small one."""

from __future__ import annotations

from typing import Annotated

from neuron_merging.errors import MergingError
from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Folder, Json, Many, Rebuild, reopen


def bench(
    out: Folder,
    /,
    *,
    batch: Annotated[list[int] | None, Many] = None,
    runs: int = 30,
    rebuild: Rebuild | None = None,
    json: Json = False,
) -> None:
    """Measure the latency of the original network and of the small one.

    Parameters
    ----------
    batch
        Batch sizes (default 1 and 16); may be repeated.
    runs
        The median of this many runs is shown.
    """
    if runs < 1 or any(size < 1 for size in batch or ()):
        raise MergingError("runs and batch are at least 1", where="bench")
    import torch

    from neuron_merging.measuring.latency import latencies

    small, base, inputs = reopen(out, rebuild)
    threads = torch.get_num_threads()
    with show.working(f"measuring, {threads} threads"):
        found = latencies({"original": base.train(False), "small": small}, inputs, batch or (1, 16), runs)
    if json:
        return show.json({"threads": threads, "seconds": found})
    rows = [
        (size, f"{before * 1e3:.2f}", f"{found['small'][size] * 1e3:.2f}", f"{before / found['small'][size]:.2f}x")
        for size, before in found["original"].items()
    ]
    show.table(f"Latency, median of {runs} runs", ("batch", "original ms", "small ms", "faster"), rows)
