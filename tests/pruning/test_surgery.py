"""The smaller network follows the original in all but its sizes, and can do all that the original could."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.module_rewrites import fold_parametrizations
from tests.conftest import mark_long
from tests.pruning.zeroing import distance, leaves, run
from tests.zoo import CASES
from tests.zoo.pruning import CLOSE, every_graph, prune


@every_graph
def test_the_result_follows_the_original(name: str) -> None:
    done = prune(name)
    assert type(done.small) is type(done.model)
    assert done.small.training and done.model.training
    plain = fold_parametrizations(done.model)  # what torch computes at every call is stored in the result
    wanted = {key: p.requires_grad for key, p in plain.named_parameters()}
    assert {key: p.requires_grad for key, p in done.small.named_parameters()} == wanted
    assert not {t.data_ptr() for t in done.small.parameters()} & {t.data_ptr() for t in done.model.parameters()}
    assert done.small.state_dict().keys() == plain.state_dict().keys()


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
    original = fold_parametrizations(done.case.build()).requires_grad_(True)
    sum(t.square().mean() for t in leaves(original(*done.case.inputs()))).backward()
    assert reached(small) == reached(original)


def reached(model: nn.Module) -> set[str]:
    """Parameters that a backward pass has given a gradient."""
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


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


EXPORTED = ("residual", "grouped transposed", "inverted bottleneck", "channel shuffle by hand")


@pytest.mark.parametrize("name", mark_long(EXPORTED, {"residual"}))
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


def test_the_memory_format_stays() -> None:
    case = CASES["batch norm 2d"]
    model = case.build().to(memory_format=torch.channels_last)
    small = nm.compress(model, case.inputs(), merger="none").model
    assert small.b.weight.is_contiguous(memory_format=torch.channels_last)
