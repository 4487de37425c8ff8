"""Options of reproduce, which default to the paper's."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_merging.reproduction import experiments, run_setup
from tests.reproduction.tiny import FEW, read_csv, reproduce

# Which networks, which methods


@pytest.mark.long
def test_any_merger_stands_beside_the_papers(everything: Path) -> None:
    many = "none,cosine:bn=paper,threshold=0.3,calibrated:ridge=0.1,cosine"
    assert reproduce("figure3", "--data", everything, *FEW, "--methods", many) == 0
    rows = [row for row in read_csv(Path("reproduce/figure3/figure3.csv")) if row["metric"] == "accuracy"]
    found = [row["method"] for row in rows if row["network"] == "resnet-56"]
    assert found == ["original", "none", "cosine:bn=paper,threshold=0.3", "calibrated:ridge=0.1", "cosine"]
    assert [bool(row["paper"]) for row in rows[:5]] == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lenet-300-100", "cosine:threshold=0.45,balance=0.85,bn=released"),
        ("vgg-16", "cosine:threshold=0.1,balance=0.85,bn=released"),
        ("vgg-16-cifar-100", "cosine:threshold=0.1,balance=0.7,bn=released"),
        ("resnet-56", "cosine:threshold=0.1,balance=0.85,bn=released"),
        ("wideresnet-40-4", "cosine:threshold=0.1,balance=0.8,bn=released"),
    ],
)
def test_the_papers_hyperparameters(name: str, text: str) -> None:
    (method,) = experiments.parse_methods("cosine")
    assert method.text(experiments.find_paper_network(name)) == text
    assert (
        method.with_threshold(0.2)
        .text(experiments.find_paper_network(name))
        .startswith("cosine:threshold=0.2,balance=1,")
    )
    assert experiments.parse_methods("none")[0].text(experiments.find_paper_network(name)) == "none"


# Claims and maps


def test_options_default_to_the_paper() -> None:
    found = run_setup.parse_options("figure5")
    assert [panel.ratios for panel in found.targets[0].panels] == [(0.3, 0.4, 0.5)]
    assert found.targets[0].criteria == ("l1",) and found.limit is None
    assert [method.label for method in found.methods] == ["none", "cosine"]


# Broken and unusual requests


def test_a_threshold_that_is_asked_for_is_not_swept(everything: Path) -> None:
    methods = ("--methods", "cosine:threshold=0.3", "--limit", 4)
    assert reproduce("figure5", "--data", everything, *FEW, *methods) == 0
    assert [row["threshold"] for row in read_csv(Path("reproduce/figure5/figure5.csv"))] == ["", ""]
