"""Every result has a verdict on its fidelity, whatever kind of outputs the network returns."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import progress
from neuron_merging.api import CompressConfig
from neuron_merging.data.eval_data import split_heldout_batches
from neuron_merging.evaluation import fidelity
from neuron_merging.evaluation.verdict import CompressionRequest, Culprit, TextScore, Verdict
from neuron_merging.inputs.input_sets import mix_pairs
from neuron_merging.pipeline import compress, compress_with_plan
from neuron_merging.selection.judge import MAX_SUSPECTS, _select_suspects

X = torch.zeros(1, 6)


def chain(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Answering(nn.Module):
    """A network that applies a function to the outputs of a chain of layers."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.chain, self.answer = chain(6, 16, 4), answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.chain(x))


def test_fidelity_is_one_minus_the_error_relative_to_the_variance() -> None:
    a, b, x = nn.Linear(6, 3), nn.Linear(6, 3), torch.randn(50, 6)
    got = fidelity.compare_networks({"a": a, "b": b}, [((x[:20],), None), ((x[20:],), None)], "rows")
    left, right = (net(x).detach().double().numpy() for net in (a, b))
    expected = 1 - ((left - right) ** 2).sum() / ((left - left.mean(0)) ** 2).sum()
    assert got.scores[0].fidelity == 1 and got.scores[1].fidelity == pytest.approx(max(0, expected))
    with torch.no_grad():
        near = nn.Linear(6, 3)
        near.load_state_dict(a.state_dict())
        near.weight *= 0.9
        right = near(x).double().numpy()
    got = fidelity.compare_networks({"a": a, "near": near}, [((x,), None)], "rows")
    expected = 1 - ((left - right) ** 2).sum() / ((left - left.mean(0)) ** 2).sum()
    assert 0.8 < expected < 1 and got.scores[1].fidelity == pytest.approx(expected)


def test_an_offset_of_the_answers_is_no_reason_for_calm() -> None:
    """A network that always returns the mean output has a small relative error, and is useless."""
    net = nn.Linear(6, 3)
    with torch.no_grad():
        net.bias.fill_(100)
    dead = nn.Linear(6, 3)
    with torch.no_grad():
        dead.weight.zero_()
        dead.bias.fill_(100)
    got = fidelity.compare_networks({"a": net, "dead": dead}, [((torch.randn(64, 6),), None)], "rows")
    assert got.scores[1].fidelity is not None and got.scores[1].fidelity < 0.05


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (lambda y: {"scores": y, "more": [y.sum(1)]}, "known", ""),
        (lambda y: y.argmax(1), "unknown", "only integers"),
        (lambda y: y * 0 + 3, "unknown", "same output"),
        (lambda y: (-1 - y.abs()).log(), "unknown", "not finite"),
        (lambda y: torch.where(y > 0, y, -torch.inf), "known", ""),
        (lambda y: y.mean(), "unknown", "one number for the whole batch"),
        (lambda y: torch.complex(y, y), "known", ""),
        (lambda y: (y.T, y), "known", ""),
    ],
)
def test_answers_of_all_kinds_get_a_verdict(answer: Any, level: str, words: str) -> None:
    verdict = nm.compress(Answering(answer), X, ratio=0.25, merger="none", verify=False).summary.verdict
    assert verdict is not None and words in verdict.why
    assert (level == "unknown") == (verdict.fidelity is None)
    assert verdict.level in ("unknown", "warning")  # random numbers allow a guess at best
    assert f"{fidelity.SAMPLE_LIMITS[1]} random numbers (no data was given)" in str(verdict)
    assert msgspec.to_builtins(verdict)["level"] == verdict.level


@pytest.mark.parametrize(
    ("answer", "words"), [(lambda y: y * 0 + 3, "same output"), (lambda y: y.argmax(1), "only integers"), (abs, "")]
)
def test_a_missing_verdict_is_announced_before_the_work(
    answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compress, "prepare_inputs", stop)
    for options in ({}, {"calibration": [X]}):
        with progress.hear_announcements(said.append), pytest.raises(KeyboardInterrupt):
            nm.compress(Answering(answer), X, ratio=0.25, **options)
    assert len(said) == bool(words) and words in "".join(said)


def test_what_is_no_number_in_the_smaller_network_alone_is_lost() -> None:
    a, b = nn.Linear(6, 3), nn.Linear(6, 3)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.bias[0] = float("nan")
    got = fidelity.compare_networks({"a": a, "b": b}, [((torch.randn(16, 6),), None)], "rows")
    assert got.scores[1].fidelity == 0 and got.scores[0].fidelity == 1


@pytest.mark.parametrize(
    ("value", "level", "word"),
    [
        (0.95, "good", "close to the original"),
        (0.9, "good", "close to"),
        (0.89, "caution", "caution"),
        (0.6, "caution", "caution"),
        (0.59, "warning", "WARNING"),
        (0.0, "warning", "budget="),
        (None, "unknown", "not known"),
    ],
)
def test_levels(value: float | None, level: str, word: str) -> None:
    verdict = Verdict(value, "64 synthetic images", data=False)
    assert verdict.level == level and word in str(verdict) and "64 synthetic images" in str(verdict)


@pytest.mark.parametrize(("trained", "advised"), [(True, False), (False, True)])
def test_a_good_verdict_on_inputs_that_owe_nothing_to_the_network_says_so(trained: bool, advised: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    if trained:
        net(torch.randn(256, 6) * 2 + 1)
    verdict = nm.compress(net.eval(), X, ratio=0.04).summary.verdict
    assert verdict is not None and verdict.guessed is advised
    assert verdict.level == ("unknown" if advised else "good")
    assert ("test it on your own data" in str(verdict)) is advised


def test_a_warning_names_who_is_to_blame(caplog: pytest.LogCaptureFixture) -> None:
    """Two layers lose half of their channels; in one of them those do nothing."""
    net = chain(6, 32, 32, 4)
    with torch.no_grad():
        net[2].weight[16:] = 0
        net[2].bias[16:] = -1e-3
    with caplog.at_level(logging.WARNING, "neuron_merging"):
        small = nm.compress(net, X, ratio={"0": 0.9, "2": 0.5}, merger="none")
    verdict = small.summary.verdict
    assert verdict is not None and verdict.level == "warning" and verdict.culprits[0].group == "0"
    assert verdict.culprits[0].share > 0.9 and sum(c.share for c in verdict.culprits) <= 1 + 1e-9
    assert "Most of the error comes from 0 (" in str(small.summary).splitlines()[0]
    assert [record.name for record in caplog.records] == ["neuron_merging"]
    assert str(Culprit("layer1", 0.426)) == "layer1 (43%)"


def test_what_is_required_is_an_error_of_its_own() -> None:
    net = chain(6, 32, 4)
    with pytest.raises(nm.FidelityError, match=r"0\.999 is required") as caught:
        nm.compress(net, X, ratio=0.75, require=0.999)
    assert "random numbers" in caught.value.what and "budget=" in caught.value.fix
    assert nm.compress(net, X, ratio=0.75, require=0.0).summary.verdict is not None
    with pytest.raises(nm.FidelityError, match="only integers"):
        nm.compress(Answering(lambda y: y.argmax(1)), X, require=0.1)


def test_data_are_judged_on_where_there_are_any() -> None:
    net = chain(6, 32, 4)
    x, y = torch.randn(96, 6), torch.randint(4, (96,))
    own = nm.compress(net, X, evaluate=[(x[:48], y[:48]), (x[48:], y[48:])]).summary.verdict
    assert own is not None and own.data and own.inputs == "96 samples of your data" and own.accuracy is not None
    assert own.accuracy[0] == pytest.approx(100 * float((net(x).argmax(1) == y).double().mean()))
    few = nm.compress(net, X, calibration=[x]).summary.verdict
    assert few is not None and "samples of the fit" in few.inputs and few.fitted
    flattered = Verdict(0.99, "samples", data=True, fitted=True)
    assert flattered.level == "caution" and "not fitted to" in str(flattered)
    many = nm.compress(net, X, calibration=list(x.split(12))).summary.verdict
    assert many is not None and many.inputs == "24 held-out calibration samples"
    scored = nm.compress(net, X, evaluate=lambda model: np.float32(model(x).sum().item() * 0 + 2)).summary.verdict
    assert scored is not None and scored.score == (2, 2) and not scored.data


def test_suspects_are_those_that_are_expected_to_lose_most() -> None:
    plan = nm.compress(chain(*(12 for _ in range(11)), 4), torch.randn(1, 12), ratio=0.5, merger="none").plan
    errors = [0.1 * i for i in range(9)] + [None]  # of the last one nothing is known: half of it goes
    groups = (msgspec.structs.replace(own, error=error) for own, error in zip(plan.groups, errors, strict=True))
    suspects = _select_suspects(msgspec.structs.replace(plan, groups=tuple(groups)))
    assert [own.name for own in suspects] == ["16", "14", "12", "10", "18", "8", "6", "4"] and len(
        suspects
    ) == MAX_SUSPECTS


WEAK = (Culprit("conv1", 0.8), Culprit("conv2", 0.2))


@pytest.mark.parametrize(
    ("asked", "culprits", "said", "not_said"),
    [
        (CompressionRequest(), (), ("budget=", "calibration="), ("effort=", "merger=")),
        (CompressionRequest("budget"), (), ("larger budget", "calibration="), ("share the cut out",)),
        (CompressionRequest("budget", spares_streams=True), (), ("--scope all",), ()),
        (CompressionRequest("ratio", spares_streams=True), (), (), ("--scope all",)),
        (CompressionRequest("budget", calibrated=True), WEAK, ("limit what conv1 loses",), ("data", "ignore=")),
        (CompressionRequest("ratio", calibrated=True), WEAK, ("do not prune conv1",), ("data", "limits=")),
        (CompressionRequest("ratio"), (Culprit("a", 0.5), Culprit("b", 0.5)), ("a (50%)",), ("whole",)),
        (CompressionRequest("max_loss"), (), ("smaller loss",), ("budget",)),
        (CompressionRequest("plan"), WEAK, ("Make a plan for these weights",), ("budget", "data", "ignore=")),
        (CompressionRequest(by_weights=True), (), ("leave out merger=",), ("data", "effort=")),
        (CompressionRequest(merged=False), (), ("merge the removed channels",), ("data",)),
        (CompressionRequest(effort="fast"), (), ("effort=",), ()),
        (CompressionRequest(effort="fast", calibrated=True), (), (), ("effort=", "data")),
    ],
)
def test_advice_follows_from_what_was_asked_for(
    asked: CompressionRequest, culprits: tuple[Culprit, ...], said: tuple[str, ...], not_said: tuple[str, ...]
) -> None:
    advice = Verdict(0.3, "inputs", data=True, culprits=culprits, request=asked).advice
    assert all(words in advice for words in said), advice
    assert not any(words in advice for words in not_said), advice


def test_a_request_is_read_off_the_settings() -> None:
    net, x = chain(6, 32, 4), torch.randn(32, 6)
    asked = {
        "ratio": nm.compress(net, X, merger="none"),
        "budget": nm.compress(net, X, budget={"params": 0.7}, calibration=[x], effort="fast"),
        "max_loss": nm.compress(net, X, max_loss=0.5),
    }
    verdicts = {name: small.summary.verdict for name, small in asked.items()}
    requests = {name: verdict.request for name, verdict in verdicts.items() if verdict}
    assert {name: own.target for name, own in requests.items()} == {name: name for name in asked}
    assert not requests["ratio"].merged and requests["budget"].merged
    assert requests["budget"].calibrated and not requests["max_loss"].calibrated
    again = compress_with_plan(asked["ratio"].plan, nm.analyse(net, X), CompressConfig())
    assert again.summary.verdict is not None and again.summary.verdict.request.target == "plan"


def test_nobody_who_gave_data_is_asked_for_some() -> None:
    for data, score in ((True, None), (False, (1.0, 0.8))):
        for value in (0.95, 0.7):
            assert "your own data" not in Verdict(value, "inputs", data, score=score, guessed=True).advice
    assert "your own data" in Verdict(0.7, "inputs", data=False).advice


@pytest.mark.parametrize("fidelity", [0.95, 0.7, 0.3])
def test_a_language_model_that_was_not_judged_on_the_users_text_may_lose_more(fidelity: float) -> None:
    score = TextScore(-float(np.log(fidelity)), (30.0, 33.0))
    judged = Verdict(fidelity, "14 texts from Python's manual", data=False, text=score)
    assert "Text of other kinds can lose" in str(judged)
    assert "Text of other kinds" not in str(Verdict(fidelity, "14 texts", data=True, text=score))


@pytest.mark.parametrize(
    ("batches", "size", "held"),
    [(7, 1, 0), (31, 1, 0), (32, 1, 8), (200, 1, 16), (8, 16, 1), (8, 4, 2), (40, 4, 4), (7, 16, 0)],
)
def test_a_sensible_share_of_small_batches_is_held_out(batches: int, size: int, held: int) -> None:
    given = [(torch.full((size, 3), float(i)), torch.zeros(size)) for i in range(batches)]
    fit, judged, _ = split_heldout_batches(given, None)
    assert list(judged) == (given[-held:] if held else given)
    assert len(list(fit)) == batches - held


@pytest.mark.parametrize("kind", ["mixed", "on_plain_images"])
@pytest.mark.parametrize(
    ("fidelity", "other", "level"),
    [
        (0.95, 0.93, "good"),
        (0.95, 0.7, "caution"),
        (0.95, 0.1, "caution"),  # one level only: mixtures and plain images are no training data either
        (0.8, 0.5, "warning"),
        (0.5, 0.1, "warning"),
        (0.8, 0.99, "caution"),
        (0.95, None, "good"),
    ],
)
def test_what_holds_for_one_kind_of_inputs_only_is_one_level_lower(
    fidelity: float, other: float | None, level: str, kind: str
) -> None:
    found = Verdict(fidelity, "8 inputs", data=False, **{kind: other})
    words = {"mixed": "on mixtures of them", "on_plain_images": "on synthetic images of the same scale"}[kind]
    assert found.level == level
    assert (words in str(found)) == (other in (0.7, 0.1, 0.5) and fidelity != 0.5)
    assert Verdict(fidelity, "8 inputs", data=True, **{kind: other}).level == Verdict(fidelity, "", data=True).level


def test_two_other_kinds_of_inputs_lower_the_level_once() -> None:
    found = Verdict(0.95, "8 inputs", data=False, mixed=0.7, on_plain_images=0.5)
    assert found.level == "caution" and "0.700 on mixtures of them, 0.500 on synthetic images" in str(found)


def test_mixtures_are_means_of_neighbours() -> None:
    x, ids = torch.arange(12.0).view(4, 3), torch.arange(4)
    ((mixed, same),) = mix_pairs([(x, ids)])
    assert torch.equal(mixed, (x + x.roll(1, 0)) / 2) and torch.equal(same, ids)
    single = mix_pairs([(x[:1],), (x[1:2],)])
    assert torch.equal(single[0][0], (x[:1] + x[1:2]) / 2) and torch.equal(single[1][0], single[0][0])
    assert mix_pairs([(x[:1],)]) == () == mix_pairs([(ids,)]) == mix_pairs([])


def test_networks_with_norms_are_compared_on_mixtures_and_plain_images() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).train()
    net(torch.randn(64, 3, 8, 8))
    found = nm.compress(net.eval(), torch.zeros(1, 3, 8, 8), ratio=0.5, effort="fast").summary.verdict
    assert found is not None and found.mixed is not None and found.on_plain_images is not None and not found.data
    given = nm.compress(net, torch.zeros(1, 3, 8, 8), calibration=[torch.randn(32, 3, 8, 8)]).summary.verdict
    assert given is not None and given.mixed is None and given.on_plain_images is None
    classifier = nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    scores = nm.compress(classifier, torch.zeros(1, 3, 8, 8), ratio=0.5, effort="fast").summary.verdict
    assert scores is not None and scores.mixed is None and scores.on_plain_images is None and not scores.data
