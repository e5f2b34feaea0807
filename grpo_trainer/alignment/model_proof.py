"""Proof of a server that was launched on a whole model: it generates with the trainer's present weights.

The server's per-token logprobs on the probe prompts must agree with those of the trainer's forward pass. The first
launch measures the gap that rounding causes; at later launches the gap may be a few times as large.
"""

from __future__ import annotations

import logging
from typing import Any

from peft import PeftModel

from grpo_trainer.alignment.probes import Probe, allowed_in_fp8, ask, completion_tokens, gap, gap_of_base, probe_prompts
from grpo_trainer.alignment.proof import (
    BASE_MODEL,
    NOISE_LIMIT,
    NOISE_LIMIT_QUANTISED,
    OTHER_WEIGHTS,
    SAME_MODEL,
    TOLERANCE,
    allowed_later,
    disagreement,
)
from grpo_trainer.errors import BridgeError
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)


class ModelProof:
    """Compares each launch of a server with the trainer.

    Args:
        model: the trainer's model, whose weights the server should have.
        trainer_dtype: dtype of the model's forward pass.
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
            BridgeError: the server generates with other weights; the message has the gap.
        """
        own, allowed = self.compare(info, version)
        log.info(
            "bridge proved: the server on version %d is within %.2g nats a token of the trainer (allowed %.2g)",
            *(version, own, allowed),
        )
        return own

    def compare(self, info: BridgeInfo, version: int) -> tuple[float, float]:
        """Return mean |server - trainer| and its limit, in nats a token; the first call measures the noise.

        Raises:
            BridgeError: the gap is above the limit.
        """
        probes = self.ask(info, version)
        own = gap(self._model, probes)
        allowed = self.allowed(info)
        if self._noise is None and info.quantization == "fp8":
            allowed = allowed_in_fp8(allowed, own, self._model, probes)
        if not own <= allowed:  # `not <=` also catches NaN
            raise self._verdict(version, own, allowed, probes)
        if self._noise is None:
            self._noise = own
        return own, allowed

    def _precision(self, info: BridgeInfo) -> str:
        """Return the coarser dtype of the two sides."""
        return max(info.dtype, self._trainer_dtype, key=TOLERANCE.__getitem__)

    def allowed(self, info: BridgeInfo) -> float:
        """Return the largest allowed gap between the two sides, in nats a token."""
        precision = self._precision(info)
        if self._noise is None:
            return NOISE_LIMIT_QUANTISED if info.in_8_bits else NOISE_LIMIT[precision]
        return allowed_later(self._noise, precision)

    def ask(self, info: BridgeInfo, version: int) -> list[Probe]:
        """Return the server's samples for the probe prompts.

        Raises:
            BridgeError: another version than `version` answered.
        """
        tokens = completion_tokens(self._precision(info), quantised=info.in_8_bits)
        prompts = probe_prompts(self._model.config.vocab_size, info.max_model_len - tokens)
        return ask(self._server, prompts, tokens, version=version)

    def _verdict(self, version: int, own: float, allowed: float, probes: list[Probe]) -> BridgeError:
        what, base = OTHER_WEIGHTS, ""
        if isinstance(self._model, PeftModel):
            distance = gap_of_base(self._model, probes)
            base = f"|server - base model| {distance:.3g}"
            what = BASE_MODEL if distance <= allowed else what
        return disagreement(what, f"version {version}", own, allowed, base, SAME_MODEL)
