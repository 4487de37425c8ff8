"""The sensitivity of each group, compared with networks that are really cut."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.config import CompressConfig
from neuron_merging.pipeline import prepare_inputs
from neuron_merging.selection.budget import LossCurve
from neuron_merging.sweeps.group_sensitivity import build_sensitivity_from_curves


@cache
def network() -> nm.Analysis:
    torch.manual_seed(0)
    layers = [
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.Linear(32, 48),
        nn.ReLU(),
        nn.Linear(48, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    ]
    net = nn.Sequential(*layers)
    with torch.no_grad():
        net[2].weight[8:] = 0
        net[2].bias[8:] = -1e-3
        net[6].weight *= 8
    return nm.analyse(net.eval(), torch.randn(1, 16))


@torch.no_grad()
def divergence(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    p, q = (network(x).double().log_softmax(1) for network in (one, other))
    return float((p.exp() * (p - q)).sum(1).mean())


@pytest.mark.parametrize("merge", [True, False])
def test_each_loss_is_that_of_the_network_that_was_cut_there(merge: bool) -> None:
    known = network()
    found = nm.sensitivity(known, ratios=[0.5], criterion="l2", merge=merge, exact=True)
    search = prepare_inputs(known, CompressConfig(), search=True).sets.search
    assert search is not None
    probes, fit = ([batch for (batch,) in batches] for batches in (search.probes.batches, search.fit))
    assert [group.name for group in found.groups] == ["0", "2", "4"]
    for group in found.groups:
        merger = nm.Calibrated(fit, restore_variance=True, sequential=False) if merge else "none"
        small = nm.compress(known, ratio={group.name: 0.5}, criterion="l2", merger=merger)
        expected = divergence(known.model, small.model, torch.cat(probes))
        assert group.losses[0].divergence == pytest.approx(expected, rel=0.02, abs=1e-6)


def test_channels_that_do_nothing_cost_nothing_and_are_not_tried() -> None:
    found = nm.sensitivity(network())
    first, dead, last = found.groups
    assert [loss.divergence for loss in dead.losses[:3]] == [0, 0, 0]
    assert first.losses[-1].divergence > first.losses[0].divergence > 0 < last.losses[0].divergence
    assert found.unit == "Kullback-Leibler divergence" and found.inputs == "64 random numbers"
    assert "≈" in str(found) and found.passes < nm.sensitivity(network(), exact=True).passes


def test_what_is_inferred_is_near_to_what_is_measured() -> None:
    some, every = (nm.sensitivity(network(), exact=exact).groups[0].losses for exact in (False, True))
    assert [loss.measured for loss in some] == [False, True, False, True] and all(loss.measured for loss in every)
    for one, other in zip(some, every, strict=True):
        assert 0.5 < one.divergence / other.divergence < 2


def test_outputs_that_are_no_classes_are_compared_by_their_variance() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3))
    found = nm.sensitivity(net, torch.zeros(1, 1, 8, 8), ratios=(0.5, 0.25))
    assert found.unit == "squared error over variance" and found.ratios == (0.25, 0.5)


@pytest.mark.parametrize("ratios", [[], [0.0], [1.0], ["half"]])
def test_ratios_that_cannot_be_meant(ratios: list[float]) -> None:
    with pytest.raises(nm.MergingError):
        nm.sensitivity(network(), ratios=ratios)


def test_nothing_to_cut() -> None:
    with pytest.raises(nm.NothingToPrune, match="no group"):
        nm.sensitivity(nn.Linear(4, 2), torch.zeros(1, 4))


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"--to={tmp_path / name}" for name in ("a.csv", "a.json", "a.png", "a.svg")]
    assert app.main(["sensitivity", "lenet-300-100", "--ratios", "0.5,0.75", "--json", *names]) == 0
    printed = json.loads(capsys.readouterr().out)
    with open(tmp_path / "a.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["group"], line["ratio"], line["kept"]) for line in lines[:2]] == [
        ("ip1", "0.5", "150"),
        ("ip1", "0.75", "75"),
    ]
    assert float(lines[1]["divergence"]) == printed["groups"][0]["losses"][1]["divergence"]
    assert json.loads((tmp_path / "a.json").read_text()) == printed
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG" and b"<svg" in (tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize("flags", [["--to", "a.gif"], ["--ratios", "half"], ["--to", "nowhere/a.png"]])
def test_bad_requests_are_refused_before_any_work(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["sensitivity", "lenet-300-100", *flags]) == 2
    assert capsys.readouterr().out == ""


def test_a_curve_says_which_losses_the_search_measured() -> None:
    curve = LossCurve((8, 6, 4, 2, 1), (0.0, 0.1, 0.2, 0.5, 0.9), measured=(6, 2))
    (group,) = build_sensitivity_from_curves({"0": curve}).groups
    assert {loss.kept: loss.measured for loss in group.losses} == {6: True, 4: False, 2: True, 1: False}


def test_a_budget_search_marks_what_it_measured() -> None:
    curves = nm.compress(network(), budget={"macs": 0.6}).curves
    assert curves
    for curve in curves.values():
        assert curve.measured and set(curve.measured) < set(curve.counts)
