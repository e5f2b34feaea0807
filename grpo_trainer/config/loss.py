"""Options of the loss. Which of them reproduce which paper: `docs/papers.md`. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import ValidationInfo, field_validator

from grpo_trainer import import_paths
from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError

LossName = Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"]
EstimatorName = Literal["group", "rloo"]
KlEstimator = Literal["k1", "k2", "k3"]
UNCLIPPED = ("cispo", "sapo")
"""Losses whose surrogate is not PPO's clipped one."""


class LossConfig(Section):
    """Loss."""

    loss: str = option(
        "dapo",
        help="Surrogate and mean of the token losses, by the papers' names: averaged by sequence (grpo, gspo, sapo), "
        "over all tokens (dapo, bnpo, cispo), by a constant (dr_grpo). MODULE:NAME is a LossSpec of your own.",
    )
    clip_eps: float = option(0.2, help="The ratio is clipped below 1 - this.", gt=0, lt=1)
    clip_eps_high: float | None = option(None, help="The ratio is clipped above 1 + this (default: --clip-eps).", gt=0)
    dual_clip: float | None = option(
        None, help="Where the advantage is negative, the ratio is clipped above this (default: it is not).", gt=1
    )
    sapo_tau_pos: float = option(1.0, help="Temperature of sapo's gate where the advantage is positive.", gt=0)
    sapo_tau_neg: float = option(1.05, help="Temperature of sapo's gate elsewhere.", gt=0)
    advantage_estimator: str = option(
        "group",
        help="Baseline of a reward: the mean of its group (group), or of the others in it (rloo). MODULE:NAME is a "
        "function of your own, from a group's rewards to its advantages.",
    )
    scale_rewards: Literal["auto", "group", "none"] = option(
        "auto",
        help="Divide a group's advantages by its standard deviation, or not; auto: unless dr_grpo or rloo.",
    )
    max_completion_len: int | None = option(None, help="Normaliser of dr_grpo, in tokens (default: --seq-len).", gt=0)
    ratio_against: Literal["rollout", "trainer"] = option(
        "rollout",
        help="Old logprobs: those the server sampled with, or the trainer's own before the update "
        "(always so for groups that bring none).",
    )
    is_correction: Literal["auto", "none", "truncate", "mask"] = option(
        "auto",
        help="Weigh the loss by exp(trainer's old logprob - server's): cut at --is-cap, or 0 beyond it; auto: truncate "
        "with --ratio-against trainer, none with rollout, whose ratio contains it.",
    )
    is_level: Literal["token", "sequence"] = option("token", help="One such weight a token, or a sequence.")
    is_cap: float = option(2.0, help="Largest such weight; mask leaves those from 1/cap to cap.", gt=1)
    updates_per_batch: int = option(1, help="Optimizer steps on each batch, every one over all of it.", ge=1)
    kl_beta: float = option(0.0, help="Weight of the KL divergence from the reference model; 0: none.", ge=0)
    kl_estimator: KlEstimator = option(
        "k3", help="Of the KL, x = lp - ref: x (k1), x^2 / 2 (k2), exp(-x) + x - 1 (k3)."
    )
    kl_unbiased: bool = option(
        False, help="Multiply the KL by the ratio, with its gradient: k1's and k3's gradient is then the KL's own."
    )
    log_kl: bool = option(False, help="Measure the KL from the reference even where --kl-beta is 0.")
    ref_offload: bool = option(
        False, help="Keep the reference's weights in main memory; each layer's come to the GPU as it needs them."
    )
    entropy_coef: float = option(0.0, help="Weight of a bonus for the policy's entropy; 0: none.", ge=0)
    distill_coef: float = option(
        0.0, help="Weight of the cross-entropy to the teacher's top-k that environments send; 0: none.", ge=0
    )
    distill_temperature: float = option(1.0, help="Divides the teacher's logprobs.", gt=0)

    @field_validator("loss", "advantage_estimator")
    @classmethod
    def _is_known(cls, value: str, info: ValidationInfo) -> str:
        known = get_args(LossName if info.field_name == "loss" else EstimatorName)
        if import_paths.is_import_path(value):
            import_paths.check(value)
        elif value not in known:
            raise ConfigError(wanted=f"one of {', '.join(map(repr, known))}, or MODULE:NAME")
        return value

    @property
    def advantage_scale(self) -> Literal["group", "none"]:
        """What `scale_rewards` comes to: Dr. GRPO and RLOO are defined without the division."""
        if self.scale_rewards == "auto":
            return "none" if self.loss == "dr_grpo" or self.advantage_estimator == "rloo" else "group"
        return self.scale_rewards

    @property
    def eps_high(self) -> float:
        """What `clip_eps_high` comes to."""
        return self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    @property
    def correction(self) -> Literal["none", "truncate", "mask"]:
        """What `is_correction` comes to."""
        if self.is_correction == "auto":
            return "none" if self.ratio_against == "rollout" else "truncate"
        return self.is_correction

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0 or self.log_kl

    @property
    def trains_without_advantage(self) -> bool:
        """Whether tokens whose advantage is 0 have a gradient."""
        return self.kl_beta > 0 or self.entropy_coef > 0
