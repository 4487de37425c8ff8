"""Augmentation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuron_merging.reproduction.training.train import crop_and_flip, draw_epoch_shuffle


def test_crop_and_flip_agree_with_one_image_at_a_time() -> None:
    x = torch.randint(0, 256, (20, 3, 6, 5), dtype=torch.uint8)
    drawn = draw_epoch_shuffle(20, torch.Generator().manual_seed(1), crop=2, flip=True)
    found = crop_and_flip(x, drawn.shift, drawn.mirror, 2)
    for i in range(20):
        top, left = drawn.shift[i].tolist()
        one = F.pad(x[i], (2, 2, 2, 2))[:, top : top + 6, left : left + 5]
        assert torch.equal(found[i], one.flip(2) if drawn.mirror[i] else one)


def test_chance_is_fair_and_repeatable() -> None:
    first, again = (draw_epoch_shuffle(9000, torch.Generator().manual_seed(3), crop=4, flip=True) for _ in range(2))
    assert torch.equal(first.order, again.order) and torch.equal(first.shift, again.shift)
    assert first.order.sort().values.tolist() == list(range(9000))
    assert (first.shift.flatten().bincount(minlength=9).double() / 2000 - 1).abs().max() < 0.1
    assert first.mirror.double().mean().item() == pytest.approx(0.5, abs=0.03)
    plain = draw_epoch_shuffle(10, torch.Generator().manual_seed(3))
    assert not plain.shift.any() and not plain.mirror.any()
