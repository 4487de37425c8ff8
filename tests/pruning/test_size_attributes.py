"""Sizes that a network's own modules keep as attributes shrink with the channels, where that makes the code follow."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.conftest import import_or_fail


class Projection(nn.Module):
    """A linear layer as some libraries write it: with its width in an attribute."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, width) / inputs**0.5),
            nn.Parameter(torch.zeros(width)),
        )
        self.width, self.times = width, 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.width)


class Wide(nn.Module):
    """Two widths that are the same number, and a third that the code never looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Projection(5, 8), Projection(8, 8), Projection(8, 3)
        self.unused = 8

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


class Insisting(Wide):
    """A check of the kind that libraries make: a number that only an error message depends on."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.shape[-1] != self.unused:
            raise ValueError(f"expected {self.unused} channels")
        return self.c(self.b(y.relu()).relu())


@pytest.mark.parametrize("network", [Wide, Insisting])
def test_attributes_follow_and_a_fresh_network_gets_them(network: type[nn.Module], tmp_path: Path) -> None:
    x = torch.randn(2, 4, 5)
    small = nm.compress(network(), x, ratio={"a": 0.25, "b": 0.5})
    assert (small.model.a.width, small.model.b.width, small.model.c.width) == (6, 4, 3)
    assert small.model.unused == (6 if network is Insisting else 8)
    assert small.plan.modules["a"] == {"width": 6}
    small.save(tmp_path / "small")
    again = nm.load(tmp_path / "small", build=network)
    assert torch.equal(again(x), small.model(x)) and again.a.width == 6


class Fixed(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).view(*x.shape[:-1], 8).relu()).relu())


def test_a_literal_is_still_a_constant() -> None:
    refusals = {refusal.layer: str(refusal) for refusal in nm.inspect(Fixed(), torch.randn(2, 4, 5)).refusals}
    assert "view(*x.shape[:-1], 8)" in refusals["a"]


class Heads(nn.Module):
    """A view that fewer heads do not stop: their channels pass for fewer places, or for narrower heads."""

    def __init__(self, inferred: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads, self.width, self.inferred = 4, 2, inferred

    def forward(self, x: Tensor) -> Tensor:
        sizes = [x.shape[0], x.shape[1], self.heads, self.width]
        sizes[self.inferred] = -1
        q, k, v = (layer(x).view(sizes).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


@pytest.mark.parametrize("inferred", [1, 3])
def test_attributes_follow_where_only_a_shape_is_wrong(inferred: int) -> None:
    small = nm.compress(Heads(inferred), torch.randn(2, 5, 8), merger="none", effort="fast").model
    assert (small.heads, small.width, small.q.out_features) == (2, 2, 4)


class Scaled(nn.Module):
    """Sizes that are one of several numbers: what a norm runs over, what a scale is seen as, uneven pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.scale = nn.Parameter(torch.rand(8))
        self.shape, self.normed, self.pieces = (8, 1, 1), (8,), [6, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([part.relu() for part in self.a(x).split(self.pieces, 1)], 1) * self.scale.view(self.shape)
        return self.b(nn.functional.layer_norm(x.movedim(1, -1), self.normed).movedim(-1, 1))


def test_one_of_several_numbers_follows(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 5, 5)
    small = nm.compress(Scaled(), x, merger="none", effort="fast")
    assert (small.model.shape, small.model.normed, small.model.pieces) == ((4, 1, 1), (4,), [3, 1])
    small.save(tmp_path / "small")
    assert torch.equal(nm.load(tmp_path / "small", build=Scaled)(x), small.model(x))


class Beside(nn.Module):
    """Sizes among numbers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.shape, self.lengths = (-1, 8), {"heads": 8, "shift": 0, "__seed": -3}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).view(self.shape).relu()
        return self.b(x.unflatten(1, (self.lengths["heads"], 1)).flatten(1))


def test_numbers_beside_a_size_stay_and_are_read_again(tmp_path: Path) -> None:
    x = torch.randn(2, 6)
    small = nm.compress(Beside(), x, merger="none", effort="fast")
    assert small.plan.modules[""] == {"shape": (-1, 4), "lengths": {"heads": 4, "shift": 0, "__seed": -3}}
    small.save(tmp_path / "small")
    assert torch.equal(nm.load(tmp_path / "small", build=Beside)(x), small.model(x))
    for shape in ((-1, -1), (-1, 0), (-2, 4), (1, 4)):
        changed = msgspec.structs.replace(small.plan, modules={"": {"shape": shape}})
        with pytest.raises(nm.MergingError, match="does not fit"):
            nm.apply_plan(Beside(), changed)


class Split(nn.Module):
    """A view as some libraries have it as a layer, with sizes by name, which it prepares and makes itself anew from."""

    def __init__(self, **lengths: int) -> None:
        super().__init__()
        self.lengths, self.prepared = lengths, tuple(lengths.items())

    def forward(self, x: Tensor) -> Tensor:
        ((name, size),) = self.prepared
        return x.unflatten(-1, (size, -1) if name == "heads" else (-1, size)).transpose(1, 2)

    def __getstate__(self) -> dict[str, object]:
        return {"lengths": self.lengths}

    def __setstate__(self, state: dict[str, dict[str, int]]) -> None:
        self.__init__(**state["lengths"])  # type: ignore[misc]


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


class SplitByLayers(nn.Module):
    """Too few heads are noticed by a layer that holds no size, and not by the one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.split_q, self.split_k, self.split_v, self.attend = Split(heads=4), Split(width=2), Split(width=2), Attend()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split_q(self.q(x)), self.split_k(self.k(x)), self.split_v(self.v(x))
        return x + self.out(self.attend(q, k, v).flatten(2))


def unread(model: nn.Module, plan: nm.Plan) -> nn.Module:
    """The original, whose last layer does not read what was removed."""
    (kept,) = [cut.kept for cut in plan.cuts if (cut.tensor, cut.dim) == ("out.weight", 1)]
    masked = copy.deepcopy(model)
    with torch.no_grad():
        masked.out.weight[:, sorted(set(range(masked.out.in_features)) - set(kept))] = 0
    return masked


def test_sizes_follow_that_layers_hold_by_name(tmp_path: Path) -> None:
    model = SplitByLayers()
    small = nm.compress(model, torch.randn(2, 5, 8), merger="none", effort="fast")
    assert (small.model.split_q.lengths, small.model.split_q.prepared) == ({"heads": 2}, (("heads", 2),))
    assert (model.split_q.lengths, small.plan.modules["split_q"]) == ({"heads": 4}, {"lengths": {"heads": 2}})
    small.save(tmp_path / "small")
    again, x = nm.load(tmp_path / "small", build=SplitByLayers), torch.randn(3, 7, 8)
    assert torch.equal(again(x), small.model(x)) and torch.equal(copy.deepcopy(again)(x), small.model(x))
    torch.testing.assert_close(small.model(x), unread(model, small.plan)(x))


@pytest.mark.parametrize(
    "lengths", [{"heads": 5}, {"heads": 0}, {"heads": -1}, {"width": 2}, {"heads": 2, "width": 2}, {}, 2, (2,)]
)
def test_a_plan_sets_no_other_sizes_by_name(lengths: object) -> None:
    plan = nm.compress(SplitByLayers(), torch.randn(2, 5, 8), merger="none", effort="fast").plan
    changed = msgspec.structs.replace(plan, modules={**plan.modules, "split_q": {"lengths": lengths}})
    with pytest.raises(nm.MergingError, match="does not fit"):
        nm.apply_plan(SplitByLayers(), changed)


class Coincidence(nn.Module):
    """As many heads of keys as channels that are turned by their place, and only one of the two is to shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(8, 24), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(24, 8)
        self.heads, self.keys, self.width, self.turned, self.unused = 4, 2, 6, 2, 2

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.turn(self.q(x).view(b, n, self.heads, self.width).transpose(1, 2))
        k = self.turn(self.k(x).view(b, n, self.keys, self.width).transpose(1, 2))
        v = self.v(x).view(b, n, self.keys, self.width).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(b, n, -1))

    def turn(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., : self.turned] * torch.arange(x.shape[2])[:, None], x[..., self.turned :]], -1)


def test_only_attributes_follow_without_which_it_does_not_work() -> None:
    model = Coincidence()
    small = nm.compress(model, torch.randn(2, 5, 8), merger="none", effort="fast")
    assert small.plan.modules[""] == {"heads": 2, "keys": 1}
    x = torch.randn(3, 7, 8)
    torch.testing.assert_close(small.model(x), unread(model, small.plan)(x))


class Neighbours(nn.Module):
    """The code takes the width of one layer from another's, which must not shrink: no constant is to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.middle, self.head = (nn.Linear(i, o) for i, o in ((5, 8), (8, 8), (8, 6), (6, 2)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, count, _ = x.shape
        x = self.stem(x).reshape(batch, -1, 8 if self.stem is None else self.stem(x).shape[-1])
        inner = self.inner(x)
        return self.head(self.middle(x).relu()), inner.reshape(batch, count, x.shape[-1])


def test_groups_are_tried_one_at_a_time() -> None:
    found = nm.inspect(Neighbours(), torch.randn(2, 4, 5))
    assert [group.name for group in found.groups] == ["middle"]
    (why,) = [str(refusal) for refusal in found.refusals if refusal.layer == "stem"]
    assert "inner.reshape(batch, count, x.shape[-1])" in why and "constant" not in why


class Asking(nn.Module):
    """Code that looks at values, unless it is being exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.width = nn.Linear(5, 8), nn.Linear(8, 3), 8

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if not torch.compiler.is_exporting() and not y.isfinite().all():
            raise ValueError("these are no numbers")
        return self.b(y.reshape(-1, self.width).relu()).reshape(*x.shape[:-1], -1)


def test_attributes_follow_in_code_that_runs_without_values_in_an_export_alone() -> None:
    model, x = Asking(), torch.randn(3, 7, 5)
    small = nm.compress(model, torch.randn(2, 4, 5), merger="none", effort="fast")
    assert small.model.width == small.model.a.out_features == 4 and not torch.compiler.is_exporting()
    (kept,) = [cut.kept for cut in small.plan.cuts if (cut.tensor, cut.dim) == ("b.weight", 1)]
    with torch.no_grad():
        model.b.weight[:, sorted(set(range(8)) - set(kept))] = 0
    torch.testing.assert_close(small.model(x), model(x))


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias)


class Halfway(nn.Module):
    """The code stops between two norms that are the same line."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.out, self.head = (nn.Linear(i, o) for i, o in ((5, 8), (8, 24), (8, 8), (8, 2)))
        self.before, self.after = Norm(8), Norm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(b, n, c))
        return self.head(self.after(torch.cat([x, x], 1)))


def test_a_line_that_was_not_reached_is_not_to_blame() -> None:
    (why,) = [str(r) for r in nm.inspect(Halfway(), torch.randn(2, 4, 5)).refusals if r.layer == "stem"]
    assert "self.qkv(x).reshape" in why and "normalized_shape" not in why


@pytest.mark.parametrize("change", [{"width": 9}, {"times": 2}, {"forward": 1}, {"missing": 1}, {"training": 1}])
def test_a_plan_sets_no_attribute_that_is_no_size(change: dict[str, int]) -> None:
    plan = nm.compress(Wide(), torch.randn(2, 4, 5)).plan
    text = plan.to_json().replace('"width": 4', '"{}": {}'.format(*next(iter(change.items()))), 1)
    with pytest.raises(nm.MergingError, match="does not fit"):
        nm.apply_plan(Wide(), nm.Plan.from_json(text))


@pytest.mark.filterwarnings("ignore")
def test_a_gpt_2_shrinks_in_all_its_widths() -> None:
    library = import_or_fail("transformers")
    config = library.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, n_positions=16)
    small = nm.compress(library.GPT2LMHeadModel(config), torch.arange(14).view(2, 7), scope="all", merger="none")
    block = small.model.transformer.h[0]
    assert (block.mlp.c_fc.nf, block.mlp.c_proj.nf, block.attn.c_proj.nf) == (64, 16, 16)
    assert (block.attn.split_size, block.attn.c_attn.nf) == (16, 48)
