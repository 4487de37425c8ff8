"""Verification detects wrong networks, and reports the power of its test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.masked_run import MergedColumns
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.pipeline import compress, compress_analysis
from neuron_merging.pruning import surgery, trial_prune, verify
from neuron_merging.pruning.verify import VerificationResult
from tests.failing import Branching, compressing, failing
from tests.zoo.unusual import VECTORS, Plain

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three layers whose use of the middle one's channels is the test's."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def divided(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    return net.c(net.b(y / y.shape[1]).relu())  # type: ignore[no-any-return]


def scaled(net: Net, x: Tensor) -> Tensor:
    return net.c(F.linear(net.a(x).relu(), net.b.weight) * net.b.weight.shape[1] ** -0.5)  # type: ignore[no-any-return]


def masked(net: Net, x: Tensor) -> Tensor:
    y = divided(net, x)
    return torch.cat([y, torch.full_like(y, -1e9)], 1)


def lowest(net: Net, x: Tensor) -> Tensor:
    y = divided(net, x)
    return torch.cat([y, torch.full_like(y, torch.finfo(y.dtype).min)], 1)


def beside(net: Net, x: Tensor) -> Tensor:
    return torch.cat([1e5 + net.c.weight.sum() * x, 1e-2 * divided(net, x)], 1)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without trial cuts, verification alone has to see it."""
    monkeypatch.setattr(trial_prune, "_resolve_doubts", lambda analysis: analysis)
    monkeypatch.setattr(trial_prune, "exclude_counted_channels", lambda analysis: analysis)
    monkeypatch.setattr(trial_prune, "shrink_after_failure", lambda *_: None)


@pytest.mark.parametrize("example", ["zeros", "noise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forward", [divided, scaled, masked, lowest, beside])
def test_a_channel_count_used_as_a_number_is_seen(
    forward: Forward, dtype: torch.dtype, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind(monkeypatch)
    x = torch.zeros(2, 6) if example == "zeros" else torch.randn(2, 6)
    with pytest.raises(nm.MergingError, match="differs"):
        nm.compress(Net(forward).to(dtype), x.to(dtype), ratio={"a": 0.5}, merger="none")


def test_masks_in_outputs_are_no_differences() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.c(net.b(net.a(x).relu()).relu())
        parts = [y, torch.full_like(y, -math.inf), torch.full_like(y, torch.finfo(y.dtype).min), y - 1e9]
        return torch.cat(parts, 1)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = nm.compress(Net(forward).to(dtype), torch.randn(2, 6, dtype=dtype)).summary.verified
        assert found is not None and found.distance is not None and found.distance < 1e-9, dtype


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def checked(model: nn.Module, x: Tensor, **options: object) -> VerificationResult:
    found = nm.compress(model, x, **options).summary.verified  # type: ignore[arg-type]
    assert found is not None
    return found


def test_it_says_on_what_and_how_exactly_it_compared() -> None:
    found = checked(plain(), torch.zeros(1, 6))
    assert found.inputs == ("on the example", "on fresh inputs") and found.precision == "float64"
    assert found.distance is not None and found.distance < 1e-12 and found.independent
    assert found.power is not None and found.power > 1e-2 and not found.is_powerless


def test_a_head_of_zeros_is_verified_with_fresh_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain()
    nn.init.zeros_(model[4].weight)
    found = checked(model, torch.randn(2, 6), merger="none")
    assert found.power == 0 and found.raised is not None and found.raised > 1e-2 and not found.is_powerless
    monkeypatch.setattr(surgery, "cut_tensor", shuffled(surgery.cut_tensor))
    with pytest.raises(MergingError, match="differs"):
        nm.compress(model, torch.randn(2, 6), merger="none")


def test_a_large_network_gets_fresh_weights_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = plain(), torch.randn(2, 6)
    nn.init.zeros_(model[4].weight)
    held = checked(model, x).raised
    monkeypatch.setattr(verify, "MAX_COPIED_PARAMETERS", 0)
    found = checked(model, x)
    assert found.raised is not None and held is not None and 0.1 < found.raised / held < 10
    monkeypatch.setattr(surgery, "cut_tensor", shuffled(surgery.cut_tensor))
    with pytest.raises(MergingError, match="differs"):
        nm.compress(model, x)


@pytest.mark.parametrize("axis", [Axis("weight", 1), Axis("weight", 1, blocks=2)])
def test_columns_are_written_into_a_copy(axis: Axis) -> None:
    weight, positions = torch.randn(4, 6), torch.tensor([0, 2, 5])
    exposed = axis.join_blocks(weight).clone()
    columns = MergedColumns(axis, positions, torch.randn(len(exposed), 3))
    before = weight.clone()
    exposed[:, positions] = columns.values
    assert torch.equal(columns.write_into(weight), axis.split_blocks(exposed))
    assert torch.equal(weight, before)


def test_what_stands_in_for_fresh_weights_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_COPIED_PARAMETERS", 0)
    analysis = nm.analyse(plain(), torch.zeros(1, 6))
    small = compress_analysis(analysis, CompressConfig(ratio=0.5), judge=False)
    trial = verify.reinit_networks(analysis, small.plan, small.merged or MergeResult(()))
    tensors = [*trial.small.parameters(), *trial.graph.tensors.values()]
    assert max(tensor.untyped_storage().nbytes() for tensor in tensors) == 4
    assert [p.shape for p in trial.small.parameters()] == [p.shape for p in small.model.parameters()]
    with trial.within:
        assert all(bool((parameter + 0).isfinite().all()) for parameter in trial.small.parameters())


def test_a_tiny_layer_scale_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gamma = nn.Linear(6, 16), nn.Linear(16, 6), nn.Parameter(torch.full((6,), 1e-7))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.gamma * self.b(self.a(x).relu())
            return y

    found = checked(Scaled(), torch.randn(2, 6))
    assert found.power is not None and found.power < 1e-4 and found.raised is not None and found.raised > 1e-2
    monkeypatch.setattr(surgery, "cut_tensor", shuffled(surgery.cut_tensor))
    with pytest.raises(MergingError, match="differs"):
        nm.compress(Scaled(), torch.randn(2, 6))


def test_no_power_is_said_plainly() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x.sum(1, keepdim=True) + 0 * self.b(self.a(x).relu())
            return y

    result = nm.compress(Constant(), torch.randn(2, 6))
    assert result.summary.verified is not None and result.summary.verified.is_powerless
    assert "without power" in str(result.summary)


def shuffled(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cut(*given: object) -> Tensor:
        found = real(*given)
        return found.roll(1, 0) if found.ndim > 1 else found

    return cut


def test_the_reference_shares_nothing_with_the_surgery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgery, "cut_tensor", shuffled(surgery.cut_tensor))
    with pytest.raises(MergingError, match="differs"):
        nm.compress(plain(), torch.randn(2, 6))


def test_code_that_names_a_precision_is_compared_in_double_precision() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x.float()).relu() + torch.zeros(16, dtype=torch.float32)
        return net.c(net.b(y.to(torch.float32)).relu()).float()

    found = checked(Net(forward), torch.randn(2, 6))
    assert found.precision == "float64" and found.distance is not None and found.distance < 1e-12


class Placed(nn.Module):
    """What is added to the input comes of a stored table, by layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 16), nn.Linear(16, 6)
        self.register_buffer("table", torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b(self.a(self.table).relu())


def test_layers_that_read_a_stored_table_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_prune, "shrink_after_failure", lambda *_: None)
    small = nm.compress(Placed(), torch.randn(2, 3, 6), merger="none", effort="fast")
    assert small.model.a.out_features == 8


def test_doubles_decide_where_rounding_may_be_all_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = verify._compare_outputs

    def exactly(got: Any, want: Any, **options: Any) -> float | None:
        if got[0].dtype == torch.float32:
            raise nm.VerificationError("rounded")
        return compare(got, want, **options)

    monkeypatch.setattr(verify, "MAX_CHEAP_MACS", -1)  # then the example is compared in single precision first
    monkeypatch.setattr(verify, "_compare_outputs", exactly)
    monkeypatch.setattr(trial_prune, "shrink_after_failure", lambda *_: None)
    found = nm.compress(Plain(), VECTORS, merger="none", effort="fast").summary.verified
    assert found is not None and found.precision == "float64"


def test_large_networks_with_biases_are_compared_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_FLOAT64_PARAMETERS", 0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    found = nm.compress(model, torch.randn(2, 3, 4, 4), merger="none", effort="fast").summary.verified
    assert found is not None and found.precision == "float64"


def test_images_are_compared_at_another_size_and_number() -> None:
    from neuron_merging.pruning.verify import make_fresh_inputs

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1))
    (fresh,) = next(make_fresh_inputs(nm.analyse(model, torch.zeros(1, 3, 32, 32))))
    assert fresh.shape == (2, 3, 24, 24) and fresh.std() > 0.5


def test_a_cut_that_fits_one_image_size_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of channels is what the code asks of the size, by chance right for the example."""

    class Chance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).relu()
            y = y * (2.0 if y.shape[1] * 8 < y.shape[3] * 2 and y.shape[3] != 32 else 1.0)
            return self.b(y).mean((2, 3))  # type: ignore[no-any-return]

    blind(monkeypatch)
    with pytest.raises(MergingError, match="differs"):
        nm.compress(Chance(), torch.randn(1, 3, 32, 32), merger="none")


def test_tokens_are_drawn_and_numbers_of_unknown_meaning_are_repeated() -> None:
    from neuron_merging.pruning.verify import make_fresh_inputs

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a, self.b = nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(self.table(tokens)).relu()) * mask[..., None]
            return y

    tokens, mask = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)
    drawn, repeated = next(make_fresh_inputs(nm.analyse(Text(), (tokens, mask))))
    assert len(np.unique(drawn)) > 2 and repeated.dtype == torch.bool and bool(repeated.all())


def test_writing_through_a_view_that_is_read_again_is_no_difference() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = y.relu_()
            return self.b(z + y)  # type: ignore[no-any-return]

    assert checked(Written(), torch.randn(2, 3, 8, 8), scope="all").distance is not None


class Deciding(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).argmax(1)


def test_whole_numbers_are_not_called_verified() -> None:
    found = nm.compress(Deciding(), VECTORS)
    assert found.summary.error is None and any("not verified" in note for note in found.summary.notes)


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
    failing(compressing(Scaled(1e30), torch.randn(2, 6)), "output 0 is not finite in the original", "example_inputs")


def test_outputs_that_are_not_finite_are_an_error_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "prepare_inputs", lambda *_: pytest.fail("inputs were made"))
    failing(compressing(Scaled(1e30), torch.randn(2, 6)), "output 0 is not finite", "example_inputs")


def test_a_bias_that_merging_makes_is_compared_in_the_precision_that_stores_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12, bias=False), nn.ReLU(), nn.Linear(12, 3))
    found = nm.compress(net.bfloat16(), torch.randn(4, 6).bfloat16(), ratio=0.5)
    assert found.model[2].bias is not None and found.summary.verified.precision == "float64"
