"""bench: measured latency of the original network and of the small one, in torch and in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Json, Many, Rebuild, reopen

if TYPE_CHECKING:
    from neuron_merging.measuring.latency import Network

RUNTIMES = ("torch", "onnxruntime")
Numbers = Annotated[list[int] | None, Many]
Measured = Annotated[str, Parameter(help="A folder that compress wrote, or an .onnx file.")]


def bench(
    out: Measured,
    /,
    *,
    batch: Numbers = None,
    threads: Numbers = None,
    runtime: Annotated[list[str] | None, Many] = None,
    against: str | None = None,
    runs: int = 30,
    rebuild: Rebuild | None = None,
    json: Json = False,
) -> None:
    """Measure the latency of the original network and of the small one.

    Parameters
    ----------
    batch
        Batch sizes (default 1 and 16); may be repeated.
    threads
        Numbers of threads (default: torch's own); may be repeated.
    runtime
        torch or onnxruntime; may be repeated. The default is torch for a folder, onnxruntime for a file.
    against
        The original's .onnx file, to compare an .onnx file with.
    runs
        The median of this many runs is shown, and between what four of five lie.
    """
    file = out.lower().endswith(".onnx")
    chosen = runtime or (["onnxruntime"] if file else ["torch"])
    if runs < 1 or any(size < 1 for size in (*(batch or ()), *(threads or ()))):
        raise MergingError("runs, batch and threads are at least 1", where="bench")
    if unknown := [name for name in chosen if name not in RUNTIMES]:
        fix = f"Use {' or '.join(RUNTIMES)}."
        raise MergingError(f"{unknown[0]!r} is no runtime", where="--runtime", fix=fix)
    import torch

    from neuron_merging.measuring.latency import timings

    modules, inputs = _of_files(out, against, rebuild) if file else _of_folder(out, rebuild)
    paths = {"original": against, "small": out, "file": out} if file else {}
    rows, own = [], torch.get_num_threads()
    with show.working(f"measuring, {runs} runs"):
        for name, count, networks in _ways(modules, paths, inputs, chosen, threads or [own]):
            for network, found in timings(networks, inputs, batch or (1, 16), runs).items():
                rows += [(name, count, size, network, timing) for size, timing in found.items()]
    torch.set_num_threads(own)
    _shown(rows, runs, json)


def _of_folder(out: str, rebuild: Rebuild | None) -> tuple[dict[str, Any], tuple[Any, ...]]:
    small, base, inputs = reopen(out, rebuild)
    return {"original": base.train(False), "small": small}, inputs


def _of_files(out: str, against: str | None, rebuild: Rebuild | None) -> tuple[dict[str, Any], tuple[Any, ...]]:
    from neuron_merging.tool.models import resolve

    shapes = (rebuild or Rebuild()).input or ()
    named = {"original": against, "small": out} if against else {"file": out}
    found = {name: resolve(path, input=shapes) for name, path in named.items() if path}
    return {name: module for name, (module, _) in found.items()}, next(iter(found.values()))[1]


def _ways(
    modules: Mapping[str, Any],
    paths: Mapping[str, str | None],
    inputs: tuple[Any, ...],
    chosen: list[str],
    threads: list[int],
) -> Iterator[tuple[str, int, Mapping[str, Network]]]:
    """Every runtime with every number of threads."""
    import torch

    from neuron_merging.folder.exporting import file_in_onnxruntime, in_onnxruntime

    for name in chosen:
        for count in threads:
            torch.set_num_threads(count)
            if name == "torch":
                yield name, count, modules
            else:
                made = {key: in_onnxruntime(m, inputs, count) for key, m in modules.items() if not paths.get(key)}
                files = {
                    key: file_in_onnxruntime(path, count) for key, path in paths.items() if path and key in modules
                }
                yield name, count, {**made, **files}


def _shown(rows: list[tuple[str, int, int, str, Any]], runs: int, json: bool) -> None:
    if json:
        keys = ("runtime", "threads", "batch", "network")
        found = [dict(zip(keys, row[:4], strict=True)) | {"seconds": row[4]} for row in rows]
        return show.json({"runs": runs, "measured": found})
    first = {row[:3]: row[4] for row in reversed(rows)}
    lines = [(*row[:4], str(row[4]), f"{first[row[:3]].median / row[4].median:.2f}x") for row in rows]
    title = f"Latency, median of {runs} runs (four of five lie between)"
    show.table(title, ("runtime", "threads", "batch", "network", "ms", "faster"), lines)
