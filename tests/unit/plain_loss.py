"""The loss once more, the plain way: in float64, sequence by sequence, straight from the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_trainer.config.loss import LossConfig


@dataclass
class PlainSequence:
    """Trained tokens of one sequence."""

    lp: list[float]
    advantages: list[float]
    old: list[float]  # the trainer's before the first update
    roll: list[float] | None = None
    ref: list[float] | None = None
    supervised: bool = False
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = torch.tensor(self.lp, dtype=torch.float64, requires_grad=True)


def plain_loss(sequences: Sequence[PlainSequence], config: LossConfig, max_completion_len: int) -> Tensor:
    """The loss of the batch that these sequences are."""
    tokens = sum(len(sequence.lp) for sequence in sequences)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        per_token = _tokens(sequence, config)
        match config.loss:
            case "grpo" | "gspo" | "sapo":
                total = total + per_token.mean() / len(sequences)
            case "dapo" | "bnpo" | "cispo":
                total = total + per_token.sum() / tokens
            case "dr_grpo":
                total = total + per_token.sum() / (len(sequences) * max_completion_len)
    return total


def _tokens(s: PlainSequence, config: LossConfig) -> Tensor:
    lp = s.leaf
    if s.supervised:
        return -lp
    a, own = (torch.tensor(x, dtype=torch.float64) for x in (s.advantages, s.old))
    roll = own if s.roll is None else torch.tensor(s.roll, dtype=torch.float64)
    log_ratio = lp - (roll if config.ratio_against == "rollout" else own)
    if config.loss == "gspo":
        log_ratio = log_ratio.mean().expand(len(lp))
    ratio = torch.exp(log_ratio)
    low, high = 1 - config.clip_eps, 1 + config.eps_high
    if config.loss == "cispo":
        gain = ratio.detach().clamp(max=high) * a * lp
    elif config.loss == "sapo":
        tau = torch.where(a > 0, config.sapo_tau_pos, config.sapo_tau_neg)
        gain = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    else:
        gain = torch.min(ratio * a, ratio.clamp(low, high) * a)
        if config.dual_clip is not None:
            gain = torch.where(a < 0, torch.max(gain, config.dual_clip * a), gain)
    loss = -_weights(own - roll, config) * gain
    if config.kl_beta and s.ref is not None:
        x = lp - torch.tensor(s.ref, dtype=torch.float64)
        kl = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) + x - 1}[config.kl_estimator]
        kl = kl * ratio if config.kl_unbiased else kl
        loss = loss + config.kl_beta * kl
    return loss


def _weights(log_w: Tensor, config: LossConfig) -> Tensor:
    if config.correction == "none":
        return torch.ones_like(log_w)
    w = torch.exp(log_w.sum().expand(len(log_w)) if config.is_level == "sequence" else log_w)
    if config.correction == "truncate":
        return torch.minimum(w, torch.tensor(config.is_cap, dtype=torch.float64))
    return torch.where((w >= 1 / config.is_cap) & (w <= config.is_cap), w, 0.0)


def near_a_corner(sequences: Sequence[PlainSequence], config: LossConfig) -> bool:
    """Whether a ratio or weight lies where fp32 and float64 may fall on different sides of an edge."""
    edges = [1 - config.clip_eps, 1 + config.eps_high, config.dual_clip or 1.0, config.is_cap, 1 / config.is_cap]
    for s in sequences:
        roll = s.old if s.roll is None else s.roll
        logs = [[a - b for a, b in zip(s.lp, other, strict=True)] for other in (s.old, roll)]
        logs.append([a - b for a, b in zip(s.old, roll, strict=True)])
        for log in logs:
            values = [*log, sum(log), sum(log) / len(log)]
            if any(abs(math.exp(value) - edge) < 1e-4 for value in values for edge in edges if edge != 1.0):
                return True
    return False
