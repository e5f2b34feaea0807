"""Options of the loss, and the table of built-in losses. `docs/training.md`: what reproduces which paper. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import ValidationInfo, field_validator

from grpo_trainer import import_paths
from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError

EstimatorName = Literal["group", "rloo"]
KlEstimator = Literal["k1", "k2", "k3"]
TokenMean = Literal["sequences", "tokens", "constant"]


@dataclass(frozen=True)
class BuiltInLoss:
    """A built-in loss; `grpo_trainer.losses` builds it by these names."""

    surrogate: str  # a function in `losses/surrogates.py`
    mean: TokenMean  # of the tokens' losses: see `losses.LossSpec`
    ratio: Literal["token", "sequence"] = "token"


LOSSES: Mapping[str, BuiltInLoss] = MappingProxyType(
    {
        "grpo": BuiltInLoss("clipped", "sequences"),  # DeepSeekMath, arXiv 2402.03300
        "gspo": BuiltInLoss("clipped", "sequences", "sequence"),  # arXiv 2507.18071
        "sapo": BuiltInLoss("sapo", "sequences"),  # arXiv 2511.20347
        "dapo": BuiltInLoss("clipped", "tokens"),  # arXiv 2503.14476
        "bnpo": BuiltInLoss("clipped", "tokens"),  # TRL's name; as dapo, because a batch is the whole batch here
        "cispo": BuiltInLoss("cispo", "tokens"),  # MiniMax-M1, arXiv 2506.13585
        "dr_grpo": BuiltInLoss("clipped", "constant"),  # sum / (sequences x --max-completion-len), arXiv 2503.20783
    }
)
"""By name. The means of gspo, cispo and sapo are those of their papers and of TRL 1.16."""


def _named(mean: TokenMean) -> str:
    return ", ".join(name for name, loss in LOSSES.items() if loss.mean == mean)


class LossConfig(Section):
    """Loss."""

    loss: str = option(
        "dapo",
        help=f"{', '.join(LOSSES)}, or MODULE:NAME. Token losses are averaged by sequence "
        f"({_named('sequences')}) or over all tokens ({_named('tokens')}), or their sum is divided by a constant "
        f"({_named('constant')}). MODULE:NAME is a LossSpec of your own.",
    )
    clip_eps: float = option(0.2, gt=0, lt=1)
    """Lower clip of the importance ratio: the bound is 1 - VALUE."""
    clip_eps_high: float | None = option(None, gt=0)
    """Upper clip of the importance ratio: the bound is 1 + VALUE (default: --clip-eps)."""
    dual_clip: float | None = option(None, gt=1)
    """Upper bound of the ratio for tokens with a negative advantage (default: no bound)."""
    sapo_tau_pos: float = option(1.0, gt=0)
    """Temperature of sapo's gate for positive advantages."""
    sapo_tau_neg: float = option(1.05, gt=0)
    """Temperature of sapo's gate for other advantages."""
    advantage_estimator: str = option("group")
    """Baseline of a reward: the mean of its group (group), or of the others in it (rloo). MODULE:NAME is a function of
    your own, from a group's rewards to its advantages."""
    scale_rewards: Literal["auto", "group", "none"] = option("auto")
    """Divide a group's advantages by its standard deviation, or not; auto: divide, except with dr_grpo or rloo."""
    max_completion_len: int | None = option(None, gt=0)
    """Number of tokens by which dr_grpo divides each sample's loss (default: --seq-len)."""
    ratio_against: Literal["rollout", "trainer"] = option("rollout")
    """Old logprobs in the ratio: the server's at sampling, or the trainer's before the update. Groups without server
    logprobs use the trainer's. The default is trainer for a server in 8 bits."""
    is_correction: Literal["auto", "none", "truncate", "mask"] = option("auto")
    """Importance weight w = exp(trainer's old logprob - server's) in the loss. none: no weight; truncate: min(w,
    --is-cap); mask: 0 outside 1/cap to cap; auto: truncate with --ratio-against trainer, none with rollout, where the
    ratio corrects this already."""
    is_level: Literal["token", "sequence"] = option("token")
    """Compute the weight of --is-correction for each token, or for each whole sequence."""
    is_cap: float = option(2.0, gt=1)
    """Largest weight of a token or sequence; with mask, a weight outside 1/cap to cap becomes 0."""
    routing_replay: Literal["off", "server"] = option("off")
    """Experts that a mixture-of-experts model uses in both passes. server: those that the server chose for each token.
    off: the model chooses in each pass."""
    updates_per_batch: int = option(1, ge=1)
    """Optimizer steps on each batch; each one uses the whole batch."""
    kl_beta: float = option(0.0, "--beta", ge=0)
    """Weight of the KL divergence from the reference model; 0: none."""
    kl_estimator: KlEstimator = option("k3")
    """Estimator of the KL, with x = lp - ref: x (k1), x^2 / 2 (k2), exp(-x) + x - 1 (k3)."""
    kl_unbiased: bool = option(False)
    """Multiply the KL estimate by the ratio (with gradient), which makes the gradients of k1 and k3 unbiased."""
    kl_reference: Literal["start", "base"] = option("start")
    """Reference of the KL in a run with --lora-adapter. start: the base model with that adapter, so the KL begins at 0.
    base: the base model without an adapter."""
    log_kl: bool = option(False)
    """Measure the KL from the reference even if --kl-beta is 0."""
    ref_offload: bool = option(False)
    """Keep the reference model in main memory and copy each layer to the GPU when it is needed."""
    entropy_coef: float = option(0.0, ge=0)
    """Weight of an entropy bonus; 0: none."""
    distill_coef: float = option(0.0, ge=0)
    """Weight of the cross-entropy to the teacher's top-k logprobs, which environments send; 0: none."""
    distill_temperature: float = option(1.0, gt=0)
    """Temperature of the teacher: its logprobs are divided by this."""

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _is_not_own(cls, value: Any) -> Any:
        if value == "own":  # of earlier versions
            raise ConfigError("this value has been removed", wanted="server or off", fix="start a new run with server")
        return value

    @field_validator("loss", "advantage_estimator")
    @classmethod
    def _is_known(cls, value: str, info: ValidationInfo) -> str:
        known = tuple(LOSSES) if info.field_name == "loss" else get_args(EstimatorName)
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
