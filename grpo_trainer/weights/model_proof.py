"""Proof of a server that was launched on a whole model: does it generate with the weights that the trainer has now?

Its per-token logprobs of the probe prompts must be those of the trainer's own forward pass. The first launch measures
how far apart rounding keeps the two sides; later ones may be a few times as far apart.
"""

from __future__ import annotations

import logging
from typing import Any

from peft import PeftModel

from grpo_trainer.errors import BridgeError
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.proof import (
    BASE_MODEL,
    COMPLETION_TOKENS,
    FAILED,
    NOISE_LIMIT,
    NOISE_MARGIN,
    OTHER_WEIGHTS,
    SAME_MODEL,
    TOLERANCE,
    Probe,
    mean_gap,
    probe_of,
    probe_prompts,
    trainer_logprobs,
)
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)


class ModelProof:
    """Compares each launch of a server with the trainer.

    Args:
        model: the trainer's, with the weights that the server should have.
        trainer_dtype: that its forward pass computes in.
    """

    def __init__(self, model: Any, server: ServerClient, trainer_dtype: str) -> None:
        self._model = model
        self._server = server
        self._trainer_dtype = trainer_dtype
        self._noise: float | None = None

    def prove(self, info: BridgeInfo, version: int) -> float:
        """Prove that the server that `info` describes generates with the model's present weights, as `version`.

        Returns:
            Mean |server - trainer| in nats a token.

        Raises:
            BridgeError: it does not; the message says by how much.
        """
        gap, allowed = self.compare(info, version)
        log.info(
            "bridge proved: the server on version %d is within %.2g nats a token of the trainer (allowed %.2g)",
            *(version, gap, allowed),
        )
        return gap

    def compare(self, info: BridgeInfo, version: int) -> tuple[float, float]:
        """Mean |server - trainer| in nats a token, and how much it may be; the first measures the noise.

        Raises:
            BridgeError: it is more.
        """
        probes = self.ask(info, version)
        gap = self.gap(probes)
        allowed = self.allowed(info)
        if not gap <= allowed:  # also when it is not a number
            raise self._verdict(version, gap, allowed, probes)
        if self._noise is None:
            self._noise = gap
        return gap, allowed

    def allowed(self, info: BridgeInfo) -> float:
        """How far apart the two sides may be by now, in nats a token."""
        precision = max(info.dtype, self._trainer_dtype, key=TOLERANCE.__getitem__)  # the coarser of the two sides
        if self._noise is None:
            return NOISE_LIMIT[precision]
        return max(TOLERANCE[precision], NOISE_MARGIN * self._noise)

    def gap(self, probes: list[Probe]) -> float:
        """Mean |server - trainer| with the weights that the trainer has now, in nats a token."""
        return mean_gap(probes, [trainer_logprobs(self._model, probe) for probe in probes])

    def ask(self, info: BridgeInfo, version: int) -> list[Probe]:
        """What the server samples for the probe prompts.

        Raises:
            BridgeError: another version answered.
        """
        probes = []
        for prompt in probe_prompts(self._model.config.vocab_size, info.max_model_len - COMPLETION_TOKENS):
            answer = self._server.generate(
                prompt, max_tokens=COMPLETION_TOKENS, temperature=1.0, logprobs=0, seed=0, ignore_eos=True
            )
            if answer.policy_version != version:
                raise BridgeError(
                    field=f"{FAILED}: version",
                    got=answer.policy_version,
                    wanted=f"{version}, which the server was launched as",
                )
            probes.append(probe_of(answer))
        return probes

    def _verdict(self, version: int, gap: float, allowed: float, probes: list[Probe]) -> BridgeError:
        what = OTHER_WEIGHTS
        base = ""
        if isinstance(self._model, PeftModel):
            with self._model.disable_adapter():
                distance = mean_gap(probes, [trainer_logprobs(self._model, probe) for probe in probes])
            base = f", |server - base model| {distance:.3g}"
            if distance <= allowed:
                what = BASE_MODEL
        return BridgeError(
            f"the server {what}",
            field=f"{FAILED} (version {version})",
            got=f"mean |server - trainer| of {gap:.3g} nats a token{base}",
            wanted=f"at most {allowed:.2g}",
            fix=SAME_MODEL,
        )
