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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_trainer.alignment.model_proof import ModelProof
from grpo_trainer.alignment.probes import FAILED, Probe, gap, logprobs_of, probe_prompts
from grpo_trainer.alignment.proof import FACTORS, MIN_MOVE, Proved, disagreement, enlarge, inconclusive
from grpo_trainer.errors import BridgeError
from grpo_trainer.model.lora import decoder_layers
from vllm_server.protocol import PROOF_VERSION, BridgeInfo

log = logging.getLogger(__name__)

Fence = Callable[[int], AbstractContextManager[None]]
"""Returns the context in which the shared weights are written; afterwards they have the given version."""

Tell = Callable[[float | None], None]
"""Has the other processes make a synthetic change of a size in their shards, or undo it (None)."""


def prove_shared(
    model: PreTrainedModel,
    proof: ModelProof,
    info: BridgeInfo,
    version: int,
    fence: Fence,
    tell: Tell = lambda size: None,
) -> Proved:
    """Prove the present weights of a server, a synthetic change, and the present weights again, which are `version`.

    Args:
        model: the trainer's model, whose parameters are views of the server's memory, or are sent to the server.
        proof: asks the server, and compares.
        tell: see `SyntheticChange`.

    Raises:
        BridgeError: the server's logprobs do not agree with the shared weights; the message names the fault.
    """
    change = SyntheticChange(model, tell)
    noise, _ = proof.compare(info, version)
    before = proof.ask(info, version)
    allowed = proof.allowed(info)
    larger = 2 * allowed  # in 16 bits, rounding errors grow with the change
    prompts = probe_prompts(model.config.vocab_size, info.max_model_len)
    moved = 0.0
    for factor in FACTORS:
        try:
            with fence(PROOF_VERSION):
                change.enlarge(prompts, factor * MIN_MOVE / 2 * larger)
            synthetic = proof.ask(info, PROOF_VERSION)
            own = gap(model, synthetic)
        finally:  # even if the server has ended: a run may go on with others
            with fence(version):
                change.restore()
        moved = gap(model, synthetic)
        if not own <= larger:
            what, other = UNSEEN if moved <= larger else MISPLACED, f"|server - unchanged weights| {moved:.3g}"
            raise disagreement(what, "synthetic change", own, larger, other, RESTORED)
        if moved >= 2 * larger:
            break
    else:
        raise inconclusive("a synthetic change", moved, 2 * larger, "--no-proof trains all the same")
    after = proof.ask(info, version)
    back = _difference(before, after, gap(model, after))
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

    If the weights are sharded over processes, each process changes half of the rows that it has.

    Args:
        tell: called before this process makes the change or undoes it.
    """

    def __init__(self, model: PreTrainedModel, tell: Tell = lambda size: None) -> None:
        self._model = model
        self._tell = tell
        self._saved: list[tuple[Tensor, Tensor]] = []  # a changed place, and a copy of its old content

    def enlarge(self, prompts: list[list[int]], move: float) -> None:
        """Change the weights so that they move the trainer's own logprobs of texts by `move` nats a token."""
        enlarge(self._model, prompts, logprobs_of(self._model, prompts), move, self.make)

    @torch.no_grad()
    def make(self, size: float) -> None:
        """Make the change, with noise of `size` times the matrices' own."""
        self._tell(size)
        self._saved = self._saved or [(place, place.clone()) for place in _half(self._model)]
        for index, (place, saved) in enumerate(self._saved):
            generator = torch.Generator(place.device).manual_seed(index)
            noise = torch.randn(saved.shape, generator=generator, device=place.device)
            place.copy_(saved.float() + noise.mul_(size * saved.float().square().mean().sqrt()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the old weights bit for bit."""
        self._tell(None)
        for place, saved in self._saved:
            place.copy_(saved)
        self._saved = []


def _half(model: PreTrainedModel) -> list[Tensor]:
    """Return views of half the rows of the first and last matrix of some layers; of stacked experts, the first.

    Of a sharded matrix a process may have no row.
    """
    found = decoder_layers(model)
    layers = model.get_submodule(found.name)
    chosen = []
    for index in sorted({0, found.count // 2, found.count - 1}):
        matrices = [_own(each) for each in layers.get_submodule(str(index)).parameters() if each.ndim >= 2]
        for matrix in (matrices[0], matrices[-1]):
            rows = matrix.flatten(0, -3)[:1].flatten(0, 1) if matrix.ndim > 2 else matrix
            chosen.append(rows[: -(-len(rows) // 2)])
    return chosen


def _own(parameter: Tensor) -> Tensor:
    """Return the memory of a parameter in this process."""
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data
