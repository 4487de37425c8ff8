"""Every network of the zoo: the right channels go, everywhere, and nothing else changes."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from graphs import CASES, Case
from torch import Tensor, nn
from zeroing import distance, input_dims, leaves, run, with_dead_channels, without_readers

import neuron_merging as nm

CLOSE = 1e-5


def graphs(where: Callable[[Case], object] = lambda case: True) -> pytest.MarkDecorator:
    """The zoo, or the part of it that a test is for."""
    return pytest.mark.parametrize("name", [name for name, case in CASES.items() if where(case)])


every_graph = graphs()


@dataclass(frozen=True)
class Run:
    """One plain pruning of a case, with what the user's model was before."""

    case: Case
    model: nn.Module
    state: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    result: nm.Compressed

    @property
    def small(self) -> nn.Module:
        return self.result.model


def do_nothing(module: nn.Module, inputs: object, output: object) -> None:
    """A hook of the user's."""


@cache
def prune(name: str) -> Run:
    """Half of every group, with marks on the model that must survive: gradients, a hook, frozen weights, modes."""
    case = CASES[name]
    model = case.build()
    model.register_forward_hook(do_nothing)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
        parameter.grad = torch.ones_like(parameter) if i % 3 == 1 else None
    state = copy.deepcopy(model.state_dict())
    grads = {key: p.grad for key, p in model.named_parameters()}
    result = nm.compress(model, case.inputs(), ratio=0.5, merger="none", scope="all")
    return Run(case, model, state, grads, result)


def output_cuts(done: Run) -> set[str]:
    reads = input_dims(done.model, done.case.reads)
    return {cut.tensor for cut in done.result.plan.cuts if reads.get(cut.tensor) != cut.dim}


@every_graph
def test_the_layers_that_can_shrink_do(name: str) -> None:
    done = prune(name)
    assert set(done.case.cut) <= output_cuts(done), done.result.summary
    before, after = done.result.summary.parameters
    assert after < before


@graphs(lambda case: case.refused)
def test_refusals_give_operator_or_line(name: str) -> None:
    done = prune(name)
    for layer, word in done.case.refused.items():
        assert f"{layer}.weight" not in output_cuts(done)
        reasons = [str(r) + r.operator + r.place for r in done.result.summary.refusals if r.layer == layer]
        assert any(word in reason for reason in reasons), done.result.summary.refusals


def first_four(x: Tensor) -> Tensor:
    return x[:, :4]


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = first_four(self.a(x))
        return self.c(self.b(x).relu())


def test_a_constant_in_a_helper_gives_the_line_that_calls_it() -> None:
    refusals = nm.compress(Helped(), torch.randn(2, 6)).summary.refusals
    assert any("first_four(self.a(x))" in refusal.place for refusal in refusals if refusal.layer == "a")


@pytest.mark.xfail(strict=True, reason="torch.export records the lines of functions with the name forward alone")
def test_a_constant_in_a_helper_gives_its_own_line() -> None:
    refusals = nm.compress(Helped(), torch.randn(2, 6)).summary.refusals
    assert any("return x[:, :4]" in refusal.place for refusal in refusals if refusal.layer == "a")


@graphs(lambda case: not case.spans)
def test_equals_the_original_without_the_readers(name: str) -> None:
    done = prune(name)
    reference = without_readers(done.model, done.result.plan, done.case.reads, done.case.contracts)
    for seed in (1, 2):
        inputs = done.case.inputs(seed)
        assert distance(run(done.small, inputs), run(reference, inputs)) < CLOSE


@graphs(lambda case: case.dead)
def test_removing_dead_channels_changes_nothing(name: str) -> None:
    case, plan = CASES[name], prune(name).result.plan
    dead = with_dead_channels(case.build(), plan, case.reads)
    again = nm.compress(dead, case.inputs(), ratio=0.5, criterion=norm, merger="none", scope="all")
    assert [(g.name, g.kept) for g in again.plan.groups] == [(g.name, g.kept) for g in plan.groups]
    assert distance(run(again.model, case.inputs(2)), run(dead, case.inputs(2))) < CLOSE


def norm(rows: Tensor) -> Tensor:
    return rows.norm(dim=1)


@every_graph
def test_the_users_model_is_untouched(name: str) -> None:
    done = prune(name)
    fresh = done.case.build()
    assert done.state.keys() == done.model.state_dict().keys()
    assert all(torch.equal(value, done.state[key]) for key, value in done.model.state_dict().items())
    assert all(parameter.grad is done.grads[key] for key, parameter in done.model.named_parameters())
    assert [p.requires_grad for p in done.model.parameters()] == [i % 3 != 0 for i in range(len(done.grads))]
    assert list(done.model._forward_hooks.values()) == [do_nothing]
    assert repr(done.model) == repr(fresh)
    assert all(module.training for module in done.model.modules())


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        x += 1
        result: Tensor = self.net(2 * x) + self.net(x)
        return result


@pytest.mark.parametrize("merger", ["none", "cosine", "moments", None])
def test_a_network_may_write_into_its_inputs(merger: str | None) -> None:
    x = torch.randn(3, 4)
    given, model = x.clone(), Writing()
    found = nm.compress(model, ({"x": given},), merger=merger, calibration=None if merger else [({"x": given},)])
    assert found.summary.parameters[1] < found.summary.parameters[0]
    nm.inspect(model, ({"x": given},))
    assert torch.equal(given, x)


@every_graph
def test_the_result_follows_the_original(name: str) -> None:
    done = prune(name)
    assert type(done.small) is type(done.model)
    assert done.small.training and done.model.training
    wanted = {key: p.requires_grad for key, p in done.model.named_parameters()}
    assert {key: p.requires_grad for key, p in done.small.named_parameters()} == wanted
    assert not {t.data_ptr() for t in done.small.parameters()} & {t.data_ptr() for t in done.model.parameters()}
    assert done.small.state_dict().keys() == done.model.state_dict().keys()


def test_the_mode_of_every_module_follows_the_original() -> None:
    case = CASES["residual"]
    model = case.build()
    model.get_submodule("a.1").eval()
    small = nm.compress(model, case.inputs(), merger="none").model
    modes = {key: module.training for key, module in model.named_modules()}
    assert {key: module.training for key, module in small.named_modules()} == modes


def test_evaluation_mode_follows_the_original() -> None:
    case = CASES["residual"]
    small = nm.compress(case.build().eval(), case.inputs(), merger="none").model
    assert not any(module.training for module in small.modules())


@every_graph
def test_attributes_agree_with_tensors(name: str) -> None:
    for path, module in prune(name).small.named_modules():
        assert sizes(module) == expected_sizes(module), path


def sizes(module: nn.Module) -> tuple[object, ...]:
    """What a module says of its sizes."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels, module.in_channels
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return (module.num_features,)
    if isinstance(module, nn.GroupNorm):
        return module.num_channels, module.num_channels % module.num_groups
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return tuple(module.normalized_shape)
    if isinstance(module, nn.PReLU):
        return (module.num_parameters,)
    return (module.embedding_dim,) if isinstance(module, nn.Embedding) else ()


def expected_sizes(module: nn.Module) -> tuple[object, ...]:
    """What its tensors say."""
    tensor = getattr(module, "weight", getattr(module, "running_mean", None))
    if not isinstance(tensor, Tensor):
        return sizes(module)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return tensor.shape[1] * module.groups, tensor.shape[0]
    if isinstance(module, nn.modules.conv._ConvNd):
        return tensor.shape[0], tensor.shape[1] * module.groups
    if isinstance(module, nn.GroupNorm):
        return tensor.shape[0], 0
    if isinstance(module, nn.Embedding):
        return (tensor.shape[1],)
    return tuple(tensor.shape)


@every_graph
def test_the_result_trains(name: str) -> None:
    done = prune(name)
    small = copy.deepcopy(done.small).requires_grad_(True)
    optimizer = torch.optim.SGD(small.parameters(), 1e-3)
    sum(t.square().mean() for t in leaves(small(*done.case.inputs()))).backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(small.parameters(), done.small.parameters(), strict=True)]
    assert any(moved)
    assert all(parameter.isfinite().all() for parameter in small.parameters())


@every_graph
def test_the_result_can_be_stored_and_exported(name: str) -> None:
    done = prune(name)
    inputs, wanted = done.case.inputs(2), run(done.small, done.case.inputs(2))
    buffer = io.BytesIO()
    torch.save(done.small.state_dict(), buffer)
    twin = copy.deepcopy(done.small)
    nn.init.zeros_(next(twin.parameters()))
    twin.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert distance(run(twin, inputs), wanted) == 0
    exported = [value.detach() for value in leaves(export(twin.eval(), inputs)(*inputs))]
    assert distance(exported, wanted) < CLOSE


def export(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights", UserWarning)
        return torch.export.export(model, inputs, strict=False).module()


@pytest.mark.parametrize("name", ["residual", "grouped transposed", "inverted bottleneck", "channel shuffle by hand"])
def test_the_result_goes_to_onnx(name: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    done = prune(name)
    inputs, buffer = done.case.inputs(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(copy.deepcopy(done.small).eval(), inputs, dynamo=True, verbose=False).save(buffer)
    session = ort.InferenceSession(buffer.getvalue())
    feed = {slot.name: value.numpy() for slot, value in zip(session.get_inputs(), inputs, strict=True)}
    got = [torch.from_numpy(value) for value in session.run(None, feed)]
    assert distance(got, run(done.small, inputs)) < 1e-4


@every_graph
def test_the_plan_rebuilds_the_network(name: str) -> None:
    done = prune(name)
    plan = nm.Plan.from_json(done.result.plan.to_json())
    assert plan == done.result.plan
    fresh = done.case.build(seed=7)
    state = copy.deepcopy(fresh.state_dict())
    rebuilt = nm.apply_plan(fresh, plan)
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    rebuilt.load_state_dict(done.small.state_dict())
    for mine, theirs in zip(rebuilt.parameters(), done.small.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    give_lost_buffers(rebuilt, done.small)
    assert distance(run(rebuilt, done.case.inputs(2)), run(done.small, done.case.inputs(2))) == 0


def give_lost_buffers(model: nn.Module, source: nn.Module) -> None:
    """Buffers that are not persistent are in no state dict."""
    theirs = dict(source.named_buffers())
    for key, buffer in model.named_buffers():
        if key not in source.state_dict():
            buffer.copy_(theirs[key])


@every_graph
def test_merging_keeps_topology_and_numbers(name: str) -> None:
    done = prune(name)
    merged = nm.compress(done.case.build(), done.case.inputs(), ratio=0.5, merger="cosine", scope="all")
    shapes = {key: value.shape for key, value in done.small.state_dict().items()}
    assert {key: value.shape for key, value in merged.model.state_dict().items()} == shapes
    assert merged.plan.cuts == done.result.plan.cuts
    assert all(value.isfinite().all() for value in merged.model.state_dict().values())
    assert all(group.said for group in merged.summary.groups)


# What else people do


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Ungraded(Plain):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("kind", [Ungraded, Autocast])
def test_layers_in_a_context_are_refused_for_it(kind: type[nn.Module]) -> None:
    with pytest.raises(nm.NothingToPrune, match="no_grad or autocast"):
        nm.compress(kind(), torch.randn(2, 6))


class Numbers(Plain):
    def forward(self, x: Tensor, scale: float = 1.0, shifted: bool = False) -> Tensor:
        return super().forward(x) * scale + shifted


def test_numbers_among_the_inputs() -> None:
    assert nm.compress(Numbers(), (torch.randn(2, 6), 2.0, True)).model.a.out_features == 4


class Mapped(Plain):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["x"])


def test_a_dictionary_as_the_input() -> None:
    assert nm.compress(Mapped(), ({"x": torch.randn(2, 6)},)).model.a.out_features == 4


def test_a_parallel_wrapper() -> None:
    result = nm.compress(nn.DataParallel(Plain()), torch.randn(2, 6))
    assert [group.name for group in result.plan.groups] == ["module.a"]


def test_the_memory_format_stays() -> None:
    case = CASES["batch norm 2d"]
    model = case.build().to(memory_format=torch.channels_last)
    small = nm.compress(model, case.inputs(), merger="none").model
    assert small.b.weight.is_contiguous(memory_format=torch.channels_last)


def test_every_layer_is_cut_or_refused() -> None:
    case = CASES["depthwise on the input"]
    found = nm.inspect(case.build(), case.inputs())
    named = {layer for group in found.groups for layer in group.layers} | {r.layer for r in found.refusals}
    assert named == {"a", "b", "c"}


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["slice literals"]
    with caplog.at_level("WARNING"):
        nm.inspect(case.build(), case.inputs())
    assert not caplog.records
