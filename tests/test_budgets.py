"""Budgets: the result fits, as close to the budget as single channels allow."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import neuron_merging as nm
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.cli import app
from neuron_merging.config import CompressConfig
from neuron_merging.pipeline import compress_analysis, select_channels
from neuron_merging.selection import search
from neuron_merging.selection.budget import parse_budget
from neuron_merging.selection.criteria import score_channels
from neuron_merging.selection.cut_simulator import CutSimulator
from neuron_merging.selection.search import CutRange, measure_loss_curves
from tests.conftest import mark_long
from tests.fuzz.network import build_network, draw_recipe
from tests.fuzz.trial import make_inputs
from tests.zoo import CASES

NAMES = ("batch norm 2d", "residual", "grouped", "depthwise", "concat", "linear chain")


@cache
def analysis(name: str) -> nm.Analysis:
    return nm.analyse(CASES[name].build(), CASES[name].inputs())


@torch.no_grad()
def counted(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return int(counter.get_total_flops()) // 2


@given(name=st.sampled_from([name for name in NAMES if name in CASES]), share=st.floats(0.35, 0.98), macs=st.booleans())
@settings(max_examples=10, deadline=None)
def test_budgets_are_met_and_counted_by_another_program(name: str, share: float, macs: bool) -> None:
    known = analysis(name)
    key = "macs" if macs else "params"
    try:
        small = nm.compress(known, budget={key: share}, merger="none", verify=False)
    except nm.MergingError as error:
        assert "cannot be met" in error.what and "are left" in error.what
        return
    if macs:
        assert counted(small.model, known.inputs) <= share * counted(known.model, known.inputs)
    else:
        assert sum(p.numel() for p in small.model.parameters()) <= share * sum(
            p.numel() for p in known.model.parameters()
        )


@pytest.mark.parametrize("first", mark_long([31, 100], {100}))
def test_budgets_hold_in_random_graphs(first: int) -> None:
    """The fuzzer's networks, in which the channels of a group need not all cost the same."""
    met = 0
    for index in range(first, first + 4):
        recipe = draw_recipe(11, index, 3)
        built = build_network(recipe)
        inputs: Any = make_inputs(built, recipe, 2, 0)
        known, share, key = nm.analyse(built.model, inputs), 0.4 + 0.5 * (index % 7) / 7, ("macs", "params")[index % 2]
        wanted = CompressConfig(budget=parse_budget({key: share}), merger="none", scope="all")
        try:
            small = compress_analysis(known, wanted, verify=False, judge=False)
        except nm.MergingError as error:
            assert isinstance(error, nm.NothingToPrune) or "cannot be met" in error.what
            continue
        before, after = (
            counted(net, inputs) if key == "macs" else sum(p.numel() for p in net.parameters())
            for net in (known.model, small.model)
        )
        assert after <= share * before, (index, key, share)
        assert (before, after) == (small.summary.macs if key == "macs" else small.summary.parameters)
        met += 1
    assert met >= 2


@cache
def trained() -> tuple[nn.Sequential, nm.Analysis]:
    """A network one of whose layers does nothing: its channels are the ones to go."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)
    )
    with torch.no_grad():
        net[2].weight[8:] = 0
        net[2].bias[8:] = -1e-3
    return net.eval(), nm.analyse(net, torch.randn(1, 16))


def error(small: nn.Module) -> float:
    net, x = trained()[0], torch.randn(512, 16)
    with torch.no_grad():
        return float((small.eval()(x) - net(x)).square().sum() / net(x).var(0).sum() / len(x))


def test_channels_go_where_nothing_is_lost() -> None:
    _, known = trained()
    small = nm.compress(known, budget={"macs": 0.4})
    kept = {group.name: group.after for group in small.summary.groups}
    assert kept["2"] <= 14 and small.summary.macs[1] <= 0.4 * small.summary.macs[0]
    uniform = nm.compress(known, ratio=0.38)
    assert uniform.summary.macs[1] >= small.summary.macs[1] * 0.98
    assert error(small.model) < 0.1 * error(uniform.model)
    assert any("divergence" in note and "random numbers" in note for note in small.summary.notes)


def test_as_near_below_as_one_channel_allows() -> None:
    _, known = trained()
    small = nm.compress(known, budget={"params": 0.5}, merger="none")
    assert 0.98 * 0.5 <= small.summary.parameters[1] / small.summary.parameters[0] <= 0.5


def test_several_budgets_all_hold_and_layers_may_be_spared() -> None:
    _, known = trained()
    small = nm.compress(known, budget={"macs": "60%", "params": "3k"}, limits={"4": 0.25}, round_to=4)
    kept = {group.name: group.after for group in small.summary.groups}
    assert small.summary.macs[1] <= 0.6 * small.summary.macs[0] and small.summary.parameters[1] <= 3000
    assert kept.get("4", 48) >= 36 and all(count % 4 == 0 for count in kept.values())


def test_bytes_and_time() -> None:
    _, known = trained()
    small = nm.compress(known, budget={"weights": "10kB"})
    assert sum(t.numel() * t.element_size() for t in small.model.state_dict().values()) <= 10_000
    slow = nm.compress(known, budget={"latency": "10s"})
    assert slow.summary.macs[1] > 0.9 * slow.summary.macs[0]
    with pytest.raises(nm.MergingError, match="takes at most"):
        nm.compress(known, budget={"latency": "1us"})


@pytest.mark.parametrize("given", ["70%", "40%", "20%"])
@pytest.mark.parametrize("uniform", [False, True])
def test_multiples_are_kept_where_the_size_is_none(given: str, uniform: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4)).eval()
    small = nm.compress(net, torch.randn(4, 8), budget={"macs": given}, round_to=12, uniform=uniform)
    assert all(group.after % 12 == 0 for group in small.summary.groups if group.after < group.before)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"macs": "0.1%"}, r"0\.1% are allowed, the smallest possible network has [0-9.]+%"),
        ({"params": "0.02k"}, r"0\.02k are allowed, the smallest possible network has [0-9.]+k"),
        ({"weights": "0.05kB"}, r"0\.05kB are allowed, the smallest possible network has [0-9.]+kB"),
    ],
)
def test_the_smallest_network_is_told_in_the_unit_of_the_budget(budget: dict[str, Any], words: str) -> None:
    with pytest.raises(nm.MergingError, match=words):
        nm.compress(trained()[1], budget=budget)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": {"macs": 0.001}}, ("cannot be met", "0.001 are allowed, the smallest possible network has 0.0")),
        ({"budget": {"macs": 0.5}, "ratio": 0.5}, ("ratio", "budget")),
        ({"limits": {"0": 0.5}}, ("limits= needs a budget",)),
        ({"budget": {"macs": 0.5}, "limits": {"layer9": 0.5}}, ("no layer matches 'layer9'", "limits=")),
        ({"budget": {"macs": 0.5}, "limits": {"0": 2}}, ("[0, 1)",)),
        ({"budget": {"speed": 0.5}}, ("no budget of 'speed'", "macs")),
    ],
)
def test_what_cannot_be_meant_is_told(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(nm.MergingError) as caught:
        nm.compress(trained()[1], **options)
    assert all(word in str(caught.value) for word in words)


def test_the_smallest_network_that_is_good_enough() -> None:
    """Fidelity within five per cent: a little less would be too little, and idle channels are the first to go."""
    _, known = trained()
    small = nm.compress(known, max_loss=0.05)
    verdict = small.summary.verdict
    assert verdict is not None and verdict.fidelity is not None and verdict.fidelity >= 0.95
    assert small.summary.macs[1] < 0.5 * small.summary.macs[0]
    larger = nm.compress(known, max_loss=0.001)
    assert small.summary.macs[1] < larger.summary.macs[1] < larger.summary.macs[0]
    asked: list[int] = []

    def width(model: nn.Module) -> float:
        asked.append(int(model[0].out_features))  # type: ignore[index]
        return asked[-1] / 48

    least = nm.compress(known, max_loss=0.5, evaluate=width).summary
    assert least.verdict is not None and least.verdict.score is not None
    assert least.verdict.score[0] == 1 and 0.5 <= least.verdict.score[1] and len(asked) > 5
    assert any("that were tried" in note for note in least.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_loss": 0.1, "ratio": 0.5}, "a ratio and a largest loss cannot both be given"),
        ({"max_loss": 0.1, "budget": {"macs": 0.5}}, "a budget and a largest loss cannot both be given"),
        ({"max_loss": -0.1}, "not a number of at least 0"),
        ({"max_loss": float("nan")}, "not a number of at least 0"),
        ({"require": 1.5}, "not a number from 0 to 1"),
        ({"max_loss": 0.0, "evaluate": lambda model: float(sum(p.numel() for p in model.parameters()))}, "no cut that"),
        ({"max_loss": 0.1, "evaluate": lambda model: float("nan")}, "returned nan"),
        ({"max_loss": 0.1, "evaluate": lambda model: "good"}, "returned 'good'"),
        ({"max_loss": 0.1, "evaluate": lambda model: model.no_such_layer}, "raised AttributeError"),
        ({"max_loss": 0.1, "evaluate": [(torch.zeros(4, 7), torch.zeros(4, dtype=torch.int64))]}, "does not take"),
        ({"evaluate": 3}, "not a list or loader of batches"),
        ({"evaluate": []}, "no batch to evaluate on"),
    ],
)
def test_what_cannot_be_scored_is_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(nm.MergingError, match=words):
        nm.compress(trained()[1], **options)


def test_calibration_batches_are_the_probes() -> None:
    _, known = trained()
    small = nm.compress(known, budget={"macs": 0.6}, calibration=[torch.randn(64, 16)])
    assert any("calibration samples" in note for note in small.summary.notes) and small.summary.macs[1] > 0


def test_a_second_cut_measures_only_what_depends_on_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    net, known = trained()
    fresh = nm.analyse(net, known.inputs)
    nm.compress(fresh, budget={"macs": 0.8})
    monkeypatch.setattr(select_channels, "rank_channels", lambda *_, **__: pytest.fail("channels are ranked again"))
    monkeypatch.setattr(search, "measure_loss_curves", lambda *_: pytest.fail("curves are measured again"))
    second = nm.compress(fresh, budget={"macs": 0.6})
    monkeypatch.undo()
    alone = nm.compress(nm.analyse(net, known.inputs), budget={"macs": 0.6})
    assert [g.kept for g in second.plan.groups] == [g.kept for g in alone.plan.groups]
    assert fresh.search_cache and not cloudpickle.loads(cloudpickle.dumps(fresh)).search_cache, "it is large"


def test_another_effort_measures_again() -> None:
    _, known = trained()
    nm.compress(known, budget={"macs": 0.8})
    first = known.search_cache["last"]
    nm.compress(known, budget={"macs": 0.8}, effort="fast")
    assert known.search_cache["last"] is not first


def test_weights_that_were_changed_in_place_are_measured_again() -> None:
    net, known = trained()
    net = copy.deepcopy(net)
    analysis = nm.analyse(net, known.inputs)
    nm.compress(analysis, budget={"macs": 0.6})
    first = analysis.search_cache["last"]
    with torch.no_grad():
        net[0].weight[:8] *= 3  # as a step of training does
    again = nm.compress(analysis, budget={"macs": 0.6})
    assert analysis.search_cache["last"] is not first
    alone = nm.compress(nm.analyse(net, known.inputs), budget={"macs": 0.6})
    assert [g.kept for g in again.plan.groups] == [g.kept for g in alone.plan.groups]


def test_the_summary_says_if_no_cuts_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    _, known = trained()
    said = "shared out between layers by gradients"
    assert not any(said in note for note in nm.compress(known, budget={"macs": 0.7}).summary.notes)
    monkeypatch.setattr(select_channels, "is_search_expensive", lambda *_: True)
    notes = nm.compress(nm.analyse(known.model, known.inputs), budget={"macs": 0.7}).summary.notes
    assert any(said in note and 'allocation="search" tries cuts' in note for note in notes)


def test_what_is_tried_is_what_the_smaller_network_does() -> None:
    """The divergence of a cut that is only tried is that of the network that is cut, on the same inputs."""
    net, known = trained()
    scores = {g.name: score_channels("l2", filters_of(known.graph, g)).double().numpy() for g in known.channels.groups}
    x = torch.randn(256, 16)
    simulator = CutSimulator(known, [(x,)], scores)
    counts = {"0": 30, "2": 20, "4": 40}
    rooms = {name: CutRange(group.size, 1, 1) for name, group in simulator.groups.items()}
    curves = measure_loss_curves(simulator, rooms)
    assert all(curve.losses[0] == 0 and list(curve.losses) == sorted(curve.losses) for curve in curves.values())
    alone = simulator.measure_variations({name: 48 for name in counts}, {"2": [20]})
    assert alone["2", 20] == pytest.approx(simulator.measure_divergence({"0": 48, "2": 20, "4": 48}), rel=1e-9)
    merged = nm.Calibrated([x], sequential=False, restore_variance=True)
    kept = {name: len(units) for name, units in simulator.select_kept_units(counts).items()}
    ratio = {name: 1 - count / 48 for name, count in kept.items()}
    small = nm.compress(known, ratio=ratio, criterion="l2", merger=merged)
    with torch.no_grad():
        p, q = net(x).double().log_softmax(1), small.model.eval()(x).double().log_softmax(1)
    assert simulator.measure_divergence(counts) == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=0.1)


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--budget", "macs=60%", "--budget", "params=150k", "--limits", "ip2=0.5", "--no-report"]
    assert app.main(["compress", "lenet-300-100", "small", *flags]) == 0
    recipe = yaml.safe_load((tmp_path / "small" / "recipe.yaml").read_text())
    assert recipe["budget"] == {"macs": "60%", "params": "150k"} and recipe["limits"] == {"ip2": 0.5}
    assert "Budget macs 60%" in (tmp_path / "small" / "README.md").read_text()
    assert app.main(["compress", "lenet-300-100", "again", "--recipe", "small/recipe.yaml", "--no-report"]) == 0
    assert app.main(["compress", "lenet-300-100", "both", "--budget", "macs=60%", "--ratio", "0.5"]) == 2


def test_few_samples_are_not_all_that_a_budget_goes_by(residual: tuple[nn.Module, Tensor]) -> None:
    """A network is sure of what it was trained on: cuts are tried on what it remembers, too."""
    model, x = residual
    analysis = nm.analyse(model, x[:1])
    few, none = (nm.compress(analysis, budget={"macs": 0.7}, calibration=samples) for samples in ([x[:8]], None))
    assert "calibration samples and inputs synthesised from batch-norm statistics" in few.summary.notes[0]
    assert few.summary.macs[1] <= 0.7 * few.summary.macs[0] and "calibration" not in none.summary.notes[0]


def test_layers_that_repeat_stay_alike_and_get_no_new_bias() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False)) for _ in range(3)]
    with torch.no_grad():
        blocks[1][0].weight *= 0.01  # worth next to nothing: left to itself, it would lose the most
    known = nm.analyse(nn.Sequential(*blocks, nn.Linear(16, 4)), torch.randn(1, 16))
    free = nm.compress(known, budget={"params": 0.6}, scope="all")
    alike = nm.compress(known, budget={"params": 0.6}, scope="all", uniform=True)
    widths = [[small.model[i][0].out_features for i in range(3)] for small in (free, alike)]
    assert len(set(widths[0])) > 1 and len(set(widths[1])) == 1
    assert free.plan.biases and not alike.plan.biases
    assert alike.summary.parameters[1] <= 0.6 * alike.summary.parameters[0]
    assert alike.recipe is not None and alike.recipe.uniform


class Picky(nn.Module):
    """A branch of convolutions and one of linear layers; the code takes marked pictures only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.c, self.d = nn.Linear(12, 96), nn.Linear(96, 8)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and not bool((x[:, 0, 0, 0] == 7).all()):
            raise ValueError("the picture is not marked")
        features: Tensor = self.b(self.a(x).relu()).mean((2, 3)) + self.d(self.c(v).relu())
        return features


def test_layers_that_no_inputs_reach_are_cut_last() -> None:
    """The linear layers have statistics in closed form; synthetic pictures do not run, so `b` cannot be refitted."""
    torch.manual_seed(0)
    picture = torch.randn(4, 3, 8, 8)
    picture[:, 0, 0, 0] = 7
    known = nm.analyse(Picky().eval(), (picture, torch.randn(4, 12)))
    mild = nm.compress(known, budget={"params": 0.8}, effort="fast")
    assert [group.name for group in mild.plan.groups] == ["c"]
    assert mild.summary.verdict is not None and not mild.summary.verdict.unfitted
    # Without the convolutions this budget cannot be met; the verdict then names what was cut blindly, first.
    hard = nm.compress(known, budget={"params": 0.4}, effort="fast")
    assert {group.name for group in hard.plan.groups} == {"a", "c"}
    assert str(hard.summary.verdict).startswith("WARNING: no inputs run at b")
