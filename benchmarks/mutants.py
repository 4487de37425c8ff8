"""Inject faults into the engine, one at a time, and count those that verification misses.

    python benchmarks/mutants.py [--sample N] [--only WORD]

Every rule of the operator table that the networks below use is broken in several ways, then the plan, the surgery and
the columns of every merger. A mutant is caught if verification of some network raises an alarm. It is equivalent if
every network comes out as without it: most often the rule has nothing of the kind to say. It is harmless if what comes
out is another cut that is sound: its outputs are those of the original whose removed channels are dead or not read,
worked out on the module alone. Whatever else comes out survived, and there must be none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from neuron_merging.api import compress
from neuron_merging.channels.find_channels import find_channels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.table import OPERATORS, Operator
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.errors import MergingError
from neuron_merging.graph.graph import Graph
from neuron_merging.graph.module_rewrites import fold_parametrizations
from neuron_merging.merging import MergeResult
from neuron_merging.pipeline import build_network
from neuron_merging.pruning import plan as plans
from neuron_merging.pruning import surgery, trial_prune
from neuron_merging.pruning.plan import Plan
from tests.pruning import zeroing
from tests.zoo import CASES

Patch = Callable[[], AbstractContextManager[object]]
CLOSE = 1e-4
NETWORKS = 2
"""Networks on which a broken rule is tried, among those in which it has an effect."""


@dataclass(frozen=True)
class Mutant:
    """One fault, the networks that run through it, and the merger to run with."""

    name: str
    patch: Patch
    networks: tuple[str, ...]
    merger: str = "none"


# Networks, and what comes of them


@cache
def captured(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Graph]:
    case = CASES[name]
    model, inputs = fold_parametrizations(case.build()), case.inputs()
    return model, inputs, trial_prune.capture(model, inputs)


def cut(name: str, merger: str) -> Compressed:
    """The network cut by half, with a graph that is captured once for all mutants."""
    model, inputs, graph = captured(name)
    with mock.patch.object(trial_prune, "capture", lambda *_: graph):
        return compress(model, inputs, ratio=0.5, merger=merger, scope="all")


@cache
def sound(name: str, merger: str) -> dict[str, Tensor] | None:
    """Return the result without a fault; None if the network is not prunable."""
    try:
        return cut(name, merger).model.state_dict()
    except MergingError:
        return None


def outcome(mutant: Mutant, name: str) -> str:
    """The outcome of a fault on one network."""
    right, alarms = sound(name, mutant.merger), []
    with mutant.patch(), _listening(alarms):  # outside of the try: a fault that cannot be planted must not look caught
        try:
            made = cut(name, mutant.merger)
        except MergingError:
            return "caught" if right is not None else "same"
        except Exception as error:  # noqa: BLE001 (a fault that does not even run is no silent one)
            return f"caught ({type(error).__name__})"
    alarms += [str(refusal) for refusal in made.summary.refusals if trial_prune.REASON_CODE_BREAKS in refusal.why]
    own = made.model.state_dict()
    if right is not None and own.keys() == right.keys() and all(_equal(own[k], right[k]) for k in own):
        return "caught" if alarms else "same"
    if mutant.merger != "none" or not _agrees(name, made):
        return "survived"
    return "caught" if alarms else "harmless"


@contextmanager
def _listening(alarms: list[str]) -> Iterator[None]:
    """Records verification failures; the pipeline then keeps the affected groups and continues."""
    real = build_network.verify_small_network

    def verified(*given: Any) -> Any:
        try:
            return real(*given)
        except MergingError as error:
            alarms.append(str(error))
            raise

    with mock.patch.object(build_network, "verify_small_network", verified):
        yield


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _agrees(name: str, made: Compressed) -> bool:
    """Compare independently of the verification code and the graph, with the module and the plan only."""
    case, (model, _, _) = CASES[name], captured(name)
    inputs = case.inputs(7)
    unread = zeroing.without_readers(model, made.plan, case.reads, case.contracts)
    dead = zeroing.with_dead_channels(model, made.plan, case.reads)
    got = zeroing.run(made.model, inputs)
    return any(zeroing.distance(got, zeroing.run(reference, inputs)) < CLOSE for reference in (unread, dead))


def judge(mutant: Mutant) -> str:
    """Return the worst outcome of a mutant; "caught" if there is none and an error was raised."""
    found = [outcome(mutant, name) for name in mutant.networks]
    if "survived" in found:
        return "survived"
    if any(word.startswith("caught") for word in found):
        return "caught"
    return "harmless" if "harmless" in found else "equivalent"


# Faults of rules

RuleFault = Callable[[Operator], Operator]


def _lines(change: Callable[[Any], Any]) -> RuleFault:
    """Change the labels of a rule's output."""

    def fault(row: Operator) -> Operator:
        def rule(walk: LabelWalk, node: Any) -> Any:
            found = row.rule(walk, node)
            parts = found if isinstance(found, list) else [found]
            changed = [{dim: change(line) for dim, line in part.items()} for part in parts]
            return changed if isinstance(found, list) else changed[0]

        return replace(row, rule=rule)

    return fault


def _deaf(method: str) -> RuleFault:
    """Ignore what a rule reports to the propagation."""

    def fault(row: Operator) -> Operator:
        def rule(walk: LabelWalk, node: Any) -> Any:
            with mock.patch.object(LabelWalk, method, lambda *_, **__: None):
                return row.rule(walk, node)

        return replace(row, rule=rule)

    return fault


def _forgetful(row: Operator) -> Operator:
    def rule(walk: LabelWalk, node: Any) -> Any:
        found = row.rule(walk, node)
        return [{} for _ in found] if isinstance(found, list) else {}

    return replace(row, rule=rule)


RULE_FAULTS: dict[str, RuleFault] = {
    "shifts labels by one": _lines(lambda line: np.roll(line, 1)),
    "reverses labels": _lines(lambda line: line[::-1].copy()),
    "swaps two labels": _lines(lambda line: np.concatenate([line[1::-1], line[2:]])),
    "unites nothing": _deaf("unite"),
    "refuses nothing": _deaf("refuse"),
    "balances nothing": _deaf("balance"),
    "forgets labels": _forgetful,
}


def _used() -> dict[str, list[str]]:
    """Return the networks that use each operator, the smallest first."""
    found: dict[str, list[str]] = {}
    for name in sorted(CASES, key=lambda name: len(captured(name)[2].nodes)):
        for op in dict.fromkeys(node.op for node in captured(name)[2].nodes):
            found.setdefault(op, []).append(name)
    return found


def broken_rule(op: str, fault: str, networks: tuple[str, ...]) -> Mutant:
    patch = partial(mock.patch.dict, OPERATORS, {op: RULE_FAULTS[fault](OPERATORS[op])})
    return Mutant(f"{op} {fault}", patch, networks)


def rule_mutants() -> Iterator[Mutant]:
    for op, names in _used().items():
        for fault in RULE_FAULTS if op in OPERATORS else ():
            mutant = broken_rule(op, fault, ())
            affected = islice((name for name in names if _differs(name, mutant.patch)), NETWORKS)
            yield replace(mutant, networks=tuple(affected))


def _differs(name: str, patch: Patch) -> bool:
    """Return whether a fault changes the analysis of a network; otherwise it has no effect."""
    right = _rightly_found(name)
    with patch():
        try:
            return _found(name) != right
        except Exception:  # noqa: BLE001 (a fault that does not even run is a difference)
            return True


@cache
def _rightly_found(name: str) -> str:
    return _found(name)


def _found(name: str) -> str:
    channels = find_channels(captured(name)[2])
    cuts = [(g.name, g.residual, g.balance_cells.tolist(), g.locked.tolist(), _listed(g.cuts)) for g in channels.groups]
    readers = [(c.node.name, c.axis, c.columns.tolist()) for g in channels.groups for c in g.consumers]
    units = [(value, _listed(own)) for value, own in channels.units.items()]
    return repr((cuts, readers, units, [node.name for node in channels.uncertain_sizes]))


def _listed(table: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return [(str(key), line.tolist()) for key, line in table.items()]


# Faults of the plan and of the surgery

BATTERY = ("linear", "conv2d", "residual", "depthwise", "grouped", "cat", "batch norm 2d", "inverted bottleneck")
PLAIN = ("linear", "conv2d", "batch norm 2d")


def _planned(change: Callable[[Plan], Plan]) -> Patch:
    """Change every plan; trial cuts are not changed."""

    @contextmanager
    def patch() -> Iterator[None]:
        real = plans.make_plan
        with mock.patch.object(build_network, "make_plan", lambda *a, **k: change(real(*a, **k))):
            yield

    return patch


def _other_index(plan: Plan) -> Plan:
    """Make one cut keep the neighbour of a channel that it should keep."""
    cuts = list(plan.cuts)
    for i, own in enumerate(cuts):
        gone = sorted(set(range(own.size)) - set(own.kept))
        if gone and own.blocks == 1:
            kept = sorted({*own.kept[1:], gone[-1]})
            cuts[i] = msgspec.structs.replace(own, kept=tuple(kept))
            break
    return msgspec.structs.replace(plan, cuts=tuple(cuts))


def _without_cut(which: int) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        left = tuple(c for i, c in enumerate(plan.cuts) if i != which % len(plan.cuts))
        return msgspec.structs.replace(plan, cuts=left)

    return change


def _other_groups(value: int | None) -> Callable[[Plan], Plan]:
    def changed(own: dict[str, Any]) -> dict[str, Any]:
        rest = {name: size for name, size in own.items() if name != "groups"}
        return rest if value is None or "groups" not in own else {**rest, "groups": value}

    return lambda plan: msgspec.structs.replace(plan, modules={p: changed(own) for p, own in plan.modules.items()})


def plan_mutants() -> Iterator[Mutant]:
    yield Mutant("plan keeps a wrong index", _planned(_other_index), BATTERY)
    for which in range(4):
        yield Mutant(f"plan lacks cut {which}", _planned(_without_cut(which)), BATTERY)
    yield Mutant("plan forgets the groups of a layer", _planned(_other_groups(None)), BATTERY)
    yield Mutant("plan gives a layer one group", _planned(_other_groups(1)), BATTERY)


def _surgery(change: Callable[..., Tensor]) -> Patch:
    real = surgery.cut_tensor
    return lambda: mock.patch.object(surgery, "cut_tensor", lambda *a: change(real, *a))


def _rolled(dim: int, only: int) -> Callable[..., Tensor]:
    def change(real: Callable[..., Tensor], tensor: Tensor, *rest: Any) -> Tensor:
        found = real(tensor, *rest)
        return found.roll(1, dim) if found.ndim >= only > dim else found

    return change


def _misplaced(real: Callable[..., Tensor], tensor: Tensor, cuts: Any, folded: Mapping[Any, Any], name: str) -> Tensor:
    turned = {axis: [replace(m, columns=m.columns.flip(axis.dim)) for m in own] for axis, own in folded.items()}
    return real(tensor, cuts, turned, name)


def _first(real: Callable[..., Tensor], tensor: Tensor, cuts: Any, *rest: Any) -> Tensor:
    """Keep the right number of channels, but the first ones."""
    cuts = [msgspec.structs.replace(c, kept=tuple(range(len(c.kept)))) if c.blocks == 1 else c for c in cuts]
    return real(tensor, cuts, *rest)


def _unmerged(real: Callable[..., Tensor], tensor: Tensor, cuts: Any, folded: Any, name: str) -> Tensor:
    return real(tensor, cuts, {}, name)


def surgery_mutants() -> Iterator[Mutant]:
    battery = BATTERY
    yield Mutant("surgery shuffles rows", _surgery(_rolled(0, 1)), battery)
    yield Mutant("surgery shuffles rows of matrices", _surgery(_rolled(0, 2)), battery)
    yield Mutant("surgery shuffles columns", _surgery(_rolled(1, 2)), battery)
    yield Mutant("surgery takes the first ones", _surgery(_first), battery)
    yield Mutant("surgery misplaces columns", _surgery(_misplaced), battery, "moments")
    yield Mutant("surgery leaves merges out", _surgery(_unmerged), battery, "moments")
    yield Mutant(
        "surgery forgets attributes",
        lambda: mock.patch.object(surgery, "_set_attributes", _forgetting(surgery._set_attributes)),
        battery,
    )


def _forgetting(set_attributes: Callable[..., None]) -> Callable[..., None]:
    """Leave size attributes unchanged in networks with values; trial cuts without values would detect it."""

    def changed(model: nn.Module, modules: Any) -> None:
        if any(isinstance(tensor, FakeTensor) for tensor in model.parameters()):
            set_attributes(model, modules)

    return changed


# Faults behind the mergers: what they return is not what is put in


def _handed(change: Callable[[MergeResult], MergeResult]) -> Patch:
    """Give the surgery other merges than those that the merger computed and verification sees."""

    @contextmanager
    def patch() -> Iterator[None]:
        real = surgery.apply_plan
        with mock.patch.object(
            build_network,
            "apply_plan",
            lambda model, plan, merged=None: real(model, plan, change(merged or MergeResult(()))),
        ):
            yield

    return patch


def _turned(merged: MergeResult) -> MergeResult:
    return MergeResult(tuple(replace(m, positions=m.positions.flip(0)) for m in merged.merges), merged.tensors)


def _one_lost(merged: MergeResult) -> MergeResult:
    first = next((i for i, m in enumerate(merged.merges) if m.columns is not None), -1)
    lost = (replace(m, columns=None) if i == first else m for i, m in enumerate(merged.merges))
    return MergeResult(tuple(lost), merged.tensors)


def _still(merged: MergeResult) -> MergeResult:
    return MergeResult(merged.merges, {})


def merger_mutants() -> Iterator[Mutant]:
    for merger in ("cosine", "linear", "fold", "moments"):
        yield Mutant(f"{merger}: columns at permuted positions", _handed(_turned), PLAIN, merger)
        yield Mutant(f"{merger}: one layer's columns are lost", _handed(_one_lost), PLAIN, merger)
    for merger in ("moments", "fold"):
        yield Mutant(f"{merger}: other tensors stay as they were", _handed(_still), PLAIN, merger)


def mutants() -> list[Mutant]:
    return [*plan_mutants(), *surgery_mutants(), *merger_mutants(), *rule_mutants()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=0, help="every mutant if 0")
    parser.add_argument("--only", default="", help="mutants with this word in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [mutant for mutant in mutants() if options.only in mutant.name]
    if options.sample:
        chosen = chosen[:: max(1, len(chosen) // options.sample)]
    counts: Counter[str] = Counter()
    for mutant in chosen:
        verdict = judge(mutant)
        counts[verdict] += 1
        if verdict != "caught":
            print(f"{verdict}: {mutant.name} ({', '.join(mutant.networks)})", flush=True)
    print(f"{len(chosen)} mutants: {counts['caught']} caught, {counts['equivalent']} equivalent, "
          f"{counts['harmless']} harmless, {counts['survived']} survived")  # fmt: skip
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
