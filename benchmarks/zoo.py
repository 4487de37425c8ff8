"""Prune third-party networks with random weights: what is prunable, what is not and why, and is the result right?

    make zoo                                        installs the packages and runs all networks
    python benchmarks/zoo.py [--only timm] [--sample] [--limit 900] [--csv zoo.csv] [--page docs/zoo.md]

Nothing is downloaded. Every network runs in a process of its own with a limit of time: a forward in training mode
first, so that statistics belong to the weights, then an analysis, and half of every group removed in both scopes,
plainly and with the default merger. A plainly cut network is compared, in double precision, with the original's own
forward in which all entries that were cut are zero: no graph and no code of the verification is used for that.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import resource
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import zoo_networks
from processes import alone

import neuron_merging as nm
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.config import CompressConfig
from neuron_merging.evaluation.parameter_coverage import compute_parameter_coverage
from neuron_merging.graph.example_inputs import call_model, clone_inputs, flatten_outputs, normalize_inputs
from neuron_merging.pipeline import compress_analysis
from neuron_merging.pruning.trial_prune import resolve_kept_units

SCOPES, MERGERS = ("internal", "all"), ("none", "moments")
CLOSE = 1e-5
"""Tolerance relative to the largest entry of an output, in float64; some networks compute parts in float32."""
TINY = 1e-3
"""A parameter whose entries are all smaller hides errors in what it multiplies."""
LIMIT = 900
TARGETS = {"transformers": (0.75, 0.95), "timm": (0.85, 0.999), "torchvision": (0.96, 0.999)}
"""Expected median of the prunable share of the parameters, for the scopes internal and all."""
Row = dict[str, Any]


# One network, in a process of its own


def judged(name: str, mergers: Sequence[str] = MERGERS) -> Row:
    """The measurements of one network."""
    entry = zoo_networks.everything()[name]
    torch.manual_seed(0)
    model, inputs = entry.make(), entry.inputs()
    settle(model, inputs)
    start = time.perf_counter()
    with _counted() as exports:
        analysis = nm.analyse(model, inputs)
    found = compute_parameter_coverage(analysis)
    row: Row = {
        "parameters": found.parameters, "groups": len(analysis.channels.groups), "exports": exports["count"],
        "analysis": time.perf_counter() - start - exports["seconds"], "internal": found.reachable[0],
        "all": found.reachable[1], "unused": found.share(found.unused.parameters),
        "refused": [(part.why, found.share(part.parameters)) for part in found.refused],
    }  # fmt: skip
    start = time.perf_counter()
    for scope in SCOPES:
        for merger in mergers:
            row[f"{scope} {merger}"] = _cut(analysis, scope, merger)
    row["seconds"] = time.perf_counter() - start
    row["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return row


def settle(model: nn.Module, inputs: Any) -> None:
    """Set batch-norm statistics that fit the random weights."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
            _awaken_norm(module)
    _awaken(model)
    with torch.no_grad():
        try:
            call_model(model.train(), clone_inputs(normalize_inputs(inputs, model)))
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError):
            pass  # training asks for targets
    model.eval()


@torch.no_grad()
def _awaken(model: nn.Module) -> None:
    """Fill heads, gates and scales that are initialised to zero: behind them, any cut would seem right."""
    for name, tensor in model.named_parameters():
        if name.endswith("bias") or not tensor.is_floating_point() or not tensor.numel():
            continue
        if float(tensor.abs().max()) > TINY:
            continue
        if tensor.ndim > 1:
            tensor.normal_(std=max(1, tensor[0].numel()) ** -0.5)
        else:
            tensor.uniform_(0.25, 0.75)


@torch.no_grad()
def _awaken_norm(norm: nn.modules.batchnorm._BatchNorm) -> None:
    """Enlarge scales with a tiny initial value: behind dozens of them, no signal is left."""
    if norm.affine and float(norm.weight.abs().mean()) < 0.1:
        norm.weight.uniform_(0.5, 1.5)


class _counted:
    """Count the exports of a network and their time."""

    def __enter__(self) -> dict[str, float]:
        found, export = {"count": 0, "seconds": 0.0}, torch.export.export

        def counting(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return export(*arguments, **options)
            finally:
                found["count"] += 1
                found["seconds"] += time.perf_counter() - start

        self._patch = mock.patch.object(torch.export, "export", counting)
        self._patch.start()
        return found

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def _cut(analysis: nm.Analysis, scope: str, merger: str) -> Any:
    """Return the outcome of one cut: "nothing", the result of the independent check, or the error."""
    try:
        small = _plain(analysis, scope) if merger == "none" else _default(analysis, scope)
    except nm.NothingToPrune:
        return "nothing"
    except nm.MergingError as error:
        return f"error: {type(error).__name__}: {error.what}"[:300]
    if merger != "none":
        return "cut"
    try:
        return distance(analysis, small)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"unchecked: {type(error).__name__}: {error}"[:300]


def _plain(analysis: nm.Analysis, scope: Any) -> nm.Compressed:
    """Compress without a verdict, because only correctness matters here, not fidelity."""
    return compress_analysis(analysis, CompressConfig(ratio=0.5, scope=scope, merger="none"), judge=False)


def _default(analysis: nm.Analysis, scope: Any) -> nm.Compressed:
    """Compress with all defaults but one: synthesising inputs would take minutes."""
    return nm.compress(analysis, ratio=0.5, scope=scope, effort="fast")


def distance(analysis: nm.Analysis, small: nm.Compressed) -> float:
    """How far the small network is from the original whose removed entries are zero, by both networks' own code.

    Code that only runs in single precision is compared in it, and has to be as close.
    """
    try:
        return _distance(analysis, small, torch.float64)
    except RuntimeError:
        return _distance(analysis, small, torch.float32)


@torch.no_grad()
def _distance(analysis: nm.Analysis, small: nm.Compressed, dtype: torch.dtype) -> float:
    wide = copy.deepcopy(small.model).to(dtype).eval()
    reference = copy.deepcopy(analysis.model).to(dtype).eval()
    kept: dict[str, Any] = {}
    inputs = torch.utils._pytree.tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, analysis.inputs
    )
    whole = _answers(reference, inputs)
    tensors = {**dict(reference.named_parameters(remove_duplicate=False)), **dict(reference.named_buffers())}
    for cut in small.plan.cuts:
        if not cut.tensor.endswith("running_var"):
            _zero(tensors[cut.tensor], cut)
        kept[cut.tensor] = cut
    _norms_over_kept(reference, wide, kept)
    _bare_norms_over_kept(reference, wide, analysis, small.plan)
    got, want = (_answers(network, inputs) for network in (wide, reference))
    if [t.shape for t in got] != [t.shape for t in want]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True) if a.is_floating_point() and a.numel()]
    if not any(b.isfinite().any() for _, b in pairs):
        raise RuntimeError("the original returns no numbers in this precision")
    if all(_difference(a.double(), b.double()) <= CLOSE for a, b in zip(whole, want, strict=True)):
        raise ValueError("the outputs hardly depend on what was cut")
    return max(_difference(a, b) for a, b in pairs)


def _answers(network: nn.Module, inputs: Any) -> list[Tensor]:
    """Seed the random numbers before each run: some networks draw masks."""
    torch.manual_seed(0)
    found: list[Tensor] = flatten_outputs(call_model(network, clone_inputs(inputs)))
    return found


def _difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference relative to the largest entry; NaNs must be in the same places."""
    there = want.isfinite()
    if not torch.equal(there, got.isfinite()):
        return float("inf")
    got, want = got[there], want[there]
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12)) if len(want) else 0.0


def _zero(tensor: Tensor, cut: Any) -> None:
    share = tensor.shape[cut.dim]
    for index in sorted(set(range(cut.size)) - set(cut.kept)):
        block, place = divmod(index, share)
        part = tensor.chunk(cut.blocks, 1 - cut.dim)[block] if cut.blocks > 1 else tensor
        part.select(cut.dim, place).zero_()


def _norms_over_kept(reference: nn.Module, small: nn.Module, cuts: Mapping[str, Any]) -> None:
    """Norms over channels take their statistics over those that stay: the small network's own norm does, on them."""
    for path, module in reference.named_modules():
        weight = cuts.get(f"{path}.weight")
        below = any(True for child in module.children() for _ in child.parameters())
        whole = not below and getattr(module, "running_mean", None) is None
        plain = isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.PReLU))
        plain |= isinstance(module, nn.GroupNorm) and module.num_groups > 1
        if weight is not None and whole and not plain and module.weight.numel() == weight.size:  # type: ignore[union-attr, operator]
            module.forward = _spread(small.get_submodule(path), list(weight.kept), weight.size)  # type: ignore[assignment]


def _bare_norms_over_kept(reference: nn.Module, small: nn.Module, analysis: nm.Analysis, plan: nm.Plan) -> None:
    """The same for norms without a weight; which channels those read is not to be seen in what was cut of them."""
    channels = analysis.channels
    stays = build_keep_mask(channels, resolve_kept_units(plan, channels))
    for node in analysis.graph.nodes:
        path = node.module.split("@")[0]
        bare = path and lookup_operator(node).spans and not list(reference.get_submodule(path).parameters())
        there = channels.get_kept_indices(next(node.refs()).name, stays).get(len(node.shape) - 1) if bare else None
        if there is not None and not there.all():
            norm = _spread(small.get_submodule(path), there.nonzero()[0].tolist(), len(there))
            reference.get_submodule(path).forward = norm  # type: ignore[assignment]


def _spread(norm: nn.Module, kept: list[int], size: int) -> Any:
    def forward(x: Tensor, *others: Any) -> Any:
        for dim in [dim for dim in (x.ndim - 1, 1) if x.shape[dim] == size]:
            try:
                return _within(norm, x, torch.tensor(kept), dim, others)
            except RuntimeError as error:
                wrong = error  # the image is as wide as there are channels
        raise wrong

    return forward


def _within(norm: nn.Module, x: Tensor, index: Tensor, dim: int, others: tuple[Any, ...]) -> Any:
    """Normalise some channels only and return them in their places among zeros."""
    found = norm(x.index_select(dim, index), *others)
    first, *more = found if isinstance(found, tuple) else (found,)
    spread = torch.zeros_like(x).index_copy_(dim, index, first.to(x.dtype))
    return (spread, *more) if isinstance(found, tuple) else spread


# All networks


def run(names: Iterable[str], mergers: Sequence[str], limit: float, kept: Path | None) -> dict[str, Row]:
    """Return the rows of networks, each from its own process; rows that are cached in a file are not run again."""
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for name in [name for name in names if not _done(rows.get(name), mergers)]:
        start = time.perf_counter()
        rows[name] = alone(judged, (name, mergers), limit)
        if kept is not None:
            kept.write_text(json.dumps(rows))
        said = rows[name].get("crash") or _verdict(rows[name])
        print(f"{name}: {said} ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return rows


def _done(row: Row | None, mergers: Sequence[str]) -> bool:
    """Return whether a row has all requested measurements."""
    return row is not None and ("crash" in row or all(f"internal {merger}" in row for merger in mergers))


def _verdict(row: Row) -> str:
    """Return the outcome of a network in one word, the worst first."""
    if "crash" in row:
        return "crash"
    cuts = _cuts(row)
    if any(isinstance(cut, float) and not cut <= CLOSE for cut in cuts):
        return "WRONG"
    for word in ("error", "unchecked"):
        if any(str(cut).startswith(word) for cut in cuts):
            return word
    return "nothing" if all(cut == "nothing" for cut in cuts) else "right"


def _cuts(row: Row) -> list[Any]:
    """Return the outcomes of all cuts."""
    return [row[key] for scope in SCOPES for merger in MERGERS if (key := f"{scope} {merger}") in row]


def page(rows: Mapping[str, Row], whole: bool) -> str:
    """Render the page of the documentation."""
    lines = ["# The zoo", "", _intro(rows, whole), "", "## By package", "", *_packages(rows), "", *_targets(rows), ""]
    lines += ["## What it costs", "", "Times are those of the machine on which this page was written, with one thread."]
    lines += [
        "They are of networks with more than ten million parameters.",
        "",
        *_costs(rows),
        "",
        "## Not prunable",
        "",
    ]
    lines += ["Mean share of a network's parameters that is not prunable, by reason, over all networks that ran.", ""]
    lines += ["| why | share | networks |", "|---|---:|---:|", *_reasons(rows), "", "## Networks", ""]
    lines += [
        "| network | parameters | groups | internal | all | exports | verdict |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, row in rows.items():
        if "crash" in row:
            lines.append(f"| {name} | | | | | | {_cell(row['crash'])} |")
        else:
            shares = f"{row['internal']:.1%} | {row['all']:.1%} | {row['exports']:.0f}"
            lines.append(f"| {name} | {row['parameters']:,} | {row['groups']} | {shares} | {_said(row)} |")
    return "\n".join(lines) + "\n"


def _intro(rows: Mapping[str, Row], whole: bool) -> str:
    known = len(zoo_networks.everything())
    some = "" if whole else f" This page was written from a part of them: {len(rows)} ran."
    merged = sum(any(key.endswith("moments") for key in row) for row in rows.values())
    ran = sum("crash" not in row for row in rows.values())
    return (
        f"`make zoo` runs {known} networks of {len(zoo_networks.PACKAGES)} packages with random weights, each in its "
        "own process. It prints which share of the parameters is prunable, what is not and why, and whether the pruned "
        "network equals the original whose removed entries are zero. Both run their own forward, in double precision "
        f"(in single precision if the code runs in no other).{some}\n\n"
        "Networks of transformers are small ones of their family, with the head that the family is trained for: a "
        "network without a head returns its residual stream. Half of every group is removed in both scopes: from "
        f'{ran} networks without merging, and from {merged} of them with the default method and `effort="fast"`. '
        '"Right" means that every cut was made and every plainly pruned network is within 1e-5 of the zeroed original. '
        "Not all rows were measured with the same version of the code; a network whose row a "
        "later change could affect was run again."
    )


def _targets(rows: Mapping[str, Row]) -> list[str]:
    """Return the medians of prunable shares with their expected values."""
    lines = ["| prunable share, median | internal | at least | all | at least |", "|---|---:|---:|---:|---:|"]
    for package, wanted in TARGETS.items():
        own = [row for name, row in rows.items() if name.startswith(f"{package}:") and "crash" not in row]
        found = [statistics.median(row[scope] for row in own) for scope in SCOPES] if own else []
        cells = [f"{share:.1%} | {least:.1%}" for share, least in zip(found, wanted, strict=False)]
        lines += [f"| {package} | {' | '.join(cells)} |"] if own else []
    return lines


def _costs(rows: Mapping[str, Row]) -> list[str]:
    """Return exports, time and memory; time and memory for networks with more than ten million parameters."""
    ran = [row for row in rows.values() if "crash" not in row]
    large = [row for row in ran if row["parameters"] > 10_000_000]
    seconds = [row["seconds"] / max(len(_cuts(row)), 1) for row in large]
    found = {
        "exports of an analysis": [row["exports"] for row in ran],
        "seconds of an analysis beyond export": [row["analysis"] for row in large],
        "seconds of a cut, verified and checked": seconds,
        "GiB at most, with Python and torch": [row["memory"] for row in large],
    }
    lines = ["| what | networks | median | worst |", "|---|---:|---:|---:|"]
    kept = {what: values for what, values in found.items() if values}
    return lines + [
        f"| {what} | {len(values)} | {statistics.median(values):.1f} | {max(values):.1f} |"
        for what, values in kept.items()
    ]


def _packages(rows: Mapping[str, Row]) -> list[str]:
    found: dict[str, list[Row]] = defaultdict(list)
    for name, row in rows.items():
        found[name.partition(":")[0]].append(row)
    lines = ["| package | networks | right | nothing | unchecked | errors | crashes | wrong | internal | all |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for package, own in found.items():
        verdicts = [_verdict(row) for row in own]
        counts = [verdicts.count(word) for word in ("right", "nothing", "unchecked", "error", "crash", "WRONG")]
        ran = [row for row in own if "crash" not in row]
        shares = [f"{statistics.median(r[s] for r in ran):.1%}" if ran else "" for s in ("internal", "all")]
        lines.append(f"| {package} | {len(own)} | {' | '.join(map(str, counts))} | {' | '.join(shares)} |")
    return lines


def _reasons(rows: Mapping[str, Row]) -> list[str]:
    ran = [row for row in rows.values() if "crash" not in row]
    shares: dict[str, list[float]] = defaultdict(list)
    for row in ran:
        for why, share in row["refused"]:
            shares[why.partition(": ")[0]].append(share)
    order = sorted(shares, key=lambda why: -sum(shares[why]))
    return [f"| {_cell(why)} | {sum(shares[why]) / len(ran):.2%} | {len(shares[why])} |" for why in order[:30]]


def _said(row: Row) -> str:
    errors = [str(cut) for cut in _cuts(row) if ":" in str(cut)]
    return _verdict(row) + (f" ({_cell(errors[0])})" if errors else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").replace("`", "'")


def _write_csv(rows: Mapping[str, Row], path: str) -> None:
    keys = ["network", *dict.fromkeys(key for row in rows.values() for key in row)]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, keys)
        table.writeheader()
        table.writerows({"network": name, **row} for name, row in rows.items())


def _print(rows: Mapping[str, Row]) -> None:
    header, _, *lines = _packages(rows)
    table = Table(*(cell.strip() for cell in header.strip("|").split("|")))
    for line in lines:
        table.add_row(*(cell.strip() for cell in line.strip("|").split("|")))
    Console(width=150).print(table)
    print("\n".join([*_targets(rows), "", *_costs(rows)]))


def _check_packages(names: Iterable[str]) -> None:
    """Raise if a package of the zoo cannot be imported, instead of leaving it out of the table."""
    for package in dict.fromkeys(name.partition(":")[0] for name in names):
        try:
            import_module(package)
        except ImportError as error:
            sys.exit(f"{package} cannot be imported: {error}. pip install --no-deps {zoo_networks.INSTALL}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help="a network, measured here; prints JSON")
    parser.add_argument("--only", default="", help="networks whose names begin so, several separated by commas")
    parser.add_argument("--sample", action="store_true", help="the sample that CI runs")
    parser.add_argument("--mergers", default=",".join(MERGERS), help="of those, which: fewer take less time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one network")
    parser.add_argument("--kept", type=Path, help="a file that keeps what was measured: a run can be taken up again")
    parser.add_argument("--csv", default="")
    parser.add_argument("--page", default="")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    mergers = given.mergers.split(",")
    if given.one:
        print(json.dumps(judged(given.one, mergers)))
        return
    chosen = tuple(given.only.split(","))
    known = zoo_networks.everything()
    names = zoo_networks.SAMPLE if given.sample else [n for part in chosen for n in known if n.startswith(part)]
    names = list(dict.fromkeys(names))
    _check_packages(names)
    found = run(names, mergers, given.limit, given.kept)
    rows = {name: found[name] for name in known if name in found}
    _print(rows)
    if given.csv:
        _write_csv(rows, given.csv)
    if given.page:
        Path(given.page).write_text(page(rows, whole=len(rows) == len(zoo_networks.everything())))
    if bad := [name for name, row in rows.items() if _verdict(row) in ("crash", "error", "WRONG")]:
        sys.exit(f"not right: {', '.join(bad)}")


if __name__ == "__main__":
    main()
