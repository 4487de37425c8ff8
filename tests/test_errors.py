"""Every mistake gives one MergingError that says what is wrong, where, and what to do about it."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm

X = torch.zeros(2, 6)


def small_net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))


def failing(call: Callable[[], Any], *words: str) -> nm.MergingError:
    """The error of a call: it has a place and a remedy, and names what it should."""
    with pytest.raises(nm.MergingError) as caught:
        call()
    error = caught.value
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    placed = error.where or isinstance(error, nm.NothingToPrune)  # which gives a place for each of its reasons
    assert error.what and placed and error.fix, f"no place or no remedy: {error}"
    return error


def compressing(model: Any = None, inputs: Any = X, **options: Any) -> Callable[[], Any]:
    return lambda: nm.compress(small_net() if model is None else model, inputs, **options)


# The model


def test_meta_device() -> None:
    failing(compressing(small_net().to("meta")), "meta", "0.weight")


@pytest.mark.parametrize("thing", [nn.Linear, {"a": 1}, None, lambda x: x], ids=["class", "dict", "none", "function"])
def test_not_a_module(thing: Any) -> None:
    with pytest.raises(nm.MergingError, match=r"torch\.nn\.Module"):
        nm.compress(thing, X)
    with pytest.raises(nm.MergingError, match=r"torch\.nn\.Module"):
        nm.inspect(thing, X)


def test_lazy_module() -> None:
    failing(compressing(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))), "lazy", "0.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_weights_that_are_not_finite(value: float, name: str) -> None:
    model = small_net()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    failing(compressing(model), "NaN or infinity", name)


def test_statistics_that_are_not_finite() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].running_var[2] = torch.nan
    failing(compressing(model), "NaN or infinity", "1.running_var")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = x.relu()
        return self.b(x)


def test_control_flow_that_depends_on_data() -> None:
    failing(compressing(Branching()), "test_errors.py", "if x.sum() > 0:", "control flow")


class Numbers(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x * x.max().item())


def test_a_number_taken_out_of_a_tensor_gives_a_network_or_an_error() -> None:
    try:
        assert nm.compress(Numbers(), torch.randn(2, 6)).summary.parameters[0] > 0
    except nm.MergingError as error:
        assert error.what and error.fix


class Insisting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.shape[1] != 8:
            raise ValueError("eight channels, please")
        return self.b(x.relu())


class SizeBranching(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(2 * x if x.shape[1] % 8 == 0 else x)


def test_a_smaller_network_that_goes_another_way_is_not_given_out() -> None:
    with pytest.raises(nm.NothingToPrune, match="differs from the original"):
        nm.compress(SizeBranching(), torch.randn(2, 6), merger="none")


class Concatenating(Branching):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        return self.b(torch.cat([y, y], 1)[:, :8])


def test_a_constant_that_breaks_the_smaller_network() -> None:
    failing(compressing(Insisting()), "eight channels, please", "test_errors.py", 'raise ValueError("eight channels')


class Scaled(Branching):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu())
        masked = torch.cat([y, torch.full_like(y[:, :1], -torch.inf)], 1)
        return self.factor * masked * self.factor


def test_outputs_that_are_not_finite() -> None:
    assert nm.compress(Scaled(1.0), torch.randn(2, 6)).summary.error is not None
    failing(compressing(Scaled(1e30), torch.randn(2, 6)), "output 0 is not finite", "example_inputs")


class Asserting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        assert x.shape[1] == 8
        return self.b(x.relu())


def test_a_smaller_network_that_fails_without_a_word() -> None:
    found = failing(compressing(Asserting()), "AssertionError", "test_errors.py", "assert x.shape[1] == 8")
    assert isinstance(found, nm.NothingToPrune)


def test_a_constant_that_leaves_nothing_to_prune() -> None:
    failing(compressing(Concatenating()), "a:", "slice", "torch.cat([y, y], 1)[:, :8]")


class Locked(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def test_a_model_that_cannot_be_copied() -> None:
    failing(compressing(Locked()), "cannot be copied", "Locked")


def test_scripted_model() -> None:
    with pytest.warns(DeprecationWarning):
        model = torch.jit.script(small_net())
    with pytest.raises(nm.MergingError):
        nm.compress(model, X)


# The inputs


@pytest.mark.parametrize("inputs", [(X, X), ()], ids=["too many", "none"])
def test_wrong_number_of_inputs(inputs: tuple[Tensor, ...]) -> None:
    failing(compressing(inputs=inputs), "input")


@pytest.mark.parametrize("shape", [(2, 5), (6, 2), ()])
def test_wrong_shape_of_inputs(shape: tuple[int, ...]) -> None:
    failing(compressing(inputs=torch.zeros(shape)), "shape")


def test_wrong_dtype_of_inputs() -> None:
    failing(compressing(inputs=torch.zeros(2, 6, dtype=torch.int64)), "dtype", "example input")


def test_wrong_device_of_inputs() -> None:
    failing(compressing(inputs=torch.zeros(2, 6, device="meta")), "meta", "cpu")


def test_inputs_that_are_no_tensors() -> None:
    failing(compressing(inputs="image.png"), "input")


# The options


@pytest.mark.parametrize(
    "ratio", [1.0, 1.5, -0.1, float("nan"), float("inf"), "0.5", "half", True, False, None, 1j, [0.5]]
)
def test_ratio_that_is_no_share(ratio: Any) -> None:
    failing(compressing(ratio=ratio), repr(ratio), "[0, 1)")


@pytest.mark.parametrize("ratio", [1.0, float("nan"), "half", True, None])
def test_ratio_of_a_pattern_that_is_no_share(ratio: Any) -> None:
    failing(compressing(ratio={"*": 0.5, "2": ratio}), repr(ratio), "'2'", "[0, 1)")


@pytest.mark.parametrize("pattern", ["layer9", "0.weight", "[", "", 0])
def test_ratio_pattern_without_a_match(pattern: Any) -> None:
    failing(compressing(ratio={pattern: 0.5}), repr(pattern), "Layers that can: 0, 2")


def test_ratio_pattern_of_a_layer_that_cannot_be_pruned() -> None:
    failing(compressing(ratio={"4": 0.5}), "'4'", "what the network returns", "Layers that can: 0, 2")


def test_ratio_without_patterns() -> None:
    failing(compressing(ratio={}), "ratio")


@pytest.mark.parametrize("ignore", [["layer9"], "layer9", ["0", "layer9"]])
def test_ignore_pattern_without_a_match(ignore: Any) -> None:
    failing(compressing(ignore=ignore), "'layer9'", "ignore=", "Layers: 0, 2, 4")


@pytest.mark.parametrize("criterion", ["l3", "", None, 2, ["l1"]])
def test_unknown_criterion(criterion: Any) -> None:
    failing(compressing(criterion=criterion), repr(criterion), "l1, l2, l2-gm, random")


@pytest.mark.parametrize("merger", ["cosin", ""])
def test_unknown_merger(merger: str) -> None:
    failing(compressing(merger=merger), repr(merger), "cosine", "none")


@pytest.mark.parametrize("merger", [2, ["cosine"], nm.Cosine])
def test_not_a_merger(merger: Any) -> None:
    failing(compressing(merger=merger), "merger=", "not a merger")


@pytest.mark.parametrize(
    "setting",
    [{"bn": "relased"}, {"balance": 1.5}, {"balance": -0.1}, {"threshold": float("nan")}, {"threshold": "0.1"}],
    ids=str,
)
def test_settings_of_the_merger(setting: dict[str, Any]) -> None:
    failing(lambda: nm.compress(normed(), X, merger=nm.Cosine(**setting)), *setting)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("scope", ["inner", "", None, ["all"]])
def test_unknown_scope(scope: Any) -> None:
    failing(compressing(scope=scope), repr(scope), "internal", "all")


@pytest.mark.parametrize("round_to", [0, -8, 1.5, 8.0, True, "8", None])
def test_bad_round_to(round_to: Any) -> None:
    failing(compressing(round_to=round_to), repr(round_to), "round_to=")


@pytest.mark.parametrize("seed", ["x", None])
def test_bad_seed(seed: Any) -> None:
    failing(compressing(seed=seed), "seed")


# Nothing to do


def test_a_single_layer_has_nothing_to_prune() -> None:
    with pytest.raises(nm.NothingToPrune, match="what the network returns"):
        nm.compress(nn.Linear(6, 3), X)


def test_a_network_without_layers() -> None:
    with pytest.raises(nm.NothingToPrune, match="no layer"):
        nm.compress(nn.ReLU(), X)


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).softmax(1)).cumsum(1))


def test_a_network_that_refuses_everywhere_gives_every_reason() -> None:
    error = failing(compressing(Refusing()), "a: softmax", "b: cumsum", "c: output", "self.a(x).softmax(1)")
    assert isinstance(error, nm.NothingToPrune)


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": {"0": 0}}, {"ignore": ["*"]}, {"round_to": 8}], ids=str)
def test_options_that_leave_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(nm.NothingToPrune):
        nm.compress(small_net(), X, **options)


def test_only_residual_streams() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c((self.a(x) + self.b(x)).relu())

    with pytest.raises(nm.NothingToPrune, match='scope="all"'):
        nm.compress(Stream(), X)


# A criterion of one's own

BAD_SCORES: dict[str, Callable[[Tensor], Any]] = {
    "too few": lambda rows: rows.norm(dim=1)[1:],
    "a matrix": lambda rows: rows,
    "a number": lambda rows: rows.norm(),
    "a list": lambda rows: rows.norm(dim=1).tolist(),
    "nothing": lambda rows: None,
    "nan": lambda rows: rows.norm(dim=1) * float("nan"),
    "infinity": lambda rows: rows.norm(dim=1) / 0,
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_criterion_that_returns_no_scores(name: str) -> None:
    failing(compressing(criterion=BAD_SCORES[name]), "criterion")


def test_criterion_cannot_change_the_model() -> None:
    model = small_net()
    before = model[0].weight.detach().clone()
    nm.compress(model, X, criterion=lambda rows: rows.zero_().sum(1))
    assert torch.equal(model[0].weight, before)


# Plans


@pytest.fixture
def plan() -> nm.Plan:
    return nm.compress(small_net(), X, merger="none").plan


def test_plan_on_a_network_with_other_layers(plan: nm.Plan) -> None:
    failing(lambda: nm.apply_plan(nn.Linear(6, 3), plan), "does not fit", "0.weight")


def test_plan_on_a_narrower_network() -> None:
    plan = nm.compress(small_net(16), X, merger="none", criterion=lambda rows: torch.arange(len(rows))).plan
    failing(lambda: nm.apply_plan(small_net(8), plan), "does not fit", "(8, 6)")


def test_plan_on_a_wider_network(plan: nm.Plan) -> None:
    failing(lambda: nm.apply_plan(small_net(16), plan), "does not fit")


def test_plan_on_the_network_that_it_has_made_already() -> None:
    result = nm.compress(small_net(), X, merger="none", criterion=lambda rows: -torch.arange(len(rows)))
    failing(lambda: nm.apply_plan(result.model, result.plan), "does not fit")


def test_plan_on_no_network(plan: nm.Plan) -> None:
    with pytest.raises(nm.MergingError):
        nm.apply_plan(small_net().state_dict(), plan)


@pytest.mark.parametrize(
    "text", ["", "garbage", "[]", "null", "{}", '{"version": "one"}', '{"version": 1}', b"\xff\xfe"]
)
def test_garbage_is_no_plan(text: str | bytes) -> None:
    failing(lambda: nm.Plan.from_json(text), "not a plan")


def test_half_a_plan(plan: nm.Plan) -> None:
    text = plan.to_json()
    for end in (1, len(text) // 2, len(text) - 2):
        failing(lambda end=end: nm.Plan.from_json(text[:end]), "not a plan")


def test_a_plan_of_a_newer_version(plan: nm.Plan) -> None:
    newer = json.loads(plan.to_json()) | {"version": 99, "something": "else"}
    failing(lambda: nm.Plan.from_json(json.dumps(newer)), "99", "Update")


@pytest.mark.parametrize("kept", [[-1, 2], [3, 1], [2, 2], [0.5]], ids=str)
def test_a_plan_with_impossible_indices(plan: nm.Plan, kept: list[Any]) -> None:
    damaged = json.loads(plan.to_json())
    damaged["cuts"][0]["kept"] = kept
    failing(lambda: nm.apply_plan(small_net(), nm.Plan.from_json(json.dumps(damaged))), "plan")


# The error itself


def test_errors_go_between_processes() -> None:
    error = failing(compressing(ratio=2))
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error) and str(twin) == str(error) and twin.fix == error.fix


@pytest.mark.parametrize("kind", [nm.NothingToPrune, nm.VerificationError])
def test_all_errors_are_merging_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, nm.MergingError)
