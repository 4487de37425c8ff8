"""cli: the commands. Tables go to stdout, progress and messages to stderr; torch is imported late."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import neuron_merging
from neuron_merging import recipe as recipes
from neuron_merging.errors import MergingError
from neuron_merging.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.data import FolderImages, Images
    from neuron_merging.mergers import Merger
    from neuron_merging.pipeline import Compressed, Summary

EXIT_CODES = {"ModelError": 3, "FolderError": 3, "NothingToPrune": 4, "VerificationError": 5, "MergingError": 2}
"""By the class of the error; 1 is a failing disk or a bug of ours, 130 an interruption."""

app = App(
    name="neuron-merging",
    help="Make a trained network smaller, at once and without data: removed channels are merged into those that stay.",
    help_epilogue="Exit codes: 0 done, 2 usage, 3 model not loaded or captured, 4 nothing to prune, "
    "5 verification failed, 130 interrupted.",
    version=neuron_merging.__version__,
    suppress_keyboard_interrupt=False,
)
Many = Parameter(negative=(), consume_multiple=False)
Texts = Annotated[list[str] | None, Many]
Switch = Annotated[bool | None, Parameter(negative=())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code says how it went (see docs/errors.md)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.disable()  # torch logs tracebacks of attempts that are allowed to fail
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return 0
    except CycloptsError as error:
        return _fail(str(error), 2)
    except MergingError as error:
        codes = (EXIT_CODES.get(kind.__name__) for kind in type(error).__mro__)
        return _fail(str(error), next(code for code in codes if code))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(str(error), 1)
    finally:
        logging.disable(logging.NOTSET)


@app.command
def compress(
    model: str,
    out: str,
    /,
    *,
    ratio: float | None = None,
    layer: Texts = None,
    ignore: Texts = None,
    scope: str | None = None,
    criterion: str | None = None,
    merger: str | None = None,
    round_to: int | None = None,
    seed: int | None = None,
    calibrate: str | None = None,
    calibrate_images: int | None = None,
    eval: str | None = None,
    weights: str | None = None,
    input: Texts = None,
    arg: Texts = None,
    recipe: str | None = None,
    overwrite: Switch = None,
    dry_run: Switch = None,
    json: Switch = None,
) -> None:
    """Remove channels, merge them into those that stay, and write a folder.

    Parameters
    ----------
    model
        A built-in network's name, package.module:factory, timm:NAME, torchvision:NAME, a .pt2 file, or a folder.
    out
        The folder to write.
    ratio
        Share of channels to remove from each group (default 0.5).
    layer
        Another ratio for some layers, as 'PATTERN=RATIO'; may be repeated.
    ignore
        Layers to leave whole, as a pattern; may be repeated.
    scope
        "internal" (default) or "all": residual streams too.
    criterion
        Which channels stay: l1, l2 (default), l2-gm, random.
    merger
        none, cosine, moments or calibrated, with options after a colon: cosine:threshold=0.2,bn=released.
    round_to
        Keep a multiple of this many channels.
    seed
        For the criterion "random" and for synthetic inputs.
    calibrate
        Unlabelled images to measure statistics on, as NAME or NAME:PATH (digits, cifar-10, …).
    calibrate_images
        How many of them (default 512).
    eval
        Labelled images to give the accuracy before and after on, as NAME or NAME:PATH.
    weights
        A state dict for the network: .safetensors, .pt or .pth.
    input
        Shape of an example input, as 1,3,32,32 or 2,16:int64; repeated for several inputs.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    recipe
        A YAML file with any of these flags as keys; flags win.
    overwrite
        Replace the folder if it exists.
    dry_run
        Do everything but write.
    json
        Print JSON in place of tables.
    """
    flags = {k: v for k, v in locals().items() if k not in ("out", "recipe")}
    flags |= {"layer": recipes.pairs(layer, "--layer"), "arg": recipes.pairs(arg, "--arg")}
    chosen = recipes.resolve(recipe, flags)
    _say("loading")
    from neuron_merging import models
    from neuron_merging.pipeline import compress_captured

    settings = chosen.settings()
    images = recipes.open_data(chosen.eval, "test") if chosen.eval else None
    if not chosen.dry_run:
        _check_target(chosen, out)
    network, inputs = _network(chosen)
    _check_images(network, chosen.calibrate, getattr(settings.merger, "batches", ()))
    _check_images(network, chosen.eval, (x for x, _ in images.batches(2)) if images else ())
    _say("compressing")
    graph = models.captured(network, inputs)
    small = compress_captured(network, graph, inputs, settings)
    _finish(small, network, _resolved(chosen, settings.method(graph)), out, images)


@app.command
def inspect(
    model: str, /, *, weights: str | None = None, input: Texts = None, arg: Texts = None, json: bool = False
) -> None:
    """List the groups of channels that can be removed, and what stands in the way of the rest.

    Parameters
    ----------
    model
        As for compress; so are weights, input and arg.
    json
        Print JSON in place of tables.
    """
    chosen = _source(model, weights, input, arg)
    from neuron_merging import pipeline

    network, inputs = _network(chosen)
    found = pipeline.inspect(network, inputs)
    folds = _folds(network, inputs)
    if json:
        return _print_json({**msgspec.to_builtins(found), "cosine": folds})
    rows = [
        (g.name, g.channels, g.parameters, "yes" if g.residual else "", ", ".join(g.consumers), folds.get(g.name, ""))
        for g in found.groups
    ]
    _table("Groups", ("group", "channels", "parameters", "residual", "read by", "cosine merging"), rows)
    _refusals(found.refusals)


@app.command
def verify(
    out: str,
    /,
    *,
    against: str | None = None,
    weights: str | None = None,
    model: str | None = None,
    input: Texts = None,
    arg: Texts = None,
    json: bool = False,
) -> None:
    """Check a folder: its sums, that it loads, and that it computes what its plan says.

    Parameters
    ----------
    out
        A folder that compress wrote.
    against
        The original network, to compare outputs with; weights and arg are for it.
    model
        The network to rebuild it with, if the folder's recipe names none.
    """
    from neuron_merging import apply, models, store
    from neuron_merging.verify import VerificationError

    try:
        manifest, _ = store.read(out, tuple(store.read(out, ())[0].files))
        small, base, inputs = _reopen(out, against or model, weights, input, arg)
        error = apply.distance(manifest.plan, base, models.captured(base, inputs), small, inputs)
    except store.FolderError as fault:
        if not os.path.isdir(out):
            raise
        raise VerificationError(fault.what, where=fault.where, fix=fault.fix) from fault
    facts: dict[str, Any] = {"files": "sums match", "distance to the zeroed network": error}
    if against:
        facts |= _compared(base, small, inputs)
    _facts(facts, json)


@app.command
def apply(
    plan: str,
    model: str,
    out: str,
    /,
    *,
    merger: str | None = None,
    weights: str | None = None,
    input: Texts = None,
    arg: Texts = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Make the same cut in other weights of the same network.

    Parameters
    ----------
    plan
        A folder that compress wrote, or its plan.json.
    model
        As for compress; so are weights, input, arg and merger.
    out
        The folder to write.
    overwrite
        Replace the folder if it exists.
    """
    chosen = _source(model, weights, input, arg, merger=merger, overwrite=overwrite, json=json)
    from neuron_merging import models, store
    from neuron_merging.apply import cut_again

    settings = chosen.settings()
    _check_target(chosen, out)
    cut = store.read_plan(plan)
    network, inputs = _network(chosen)
    graph = models.captured(network, inputs)
    method = settings.method(graph)
    small = cut_again(cut, network, graph, inputs, method)
    _finish(small, network, _resolved(chosen, method), out)


@app.command
def export(
    out: str, target: str, /, *, model: str | None = None, input: Texts = None, arg: Texts = None, json: bool = False
) -> None:
    """Write the small network as ONNX or .pt2 and check the file against the module.

    Parameters
    ----------
    out
        A folder that compress wrote.
    target
        The file to write: model.onnx or model.pt2.
    model
        The network to rebuild it with, if the folder's recipe names none.
    input
        Another shape of the example input, for instance with another batch size.
    """
    from neuron_merging.export import export as write

    small, _, inputs = _reopen(out, model, None, input, arg)
    _facts({"file": target, "largest difference": write(small, inputs, target)}, json)


@app.command
def bench(
    out: str,
    /,
    *,
    batch: Annotated[list[int] | None, Many] = None,
    runs: int = 30,
    model: str | None = None,
    input: Texts = None,
    arg: Texts = None,
    json: bool = False,
) -> None:
    """Measure the latency of the original network and of the small one.

    Parameters
    ----------
    out
        A folder that compress wrote.
    batch
        Batch sizes (default 1 and 16); may be repeated.
    runs
        The median of this many runs is shown.
    model
        The network to rebuild it with, if the folder's recipe names none.
    """
    import torch

    from neuron_merging.bench import latencies

    if runs < 1 or any(size < 1 for size in batch or ()):
        raise MergingError("runs and batch are at least 1", where="bench")
    small, base, inputs = _reopen(out, model, None, input, arg)
    networks = {"original": base.train(False), "small": small}
    _say(f"measuring, {torch.get_num_threads()} threads")
    found = latencies(networks, inputs, batch or (1, 16), runs)
    if json:
        return _print_json({"threads": torch.get_num_threads(), "seconds": found})
    rows = [
        (size, f"{before * 1e3:.2f}", f"{found['small'][size] * 1e3:.2f}", f"{before / found['small'][size]:.2f}x")
        for size, before in found["original"].items()
    ]
    _table(f"Latency, median of {runs} runs", ("batch", "original ms", "small ms", "faster"), rows)


@app.command
def demo() -> None:
    """Train a small network on scikit-learn's digits and compress it in three ways."""
    from neuron_merging import demo

    demo.main()


# Networks


def _source(model: str, weights: str | None, input: list[str] | None, arg: list[str] | None, **more: Any) -> Recipe:
    flags = {"model": model, "weights": weights, "input": input, "arg": recipes.pairs(arg, "--arg"), **more}
    return recipes.resolve(None, flags)


def _network(chosen: Recipe) -> tuple[nn.Module, tuple[Any, ...]]:
    from neuron_merging import models

    assert chosen.model is not None
    network, inputs = models.resolve(chosen.model, weights=chosen.weights, input=chosen.input, arg=chosen.arg)
    if chosen.weights is None and models.is_untrained(chosen.model, chosen.arg):
        _say("no --weights were given: the network's weights are random")
    return network, inputs


def _reopen(
    out: str, model: str | None, weights: str | None, input: list[str] | None, arg: list[str] | None
) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """The small network of a folder, the original (with weights if given), and example inputs."""
    _say("loading")
    from neuron_merging import models, store

    flags = {"model": model, "weights": weights, "input": input, "arg": recipes.pairs(arg, "--arg")}
    given = {k: v for k, v in flags.items() if v is not None}
    chosen = msgspec.structs.replace(store.recipe_of(out), **{"weights": None, **given})
    small = store.load(out, build=(lambda: models.build(model, chosen.arg, fresh=True)) if model else None)
    assert chosen.model is not None
    base, inputs = models.resolve(
        chosen.model, weights=weights, input=chosen.input, arg=chosen.arg, fresh=model is None
    )
    return small, base, inputs


def _check_target(chosen: Recipe, out: str) -> None:
    from neuron_merging import store

    store.check_target(out, chosen.overwrite)
    source, target = os.path.realpath(chosen.model or ""), os.path.realpath(out)
    if os.path.exists(source) and os.path.commonpath([source, target]) == target:
        raise MergingError(
            "the result would replace the network that it is made from", where=out, fix="Give another OUT."
        )


def _check_images(network: nn.Module, data: str | None, batches: Iterable[Any]) -> None:
    """Refuse images that the network does not take, before any work is done."""
    from neuron_merging.verify import VerificationError, run_small

    for batch in islice(batches, 1):
        try:
            run_small(network, (batch[:2],))
        except VerificationError as error:
            what = f"the network does not take a batch of {tuple(batch[:2].shape)}: {error.__cause__}"
            raise MergingError(what, where=str(data), fix="Give the data that it was trained on.") from error


def _resolved(chosen: Recipe, method: Merger) -> Recipe:
    """The recipe with what was left open filled in, and paths that hold from any folder."""
    from neuron_merging.mergers import MERGERS

    names: dict[type, str] = {kind: name for name, kind in MERGERS.items()}
    merger = chosen.merger or names.get(type(method), "calibrated")
    model = chosen.model or ""
    return msgspec.structs.replace(
        chosen, merger=merger, model=os.path.abspath(model) if os.path.exists(model) else model
    )


def _folds(network: nn.Module, inputs: Any) -> dict[str, str]:
    """For each group, whether the paper's merging applies, and otherwise why not."""
    from neuron_merging import models
    from neuron_merging.pipeline import NothingToPrune, Settings, compress_captured

    settings = Settings(merger="cosine", scope="all")
    try:
        plan = compress_captured(network, models.captured(network, inputs), inputs, settings, verify=False).plan
    except NothingToPrune:
        return {}
    reasons = {g.name: [h.partition(": pruned: ")[2] for h in g.how] for g in plan.groups}
    return {name: next(filter(None, whys), "yes") for name, whys in reasons.items()}


# Results


def _finish(
    small: Compressed, network: nn.Module, chosen: Recipe, out: str, images: Images | FolderImages | None = None
) -> None:
    """Evaluate, write and print."""
    from neuron_merging import store

    scores = _accuracies(network, small.model, images) if images else None
    if not chosen.dry_run:
        store.save(small, out, recipe=chosen, accuracy=scores, overwrite=chosen.overwrite)
    if chosen.json:
        written = None if chosen.dry_run else out
        return _print_json({**msgspec.to_builtins(small.summary), "accuracy": scores, "written": written})
    _summary(small.summary, scores)
    _say("nothing written (dry run)" if chosen.dry_run else f"written to {out}")


def _accuracies(network: nn.Module, small: nn.Module, images: Images | FolderImages) -> tuple[float, float]:
    from neuron_merging import metrics

    _say(f"evaluating on {images.name}, {len(images)} images")
    before, after = (metrics.accuracy(*metrics.predict(net, images.batches(256))) for net in (network, small))
    return before, after


def _compared(base: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> dict[str, float]:
    from neuron_merging.verify import flatten_outputs, run_small

    pairs = zip(*(flatten_outputs(run_small(net, inputs)) for net in (base, small)), strict=True)
    return {"largest difference to the original": max(float((a - b).abs().amax()) for a, b in pairs)}


def _summary(summary: Summary, scores: tuple[float, float] | None) -> None:
    sizes = {"parameters": summary.parameters, "MACs": summary.macs}
    rows: list[tuple[Any, ...]] = [(k, f"{a:,}", f"{b:,}", f"{b / max(a, 1) - 1:+.1%}") for k, (a, b) in sizes.items()]
    if scores:
        rows.append(("accuracy", f"{scores[0]:.2f} %", f"{scores[1]:.2f} %", f"{scores[1] - scores[0]:+.2f}"))
    _table("", ("", "before", "after", "change"), rows)
    groups = [(g.name, g.before, g.after, "; ".join(g.how)) for g in summary.groups]
    _table("Channels", ("group", "before", "after", "how"), groups)
    _refusals(summary.refusals)
    for note in summary.notes:
        _say(f"note: {note}")


def _refusals(refusals: Iterable[Any]) -> None:
    rows = [(r.layer, r.channels, f"{r.operator} {r.why}", r.place) for r in refusals]
    if rows:
        _table("Kept whole", ("layer", "channels", "why", "where"), rows)


def _facts(facts: dict[str, Any], json: bool) -> None:
    if json:
        return _print_json(facts)
    _table("", ("", ""), [(k, f"{v:.2e}" if isinstance(v, float) else v) for k, v in facts.items()], header=False)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], header: bool = True) -> None:
    table = Table(title=title or None, title_justify="left", show_header=header)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def _say(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(escape(message), style="dim", highlight=False)


def _fail(message: str, code: int) -> int:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(message)}", highlight=False)
    return code
