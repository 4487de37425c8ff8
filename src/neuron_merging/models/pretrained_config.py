"""The config of transformers that describes a pruned network, so that `from_pretrained` reads its folder: find it, say
why there is none, and find out beforehand which numbers of channels a config can describe.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group
from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.copying import copy_without_hooks, iter_module_tensors, make_meta_tensor
from neuron_merging.graph.example_inputs import flatten_outputs
from neuron_merging.graph.process_state import restore_rng, silence_logging, silence_stdout
from neuron_merging.models.sources import build_from_config, make_transformers_inputs
from neuron_merging.pruning.plan import GroupDecision, Plan, make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.selection.criteria import compute_min_kept, keep_units_by_count
from neuron_merging.selection.search import UniformKind, mask_numbers

CONFIG_FILE = "config.json"
PER_LAYER_KEY = "per_layer_config"
"""The entry of recent configs that overrides other entries for single layers. Few model classes read it."""
DERIVED_CONFIG_KEYS = ("n_inner", "intermediate_size", "ffn_dim", "head_dim")
"""Config entries that may be None; transformers then derives them from other entries."""
MAX_CHANGED_KEYS = 6
"""The largest number of config entries that are changed together."""
MAX_TRIED_COUNTS = 16
"""Numbers of channels that are tried for one step; of a wide layer only some multiples are tried."""
ConfigChanges = dict[str, list[Any]]
"""By config entry, the values that it may have in the pruned network."""


def is_transformers_model(network: nn.Module) -> bool:
    """Whether a network has a config of transformers."""
    return hasattr(getattr(network, "config", None), "to_json_string")


def find_matching_config(small: nn.Module, plan: Plan) -> Any:
    """Find the config from which transformers builds the pruned network; None if there is none.

    Config entries whose value is a size that the plan changes are tried with the new size. A network built from the
    config must have the small network's tensor shapes, and with its weights return bit-identical outputs.
    """
    if not is_transformers_model(small) or plan.biases or plan.baked:
        return None
    found = (config for config in _iterate_configs(small.config, plan) if _is_matching_config(config, small))
    return next(found, None)


def _iterate_configs(config: Any, plan: Plan) -> Iterator[Any]:
    """Yield configs that may describe the pruned network: first with one number for all layers, then layer by layer."""
    changes = _list_config_changes(config, plan)
    # The fewest changes first: an entry may have the value of a size by chance.
    for count in range(min(len(changes), MAX_CHANGED_KEYS) + 1):
        for keys in combinations(changes, count):
            for values in product(*(changes[key] for key in keys)):
                candidate = copy.deepcopy(config)
                for key, value in zip(keys, values, strict=True):
                    setattr(candidate, key, value)
                yield candidate
    if hasattr(type(config), PER_LAYER_KEY):
        yield from _iterate_layered_configs(config, plan)


def _list_config_changes(config: Any, plan: Plan) -> ConfigChanges:
    """Return, by config entry, the values that the entry may have in the pruned network."""
    pairs = {(cut.size, len(cut.kept)) for cut in plan.cuts} | {(c.size, len(c.kept)) for c in plan.groups}
    integers = {key: value for key, value in vars(config).items() if type(value) is int and value > 1}
    # Token ids and numbers of layers are no widths, whatever their values.
    sizes = {key: value for key, value in integers.items() if not key.endswith(("_id", "layers", "layer"))}
    changes = {key: {new for old, new in pairs if old == value} for key, value in sizes.items()}
    changes |= {
        key: {new for _, new in pairs}
        for key, value in vars(config).items()
        if value is None and key in DERIVED_CONFIG_KEYS
    }
    heads = {key: value for key, value in sizes.items() if "head" in key}
    for key, value in heads.items():  # grouped-query attention: several query heads share one key-value head
        changes[key] |= {value // old * new for old, new in pairs if value % old == 0}
    return {key: sorted(values) for key, values in changes.items() if values}


def _iterate_layered_configs(config: Any, plan: Plan) -> Iterator[Any]:
    """Yield configs whose entries differ from layer to layer.

    Entries are changed together for all groups of a layer: first all entries that fit, then fewer.
    """
    entries = _list_layer_entries(config, plan)
    known = {layer: dict(values) for layer, values in _get_layer_overrides(config).items()}
    for count in range(min(len(entries), MAX_CHANGED_KEYS), 0, -1):
        for keys in combinations(entries, count):
            layers: dict[int, dict[str, Any]] = defaultdict(dict, copy.deepcopy(known))
            for key in keys:
                for layer, value in entries[key].items():
                    layers[layer][key] = value
            candidate = copy.deepcopy(config)
            candidate.per_layer_config = dict(layers)
            yield candidate


def _get_layer_overrides(config: Any) -> dict[int, dict[str, Any]]:
    stored = config.to_dict().get(PER_LAYER_KEY) or {}
    return {int(layer): values for layer, values in stored.items()}


def _list_layer_entries(config: Any, plan: Plan) -> dict[str, dict[int, int]]:
    """Return, by config entry and layer, the new value of an entry that has the size of one of the layer's groups."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for decision in plan.groups:
        # The first number in the path counts the layers, as in model.layers.3.mlp.
        number = re.search(r"(?:^|\.)(\d+)(?=[.:]|$)", decision.name)
        if number is None:
            continue
        layer = int(number[1])
        for key, value in _get_layer_values(config, layer).items():
            if value == decision.size:
                found[key][layer] = len(decision.kept)
            elif "head" in key and value % decision.size == 0:
                found[key][layer] = value // decision.size * len(decision.kept)
    return dict(found)


def _get_layer_values(config: Any, layer: int) -> dict[str, int]:
    """Return the entries that are sizes, as one layer sees them."""
    try:
        view = vars(config.per_layer_config[layer])
    except (IndexError, AttributeError, TypeError):
        return {}
    return {key: value for key, value in view.items() if type(value) is int and value > 1 and "layer" not in key}


def _is_matching_config(config: Any, small: nn.Module) -> bool:
    """Whether a network of this config, with the small network's weights, computes the same outputs."""
    kind = type(small)
    try:
        config = _read_back(config)
        # Shapes on the meta device first: that costs nothing, and most candidates end here.
        if not _has_same_shapes(kind, config, small):
            return False
        with silence_logging(), silence_stdout(), torch.no_grad(), restore_rng():
            rebuilt = kind(config).to(next(small.parameters()).dtype).eval()
            rebuilt.load_state_dict(small.state_dict())
            inputs = make_transformers_inputs(small)
            pairs = zip(
                *(flatten_outputs(net(**inputs)) for net in (rebuilt, copy_without_hooks(small).eval())), strict=True
            )
            return all(torch.equal(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001 (transformers or the network's code may reject such sizes)
        return False


def _read_back(config: Any) -> Any:
    """Return the config as transformers reads it from its file, and validates it."""
    with silence_logging(), silence_stdout():
        return type(config).from_dict(json.loads(config.to_json_string(use_diff=True)))


def _has_same_shapes(kind: type[nn.Module], config: Any, small: nn.Module) -> bool:
    with silence_logging(), silence_stdout(), torch.device("meta"):
        return _get_state_shapes(kind(config)) == _get_state_shapes(small)


def _get_state_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def render_config(small: nn.Module, config: Any) -> str:
    """Return the text of the config.json that `from_pretrained` reads."""
    named = copy.deepcopy(config)
    named.architectures = [type(small).__name__]
    try:
        text: str = named.to_json_string(use_diff=True)
    except TypeError as error:
        raise ModelError(f"the configuration cannot be written: {describe_error(error)}", where=CONFIG_FILE) from error
    return text


def render_original_config(small: nn.Module, plan: Plan) -> str | None:
    """Return the text of the config from which the original network can be built again, to apply the plan to it.

    None if there is none: the class is not one of transformers, or the network was pruned before.
    """
    if not is_transformers_model(small):
        return None
    try:
        text = render_config(small, small.config)
        with torch.device("meta"), restore_rng():
            original = build_from_config(text)
        same = type(original) is type(small) and _get_state_shapes(apply_plan(original, plan)) == _get_state_shapes(
            small
        )
    except Exception:  # noqa: BLE001 (transformers or the network's code may reject the config)
        return None
    return text if same else None


# Why there is none


def explain_missing_config(small: nn.Module, plan: Plan) -> list[str]:
    """Return the reasons why no config describes a pruned network of transformers."""
    reasons = []
    if plan.biases:
        reasons.append(f"merging gave a bias to {_name_some(plan.biases)}")
    if plan.baked:
        reasons.append(f"weights that the original computes are stored as they are: {_name_some(plan.baked)}")
    kinds: dict[str, list[GroupDecision]] = defaultdict(list)
    for decision in plan.groups:
        kinds[mask_numbers(decision.name)].append(decision)
    uneven = [_describe_uneven_kind(small, kind, members) for kind, members in kinds.items()]
    reasons += [f"{text}, and the configuration has one number for all" for text in uneven if text]
    if not reasons:
        sizes = ", ".join(f"{kind} with {len(group[0].kept)} of {group[0].size}" for kind, group in kinds.items())
        reasons.append(f"no entries of {type(small.config).__name__} describe {sizes}")
    return reasons


def _name_some(names: Mapping[str, Any] | Sequence[str]) -> str:
    listed = list(names)
    return listed[0] + (f" and {len(listed) - 1} more" if len(listed) > 1 else "")


def _describe_uneven_kind(small: nn.Module, kind: str, members: Sequence[GroupDecision]) -> str:
    """Describe repeated layers that keep different numbers of channels; empty if they keep the same."""
    counts = {len(decision.kept) for decision in members}
    layers = mask_numbers(members[0].layers[0]) if members[0].layers else kind
    repeated = [name for name, _ in small.named_modules() if mask_numbers(name) == layers]
    # Layers of this kind that are not in the plan keep their full size.
    if len(repeated) > len(members):
        counts.add(members[0].size)
    return f"the layers {kind} keep {min(counts)} to {max(counts)} channels" if len(counts) > 1 else ""


# Which numbers of channels a config can describe


@dataclass(frozen=True)
class DescribableKinds:
    """Groups that must keep equal numbers of channels, and why the other groups keep all of theirs."""

    kinds: tuple[UniformKind, ...]
    reasons: tuple[str, ...] = field(default=())


def find_describable_kinds(analysis: Analysis, groups: Sequence[Group], round_to: int = 1) -> DescribableKinds:
    """Find out which of these groups can be cut such that a config of transformers describes the result.

    Groups whose names differ only in numbers are tried together. Kinds that fail alone and have the same size are then
    tried together: encoder and decoder often share an entry of the config.
    """
    trials = _ConfigTrials(analysis, round_to)
    everything, taking_part = _sort_by_kind(analysis.channels.groups), {group.name for group in groups}
    found: list[tuple[list[str], int | None]] = []
    failed: list[tuple[list[str], int | None]] = []
    for names in everything.values():
        if not taking_part.intersection(names):
            continue
        step = trials.find_step(names)
        (failed if step is None else found).append((names, step))
    for joined in _join_by_size(analysis, [names for names, _ in failed]):
        if (step := trials.find_step(joined)) is not None:
            found.append((joined, step))
            failed = [(names, None) for names, _ in failed if names[0] not in joined]
    kinds = tuple(UniformKind(tuple(names), step) for names, step in found if step and taking_part.issuperset(names))
    cut = {name for kind in kinds for name in kind.names}
    config = type(getattr(analysis.model, "config", None)).__name__
    partial = [names[0] for names, _ in found if names[0] not in cut]
    return DescribableKinds(
        kinds,
        (
            # Kinds of several sizes can have the same masked name.
            *dict.fromkeys(f"{config} cannot describe fewer {mask_numbers(names[0])}" for names, _ in failed),
            *(f"only some of the layers {mask_numbers(name)} take part" for name in partial),
        ),
    )


def _sort_by_kind(groups: Sequence[Group]) -> dict[tuple[str, int], list[str]]:
    kinds: dict[tuple[str, int], list[str]] = defaultdict(list)
    for group in groups:
        kinds[mask_numbers(group.name), group.size].append(group.name)
    return kinds


def _join_by_size(analysis: Analysis, kinds: Sequence[list[str]]) -> list[list[str]]:
    """Join kinds of layers whose groups have the same number of units, of the same width; single ones are left out."""
    known = {group.name: group for group in analysis.channels.groups}
    joined: dict[tuple[int, int, bool], list[list[str]]] = defaultdict(list)
    for names in kinds:
        group = known[names[0]]
        width = group.producers[0].rows.shape[1] if group.producers else 1
        joined[group.size, width, group.residual].append(names)
    return [list(chain(*parts)) for parts in joined.values() if len(parts) > 1]


class _ConfigTrials:
    """Cuts a network on shapes alone, and looks for the config of the result."""

    def __init__(self, analysis: Analysis, round_to: int) -> None:
        self._analysis, self._round_to = analysis, round_to
        self._groups = {group.name: group for group in analysis.channels.groups}
        meta = {id(tensor): make_meta_tensor(tensor) for tensor in iter_module_tensors(analysis.model)}
        self._shapes_only = copy_without_hooks(analysis.model, meta)

    def find_step(self, names: Sequence[str]) -> int | None:
        """Return the smallest step such that these groups may keep any multiple of it; None if there is none."""
        size = self._groups[names[0]].size
        base = int(np.lcm.reduce([self._compute_base_step(name) for name in names]))
        for step in (step for step in range(base, size // 2 + 1, base) if size % step == 0):
            counts = range(size - step, 0, -step)
            # Shapes say little about heads: few wide ones and many narrow ones have the same weights. Heads are few, so
            # each number of them is also tried with weights; of wide layers only one number.
            few = len(counts) <= MAX_TRIED_COUNTS
            tried, exactly = (counts, counts) if few else (_take_some(counts), counts[:1])
            if all(self._is_described(names, count) for count in tried) and all(
                self._is_described(names, count, exact=True) for count in exactly
            ):
                return step
        return None

    def _compute_base_step(self, name: str) -> int:
        group = self._groups[name]
        return compute_min_kept(group, np.ones(group.size), 1.0, self._round_to)[1]

    def _is_described(self, names: Sequence[str], count: int, exact: bool = False) -> bool:
        """Whether a config describes the network in which each of these groups keeps so many units."""
        analysis = self._analysis
        kept = {
            name: keep_units_by_count(self._groups[name], np.ones(self._groups[name].size), count) for name in names
        }
        plan = make_plan(
            analysis.model, analysis.graph, analysis.channels, kept, size_attributes=analysis.size_attributes
        )
        if exact:
            return find_matching_config(apply_plan(analysis.model, plan), plan) is not None
        small = apply_plan(self._shapes_only, plan)
        return any(_is_buildable(config, small) for config in _iterate_configs(small.config, plan))


def _take_some(counts: Sequence[int]) -> list[int]:
    """Take numbers at equal distances, with the first three and the last: neighbours differ in their divisors."""
    places = {*range(3), *np.linspace(0, len(counts) - 1, MAX_TRIED_COUNTS - 3).astype(int).tolist()}
    return [counts[i] for i in sorted(places)]


def _is_buildable(config: Any, small: nn.Module) -> bool:
    """Whether a network of this config has the shapes of the small one."""
    try:
        return _has_same_shapes(type(small), _read_back(config), small)
    except Exception:  # noqa: BLE001 (transformers or the network's code may reject such sizes)
        return False
