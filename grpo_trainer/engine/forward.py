"""The forward pass from a microbatch to the scores of its trained tokens, and the choice of attention and head.

The fast path is the decoder's own forward pass, packed or padded, followed by `head.py` on the hidden states of the
trained positions. It would miss anything else that a model does: scaled or capped logits, adapters on the head, sliding
windows, recurrent states. So both halves of the fast path are first tried on a few tokens, and must give the model's
own logits. A model that fails the trial uses the slow path: its own whole forward pass, padded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_trainer.batch.microbatches import MicroBatch, layout, split
from grpo_trainer.config.train import Choice, TrainConfig
from grpo_trainer.engine import attention
from grpo_trainer.engine.compiled import CompiledLayers
from grpo_trainer.engine.head import ExactHead, HeadPlan, ShardedHead, TokenScores, head_scores, token_scores
from grpo_trainer.engine.recompute import Recomputation, known_layers
from grpo_trainer.engine.routing import Routing
from grpo_trainer.errors import ConfigError, TrainingError, warn_once
from grpo_trainer.model.load import computing_dtype
from grpo_trainer.rollouts.groups import Sample

log = logging.getLogger(__name__)

LARGE_CHUNK = 1 << 29
"""Logits of a chunk if there is spare memory: large chunks are faster, as each adds to the head's whole gradient."""


@dataclass(eq=False, repr=False)
class Forward:
    """Forward passes of a model."""

    model: nn.Module
    decoder: nn.Module | None
    head: nn.Linear | None
    """The parts that the fast path uses; None: the slow path, with the model's own logits."""
    plan: HeadPlan
    """The head's plan."""
    _: KW_ONLY
    packed: bool
    """Microbatches are packed."""
    shared: bool = False
    """A prompt that several sequences of a microbatch share is computed once."""
    routing: Routing | None = None
    """Replays a mixture's experts; None: the model chooses in each pass."""
    recomputation: Recomputation = field(default_factory=Recomputation)
    """What the layers keep for the backward pass, which recomputes the rest."""
    compiled: CompiledLayers | None = None
    """None: the layers are not compiled."""

    def facts(self) -> dict[str, Any]:
        """Return the decisions, for benchmarks."""
        layers = known_layers(self.decoder) or ()
        kept = Counter(self.recomputation.of(number) for number in range(len(layers)))
        return {
            "packed": self.packed,
            "shared_prompts": self.shared,
            "whole_logits": self.head is None,
            "compiled": self.plan.is_compiled,
            "logits_dtype": str(self.plan.logits_dtype).removeprefix("torch."),
            "layers_keep": {level.name.lower(): count for level, count in sorted(kept.items())},
            "kept_logits_gb": round(self.plan.kept_bytes / 1e9, 2),
        }

    def learning(self) -> AbstractContextManager[None]:
        """Return the context for training passes and their backward passes, in which compiled layers are used."""
        if self.routing is not None:
            return self.routing.active()
        return nullcontext() if self.compiled is None else self.compiled.active()

    def use_spare_memory(self, nbytes: float) -> None:
        """Let the head use spare memory, to keep a microbatch's logits for the backward pass if they fit."""
        large = LARGE_CHUNK * self.plan.logits_dtype.itemsize
        grows = self.plan.is_compiled and not self.plan.distills and nbytes > 8 * large
        chunks = large if grows else self.plan.chunk_bytes
        self.plan = replace(self.plan, kept_bytes=max(0, int(0.8 * nbytes - 4 * chunks)), chunk_bytes=chunks)

    def scores(self, microbatch: MicroBatch, *, entropy_gradient: bool = False) -> TokenScores:
        """Return the scores of a microbatch's trained tokens and of its teacher's tokens.

        Raises:
            TrainingError: the teacher has tokens that the model lacks.
        """
        with nullcontext() if self.routing is None else self.routing.replaying(microbatch):
            return self._scores(microbatch, entropy_gradient)

    def _scores(self, microbatch: MicroBatch, entropy_gradient: bool) -> TokenScores:
        if self.decoder is None or self.head is None:
            assert microbatch.packed is None
            logits_BTV: Tensor = self.model(input_ids=microbatch.tokens_BT, use_cache=False).logits
            check_teacher(microbatch.teacher_ids_NK, logits_BTV.shape[-1])
            return token_scores(
                logits_BTV,
                microbatch.tokens_BT,
                microbatch.rows_N,
                microbatch.columns_N,
                microbatch.temperature_N,
                microbatch.teacher_ids_NK,
                entropy_gradient=entropy_gradient,
            )
        check_teacher(microbatch.teacher_ids_NK, self.head.out_features)
        more: dict[str, Any] = {} if microbatch.packed is None else attention.arguments(microbatch.packed)
        hidden_BTH = self.decoder(input_ids=microbatch.tokens_BT, use_cache=False, **more).last_hidden_state
        return head_scores(
            hidden_BTH.flatten(0, 1).index_select(0, microbatch.predictors_N),
            self.head.weight,
            self.head.bias,
            microbatch.targets_N,
            microbatch.temperature_N,
            microbatch.teacher_ids_NK,
            self.plan,
            entropy_gradient=entropy_gradient,
        )


def check_teacher(ids_NK: Tensor | NDArray[np.int64], vocab: int) -> None:
    """Raise a TrainingError if a teacher has tokens that the model lacks."""
    largest = int(ids_NK.max()) if len(ids_NK) and ids_NK.shape[1] else -1
    if largest >= vocab:
        raise TrainingError(
            "the teacher's tokens must be the model's",
            field="distill_token_ids",
            got=largest,
            wanted=f"less than {vocab}",
        )


# ---------------------------------------------------------------- what a model supports


@dataclass(frozen=True)
class Parts:
    """Parts of a causal language model."""

    whole: PreTrainedModel
    decoder: nn.Module
    head: nn.Linear


def build_forward(model: nn.Module, config: TrainConfig) -> Forward:
    """Return the fastest forward pass that gives the model's own results.

    Raises:
        ConfigError: `--packing on`, `--share-prompts on` or `--routing-replay` is set, and the model does not allow it.
    """
    device = next(model.parameters()).device
    exact = config.logits_dtype == "float32" or (config.logits_dtype == "auto" and device.type == "cuda")
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    if exact and isinstance(whole, PreTrainedModel):
        head = _plain_head(whole)
        if head is not None and not isinstance(head, ShardedHead):
            head.__class__ = ExactHead
    computes = computing_dtype(model, config)
    routing = None if config.routing_replay == "off" else Routing(whole)
    parts, why = _parts_of(whole, computes)
    if parts is None:
        for option, asked in (("packing", config.packing), ("share-prompts", config.share_prompts)):
            if asked == "on":
                raise ConfigError(why, field=f"--{option}", got="on", fix="leave it out")
        return Forward(model, None, None, HeadPlan(torch.float32, torch.float32), packed=False, routing=routing)
    own = parts.head.own if isinstance(parts.head, ShardedHead) else None
    logits_dtype = torch.float32 if exact else computes
    wide = torch.float32 in (next(model.parameters()).dtype, parts.head.weight.grad_dtype)  # cut weights are gathered
    sum_dtype = torch.float32 if wide else computes
    plan = HeadPlan(computes, logits_dtype, distills=config.distill_coef > 0, own=own, sum_dtype=sum_dtype)
    packed = _packs(parts, config.packing, config.seq_len, plan.dtype, device)
    shared = _shares(parts, config.share_prompts, packed)
    return Forward(model, parts.decoder, parts.head, plan, packed=packed, shared=shared, routing=routing)


def _plain_head(whole: PreTrainedModel) -> nn.Linear | None:
    """Return the layer that turns hidden states into logits, if it is a plain linear layer."""
    head = whole.get_output_embeddings()
    return head if isinstance(head, nn.Linear) and type(head) in (nn.Linear, ExactHead, ShardedHead) else None


def _parts_of(whole: nn.Module, computes: torch.dtype) -> tuple[Parts | None, str]:
    """Return a model's parts if its logits are just its head applied to its decoder's hidden states, else why not."""
    if not isinstance(whole, PreTrainedModel):
        return None, f"{type(whole).__name__} is no transformers model"
    head, decoder = _plain_head(whole), whole.base_model
    if head is None or decoder is whole:
        return None, f"{type(whole).__name__} has no plain linear head"
    if getattr(whole.config.get_text_config(), "final_logit_softcapping", None):
        return None, f"{type(whole).__name__} caps its logits"
    tokens_BT = _probe_tokens(head)[None]
    with torch.no_grad(), evaluating(whole):
        logits_BTV = whole(input_ids=tokens_BT, use_cache=False).logits
        hidden_BTH = decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state
        ours_BTV = head(hidden_BTH.to(head.weight.dtype))
    rounding = max(TOLERANCE[dtype] for dtype in (logits_BTV.dtype, head.weight.dtype, computes))
    if not _distance(ours_BTV, logits_BTV) <= rounding:
        return None, f"{type(whole).__name__} {MORE_THAN_HEAD}"
    return Parts(whole, decoder, head), ""


def _packs(parts: Parts, asked: Choice, seq_len: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether to pack microbatches, and if so switch the model's attention to the packed one."""
    if asked == "off" or (asked == "auto" and device.type != "cuda"):
        return False
    why = _why_not_packed(parts, seq_len, dtype, device)
    refused = why and f"{type(parts.whole).__name__}: {why}"
    return _supports("packing", asked, refused, "microbatches are padded, not packed")


def _shares(parts: Parts, asked: Choice, packed: bool) -> bool:
    """Return whether to compute a prompt once that several sequences share."""
    if asked == "off" or (asked == "auto" and not packed):
        return False
    why = None if packed else "sequences are not packed"
    if packed and not _lets_prompts_be_shared(parts):
        why = f"{type(parts.whole).__name__} does not give the same when sequences share a prompt"
    return _supports("share-prompts", asked, why, "shared prompts are computed once per sequence")


def _supports(option: str, asked: Choice, why_not: str | None, instead: str) -> bool:
    """Return whether a model supports an option, and warn if not; if it is `on`, raise a `ConfigError`."""
    if why_not is not None and asked == "on":
        raise ConfigError(why_not, field=f"--{option}", got="on", fix="leave it out")
    if why_not is not None:
        warn_once(log, "%s: %s", instead, why_not)
    return why_not is None


def _why_not_packed(parts: Parts, seq_len: int, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        return f"attention of packed sequences computes in 16 bits on a GPU, this model in {dtype}"
    before = parts.whole.config._attn_implementation
    if before != "sdpa":
        return f"--attention {before} was asked for"
    if why := attention.why_not(parts.whole.config.get_text_config(), seq_len):
        return why
    parts.whole.set_attn_implementation(attention.NAME)
    if parts.whole.config._attn_implementation != attention.NAME:
        return "its attention can't be replaced"
    if not _keeps_sequences_apart(parts):
        parts.whole.set_attn_implementation(before)
        return MIXES
    return None


def _keeps_sequences_apart(parts: Parts) -> bool:
    """Return whether two packed sequences give the same hidden states as each does alone."""
    tokens_T = _probe_tokens(parts.head)
    cut = len(tokens_T) // 3
    packed = layout([cut, len(tokens_T) - cut]).to(tokens_T.device)
    with torch.no_grad(), evaluating(parts.whole):
        alone = torch.cat([_hidden(parts, tokens_T[:cut]), _hidden(parts, tokens_T[cut:])])
        together = _hidden(parts, tokens_T, **attention.arguments(packed))
        mixed = _hidden(parts, tokens_T, position_ids=packed.positions_1T)
    return _agrees(together, alone, mixed)


def _lets_prompts_be_shared(parts: Parts) -> bool:
    """Return whether two sequences with a shared prompt give the same hidden states as each does alone."""
    tokens = _probe_tokens(parts.head)
    third = len(tokens) // 3
    prompt, *ends = tokens[:third], tokens[third : 2 * third], tokens[2 * third :]
    wholes = [torch.cat([prompt, end]) for end in ends]
    made = [Sample(whole.cpu().numpy(), np.arange(third, len(whole))) for whole in wholes]
    (microbatch,) = split(made, len(made), packed=True, shared=True)
    microbatch = microbatch.to(tokens.device)
    assert microbatch.packed is not None and microbatch.packed.shared is not None
    row, predictors = microbatch.tokens_BT[0], microbatch.predictors_N
    with torch.no_grad(), evaluating(parts.whole):
        alone = torch.cat([_hidden(parts, whole)[third - 1 : -1] for whole in wholes])
        together = _hidden(parts, row, **attention.arguments(microbatch.packed))[predictors]
        unshared = _hidden(parts, row, **attention.arguments(replace(microbatch.packed, shared=None)))[predictors]
    return _agrees(together, alone, unshared)


def _hidden(parts: Parts, tokens_T: Tensor, **more: Any) -> Tensor:
    """Return the hidden states of a row, in fp32."""
    return parts.decoder(input_ids=tokens_T[None], use_cache=False, **more).last_hidden_state[0].float()


def _agrees(got: Tensor, wanted: Tensor, without: Tensor) -> bool:
    """Return whether `got` equals `wanted`, or is at least much nearer to it than `without` is.

    `without` is the result if boundaries or shared prompts are ignored. In 16 bits, rounding hides exact equality.
    """
    error = _distance(got, wanted)
    return error <= TOLERANCE[torch.float32] or error <= 0.25 * _distance(without, wanted)


MORE_THAN_HEAD: Final = "does more to its logits than its head does"
MIXES: Final = "its layers let one sequence see another"
"""Reasons for which a model can fail the trial."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float64: 1e-6}
"""Largest relative distance that rounding can explain."""

PROBE = 12
"""Tokens of a trial pass."""


def _probe_tokens(head: nn.Linear) -> Tensor:
    """Return some tokens, spread over the vocabulary."""
    return torch.linspace(0, head.out_features - 1, PROBE, device=head.weight.device).long()


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode within the block: its layers are not recomputed."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
