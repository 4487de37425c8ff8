"""The command `bench`: latency of the original and the small network in torch and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from neuron_merging.cli import console
from neuron_merging.cli.model_options import JsonFlag, RebuildOptions, Repeatable, load_folder_models
from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from neuron_merging.evaluation.latency import NetworkCallable

RUNTIMES = ("torch", "onnxruntime")
IntegerList = Annotated[list[int] | None, Repeatable]
FolderOrFile = Annotated[str, Parameter(help="A folder that compress wrote, or an .onnx file.")]


def bench(
    out: FolderOrFile,
    /,
    *,
    batch: IntegerList = None,
    threads: IntegerList = None,
    runtime: Annotated[list[str] | None, Repeatable] = None,
    against: str | None = None,
    runs: int = 30,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Measure the latency of the original network and of the small one.

    Parameters
    ----------
    batch
        Batch sizes (default 1 and 16, or the only one that the network takes); may be repeated.
    threads
        Numbers of threads (default: torch's own); may be repeated.
    runtime
        torch or onnxruntime; may be repeated. The default is torch for a folder, onnxruntime for a file.
    against
        The original's .onnx file, to compare an .onnx file with.
    runs
        Number of runs. The table shows their median and the range of the middle four fifths.
    """
    file = out.lower().endswith(".onnx")
    chosen = runtime or (["onnxruntime"] if file else ["torch"])
    if runs < 1 or any(size < 1 for size in (*(batch or ()), *(threads or ()))):
        raise MergingError("runs, batch and threads must be at least 1", where="bench")
    if unknown := [name for name in chosen if name not in RUNTIMES]:
        fix = f"Use {' or '.join(RUNTIMES)}."
        raise MergingError(f"{unknown[0]!r} is not a runtime", where="--runtime", fix=fix)
    import torch

    from neuron_merging.evaluation.latency import find_default_batches, measure_timings

    modules, inputs = _load_from_files(out, against, rebuild) if file else _load_from_folder(out, rebuild)
    paths = {"original": against, "small": out, "file": out} if file else {}
    rows, default_threads = [], torch.get_num_threads()
    with console.show_step(f"measuring, {runs} runs"):
        for name, count, networks in _iterate_runtimes(modules, paths, inputs, chosen, threads or [default_threads]):
            sizes = batch or find_default_batches(networks, inputs)
            for network, found in measure_timings(networks, inputs, sizes, runs).items():
                rows += [(name, count, size, network, timing) for size, timing in found.items()]
    # `_iterate_runtimes` changes it for the whole process.
    torch.set_num_threads(default_threads)
    _print_timings(rows, runs, json)


def _load_from_folder(out: str, rebuild: RebuildOptions | None) -> tuple[dict[str, Any], tuple[Any, ...]]:
    small, base, inputs = load_folder_models(out, rebuild)
    # A network that was built and not loaded is in training mode.
    return {"original": base.train(False), "small": small}, inputs


def _load_from_files(
    out: str, against: str | None, rebuild: RebuildOptions | None
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    from neuron_merging.cli.model_loading import load_model

    shapes = (rebuild or RebuildOptions()).input or ()
    path_by_name = {"original": against, "small": out} if against else {"file": out}
    loaded = {name: load_model(path, input=shapes) for name, path in path_by_name.items() if path}
    return {name: module for name, (module, _) in loaded.items()}, next(iter(loaded.values()))[1]


def _iterate_runtimes(
    modules: Mapping[str, Any],
    paths: Mapping[str, str | None],
    inputs: tuple[Any, ...],
    chosen: list[str],
    threads: list[int],
) -> Iterator[tuple[str, int, Mapping[str, NetworkCallable]]]:
    """Yield the networks for every runtime and number of threads."""
    import torch

    from neuron_merging.onnx.export import make_ort_callable, open_ort_callable

    for name in chosen:
        for count in threads:
            torch.set_num_threads(count)
            if name == "torch":
                yield name, count, modules
            else:
                exported = {
                    key: make_ort_callable(m, inputs, count) for key, m in modules.items() if not paths.get(key)
                }
                files = {key: open_ort_callable(path, count) for key, path in paths.items() if path and key in modules}
                yield name, count, {**exported, **files}


def _print_timings(rows: list[tuple[str, int, int, str, Any]], runs: int, json: bool) -> None:
    if json:
        keys = ("runtime", "threads", "batch", "network")
        measured = [dict(zip(keys, row[:4], strict=True)) | {"seconds": row[4]} for row in rows]
        return console.print_json({"runs": runs, "measured": measured})
    # The speed-up is relative to the first network of a setting, the original: later rows overwrite in reverse.
    first = {row[:3]: row[4] for row in reversed(rows)}
    lines = [(*row[:4], str(row[4]), f"{first[row[:3]].median / row[4].median:.2f}x") for row in rows]
    title = f"Latency, median of {runs} runs (range of the middle four fifths)"
    console.print_table(title, ("runtime", "threads", "batch", "network", "ms", "faster"), lines)
