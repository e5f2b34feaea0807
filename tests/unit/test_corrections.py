"""Weights against the mismatch of trainer and server, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.losses.corrections import Correction, mismatch_correction
from grpo_trainer.losses.segments import Segments

# Two sequences: w of the tokens is 1.5, 3, 0.25 and, in the other one, 0.8 and (not known) 1.
W = [1.5, 3.0, 0.25, 0.8, 1.0]
SEGMENTS = Segments(torch.tensor([0, 0, 0, 1, 1]), 2)


def correct(kind, level, cap: float = 2.0) -> Correction:
    old_N = torch.tensor([-1.0] * 5, requires_grad=True)
    rollout_N = torch.tensor([-1.0 - math.log(w) for w in W[:4]] + [-50.0])
    known_N = torch.tensor([True] * 4 + [False])
    return mismatch_correction(old_N, rollout_N, known_N, SEGMENTS, kind=kind, level=level, cap=cap)


@pytest.mark.parametrize(
    ("kind", "level", "weights", "cut"),
    [
        ("none", "token", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("truncate", "token", [1.5, 2, 0.25, 0.8, 1], [0, 1, 0, 0, 0]),  # min(w, 2): 3 is cut
        ("mask", "token", [1.5, 0, 0, 0.8, 1], [0, 1, 1, 0, 0]),  # 3 is above 2, 0.25 below 1 / 2
        ("truncate", "sequence", [1.125] * 3 + [0.8] * 2, [0] * 5),  # 1.5 * 3 * 0.25 = 1.125; 0.8 * 1
        ("mask", "sequence", [1.125] * 3 + [0.8] * 2, [0] * 5),
    ],
)
def test_by_hand(kind, level, weights: list[float], cut: list[int]) -> None:
    got = correct(kind, level)
    assert got.weights_N.tolist() == pytest.approx(weights)
    assert got.cut_N.tolist() == [bool(each) for each in cut]
    assert not got.weights_N.requires_grad  # the weight is a constant


def test_whole_sequences_are_cut_at_their_own_weight() -> None:
    assert correct("truncate", "sequence", 1.1).weights_N.tolist() == pytest.approx([1.1] * 3 + [0.8] * 2)
    masked = correct("mask", "sequence", 1.1)  # 1.125 is above 1.1, 0.8 below 1 / 1.1 = 0.909
    assert masked.weights_N.tolist() == [0.0] * 5 and masked.cut_N.all()


def test_a_weight_beyond_fp32_is_cut_like_any_other() -> None:
    old_N, rollout_N = torch.tensor([-0.1, -0.1]), torch.tensor([-150.0, -0.1])
    known_N = torch.tensor([True, True])
    segments = Segments(torch.tensor([0, 1]), 2)
    options = (old_N, rollout_N, known_N, segments)
    assert mismatch_correction(*options, kind="truncate", level="token", cap=2.0).weights_N.tolist() == [2.0, 1.0]
    assert mismatch_correction(*options, kind="mask", level="token", cap=2.0).weights_N.tolist() == [0.0, 1.0]
