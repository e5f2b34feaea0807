"""Proof of a bridge over shared memory: the server computes with the same memory that the trainer writes.

First, both sides must agree on the present weights. Then the proof changes half the rows of some matrices in place,
within a fence. The server's logprobs must change, and agree with the trainer's own forward pass. Then the proof
restores the old bits, and the logprobs must return to their old values. The proof fails, before any training step, for
a server with its own copy, with a parameter bound to another one's memory, or with a stale cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.alignment.model_proof import ModelProof
from grpo_trainer.alignment.proof import (
    FAILED,
    MIN_MOVE,
    Probe,
    Proved,
    disagreement,
    enlarge,
    gap,
    inconclusive,
    logprobs_of,
    probe_prompts,
)
from grpo_trainer.errors import BridgeError
from grpo_trainer.model.lora import decoder_layers
from vllm_server.protocol import PROOF_VERSION, BridgeInfo

log = logging.getLogger(__name__)

Fence = Callable[[int], AbstractContextManager[None]]
"""Returns the context in which the shared weights are written; afterwards they have the given version."""


class SharedProof:
    """Proves one server.

    Args:
        model: the trainer's model, whose parameters are views of the server's memory.
        proof: asks the server, and compares.
    """

    def __init__(self, model: PreTrainedModel, proof: ModelProof) -> None:
        self._model = model
        self._proof = proof

    def prove(self, info: BridgeInfo, version: int, fence: Fence) -> Proved:
        """Prove the present weights, a synthetic change, and the present weights again, which are `version`.

        Raises:
            BridgeError: the server's logprobs do not agree with the shared weights; the message names the fault.
        """
        noise, _ = self._proof.compare(info, version)
        before = self._proof.ask(info, version)
        allowed = self._proof.allowed(info)
        larger = 2 * allowed  # in 16 bits, rounding errors grow with the change
        change = SyntheticChange(self._model, probe_prompts(self._model.config.vocab_size, info.max_model_len))
        with fence(PROOF_VERSION):
            change.write(MIN_MOVE / 2 * larger)
        try:
            synthetic = self._proof.ask(info, PROOF_VERSION)
            own = gap(self._model, synthetic)
        finally:
            with fence(version):
                change.restore()
        moved = gap(self._model, synthetic)
        if not own <= larger:
            what, other = UNSEEN if moved <= larger else MISPLACED, f"|server - unchanged weights| {moved:.3g}"
            raise disagreement(what, "synthetic change", own, larger, other, RESTORED)
        if moved < 2 * larger:
            raise inconclusive("a synthetic change", moved, larger, "--no-proof trains all the same")
        after = self._proof.ask(info, version)
        back = _difference(before, after, gap(self._model, after))
        if not back <= allowed:
            raise BridgeError(
                "the server's logprobs are not those of before, a stale cache?",
                field=f"{FAILED} (change undone)",
                got=f"{back:.3g} nats a token",
                wanted=f"at most {allowed:.2g}",
                fix="nothing was trained; --no-proof trains all the same",
            )
        log.info(
            "bridge proved: the server is within %.2g nats a token of the trainer; a synthetic change of the weights "
            "moved it by %.3g and it stayed within %.2g; undone, it is within %.2g of before",
            *(noise, moved, own, back),
        )
        return Proved(noise, moved, own, back)


UNSEEN: Final = "does not see what the trainer writes: it answers as before the change"
MISPLACED: Final = "computes with other weights than the trainer's (a parameter bound to another's place?)"
"""Faults of a server, to follow "the server …"."""


RESTORED: Final = "the old weights are back, nothing was trained: restart the server; --no-proof trains all the same"


def _difference(before: list[Probe], after: list[Probe], gap: float) -> float:
    """Return mean |after - before|, or `gap` if rounding led to other tokens, which can't be compared one by one."""
    if [probe.tokens for probe in before] != [probe.tokens for probe in after]:
        return gap
    pairs = zip(before, after, strict=True)
    return float(torch.cat([(b.server_logprobs - a.server_logprobs).abs() for b, a in pairs]).mean())


class SyntheticChange:
    """Half the rows of two matrices, of attention and of the MLP, in the first, middle and last layer.

    Args:
        prompts: texts on which the effect of a change is measured.
    """

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]]) -> None:
        self._model = model
        self._prompts = prompts
        self._places = [matrix[: -(-len(matrix) // 2)] for matrix in _matrices(model)]
        self._saved = [place.clone() for place in self._places]

    def write(self, move: float) -> None:
        """Change the weights so that they move the trainer's own logprobs by `move` nats a token, see `enlarge`."""
        enlarge(self._model, self._prompts, logprobs_of(self._model, self._prompts), move, self._write)

    @torch.no_grad()
    def _write(self, size: float) -> None:
        for index, (place, saved) in enumerate(zip(self._places, self._saved, strict=True)):
            generator = torch.Generator(place.device).manual_seed(index)
            noise = torch.randn(saved.shape, generator=generator, device=place.device)
            place.copy_(saved.float() + noise.mul_(size * saved.float().square().mean().sqrt()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the old weights bit for bit."""
        for place, saved in zip(self._places, self._saved, strict=True):
            place.copy_(saved)


def _matrices(model: PreTrainedModel) -> list[Tensor]:
    """Return views `[rows, columns]` of the first and last matrix of some layers; of stacked experts, the first."""
    found = decoder_layers(model)
    layers = model.get_submodule(found.name)
    chosen = []
    for index in sorted({0, found.count // 2, found.count - 1}):
        parameters = layers.get_submodule(str(index)).parameters()
        matrices = [parameter.detach() for parameter in parameters if parameter.ndim >= 2]
        chosen += [matrix.flatten(0, -3)[0] if matrix.ndim > 2 else matrix for matrix in (matrices[0], matrices[-1])]
    return chosen
