"""Plans and recipes with anything in them: an error that says so or a network, and never a traceback."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import neuron_merging as nm
from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.graph.digests import compute_sha256

NAMES = st.sampled_from(
    ["0", "0.weight", "4.bias", "__class__", "_parameters", "weight", "", ".", "forward", "in_features", "groups", "2"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 3, 8, 2**31, 2**63, 10**12, -4, 99]),
    st.floats(allow_nan=False, allow_infinity=False),
    NAMES,
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
QUICK = settings(max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1, bias=False),
    )


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        nm.compress(net(), torch.randn(1, 3, 8, 8), merger="moments").save(Path(place) / "small")
        yield Path(place) / "small"


def spots(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(spot for key, part in inner for spot in spots(part, (*way, key)))]


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    made = copy.copy(value)
    made[way[0]] = replaced(value[way[0]], way[1:], new)
    return made


def load(folder: Path, text: bytes) -> None:
    """Load with this plan.json; a network that comes out has the folder's own shapes."""
    kept = (folder / "plan.json").read_bytes()
    try:
        (folder / "plan.json").write_bytes(text)
        model = nm.load(folder, build=net)
        assert type(model) is nn.Sequential and type(model[0]) is nn.Conv2d
        assert all(type(size) is int for size in (model[0].out_channels, model[3].groups))
    except nm.MergingError:
        pass
    finally:
        (folder / "plan.json").write_bytes(kept)


@pytest.mark.long
@QUICK
@given(data=st.data())
def test_a_mutated_plan_is_refused_or_harmless(folder: Path, data: st.DataObject) -> None:
    keys = msgspec.json.decode((folder / "plan.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        top = data.draw(st.sampled_from(["plan", "shared", "transient", "files", "version", "macs", "accuracy"]))
        way = data.draw(st.sampled_from(spots(keys[top])))
        keys = replaced(keys, (top, *way), data.draw(VALUES))
    keys["digest"] = ""
    keys["digest"] = compute_sha256(msgspec.json.encode(keys))
    load(folder, msgspec.json.encode(keys))


@QUICK
@given(data=st.data())
def test_damaged_bytes_are_refused(folder: Path, data: st.DataObject) -> None:
    text = bytearray((folder / "plan.json").read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=20))
    load(folder, bytes(text))


@QUICK
@given(data=st.data())
def test_a_mutated_plan_of_its_own_is_refused_or_fits(folder: Path, data: st.DataObject) -> None:
    keys = msgspec.json.decode((folder / "plan.json").read_bytes())["plan"]
    keys = replaced(keys, data.draw(st.sampled_from(spots(keys))), data.draw(VALUES))
    try:
        assert isinstance(nm.apply_plan(net(), nm.Plan.from_json(msgspec.json.encode(keys))), nn.Module)
    except nm.MergingError:
        pass


@QUICK
@given(
    text=st.text(max_size=200)
    | st.lists(st.sampled_from(list("&*![]{}:-,?|>#'\"%@` \n\t0x1")), max_size=80).map("".join)
)
def test_any_text_is_a_recipe_or_one_error(text: str) -> None:
    try:
        assert isinstance(recipes.build_recipe(recipes.parse_recipe_keys(text)), Recipe)
    except nm.MergingError:
        pass


@QUICK
@given(keys=st.dictionaries(st.sampled_from(Recipe.__struct_fields__), VALUES, max_size=4))
def test_any_values_are_a_recipe_or_one_error(keys: dict[str, Any]) -> None:
    import yaml

    from neuron_merging.checkpoint.recipe_names import config_from_recipe

    try:
        recipe = recipes.build_recipe(recipes.parse_recipe_keys(yaml.safe_dump(keys)))
        config_from_recipe(msgspec.structs.replace(recipe, calibrate=None, merger="none", criterion="l2"))
    except nm.MergingError:
        pass
