"""Probes: what a server samples for some prompts, and how far its logprobs are from the trainer's for these tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import torch
from peft import PeftModel
from torch import Tensor, nn

from grpo_trainer.alignment.rounding import computed_in_fp8
from grpo_trainer.engine.forward import evaluating
from grpo_trainer.engine.logprobs import token_scores
from grpo_trainer.errors import BridgeError
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import GenerateResponse

log = logging.getLogger(__name__)

SHORT_PROMPT = 12
LONG_PROMPT = 280
"""Tokens of the probe prompts; the long one fills two blocks of the server's KV cache (128 tokens on a CPU)."""

COMPLETION_TOKENS = 8
COMPLETION_TOKENS_COARSE = 48
"""Tokens sampled for each prompt. Rounding to 16 or fewer bits needs a mean over more tokens: with 8 for each of two
prompts, a 7B model in bfloat16 that had learnt sums was refused (0.43 nats a token, 0.33 allowed)."""

FP8_MARGIN, FP8_LIMIT = 2.0, 1.0
"""A server with fp8 weights may be this many times as far off as the trainer is from itself when it computes in fp8, up
to a limit in nats. The probes are random tokens, on which a model that has learnt may be sensitive: 0.65 nats on one
H200 for a 7B model that had learnt sums."""

FAILED: Final = "bridge proof failed"
"""First words of the field of each error."""


@dataclass(frozen=True)
class Probe:
    """The server's sample for one prompt: tokens, prompt included, and the logprobs of the sampled ones."""

    tokens: list[int]
    prompt_len: int
    server_logprobs: Tensor


def completion_tokens(precision: str, *, quantised: bool) -> int:
    """Return how many tokens to sample for each prompt.

    Args:
        precision: name of the coarser dtype of the two sides.
    """
    return COMPLETION_TOKENS if precision == "float32" and not quantised else COMPLETION_TOKENS_COARSE


def probe_prompts(vocab_size: int, room: int) -> list[list[int]]:
    """Return random token ids, the same at every start: a short prompt, and one over two cache blocks if it fits."""
    generator = torch.Generator().manual_seed(0)
    lengths = sorted({min(SHORT_PROMPT, room), min(LONG_PROMPT, room)})
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def ask(
    server: ServerClient, prompts: list[list[int]], tokens: int, *, name: str | None = None, version: int | None = None
) -> list[Probe]:
    """Return the server's samples for the prompts, of `tokens` tokens each.

    Raises:
        BridgeError: another model than `name` answered, or another version than `version`.
    """
    probes = []
    for prompt in prompts:
        answer = server.generate(
            prompt, model=name, max_tokens=tokens, temperature=1.0, logprobs=0, seed=0, ignore_eos=True
        )
        if name is not None and answer.model != name:
            raise BridgeError(field=f"{FAILED}: model", got=answer.model, wanted=name)
        if version is not None and answer.policy_version != version:
            wanted = f"{version}, which the server was launched as"
            raise BridgeError(field=f"{FAILED}: version", got=answer.policy_version, wanted=wanted)
        probes.append(probe_of(answer))
    return probes


def probe_of(answer: GenerateResponse) -> Probe:
    """Return the first completion of an answer to a request with `logprobs: 0`."""
    assert answer.logprobs is not None, "asked with logprobs"
    sampled = [next(iter(entry[0].values())) for entry in answer.logprobs[0]]
    return Probe([*answer.prompt_token_ids, *answer.token_ids[0]], len(answer.prompt_token_ids), torch.tensor(sampled))


def trainer_logprobs(model: nn.Module, probe: Probe) -> Tensor:
    """Return the trainer's own logprobs of the tokens that the server sampled, `[N]`."""
    return logprobs_of_copies(model, probe, 1)[0]


def logprobs_of_copies(model: nn.Module, probe: Probe, copies: int) -> Tensor:
    """Return the trainer's own logprobs of the tokens that the server sampled, once for each row: `[copies, N]`."""
    device = next(model.parameters()).device
    tokens_BT = torch.tensor([probe.tokens] * copies, device=device)
    columns_N = torch.arange(probe.prompt_len, len(probe.tokens), device=device)
    row_N, ones_N = torch.zeros_like(columns_N), torch.ones(len(columns_N), device=device)
    with torch.no_grad(), evaluating(model):
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        # Row by row: scores copy the logits that they read.
        scored = [token_scores(each_BTV, tokens_BT[:1], row_N, columns_N, ones_N) for each_BTV in logits_BTV.split(1)]
    return torch.stack([scores.logprobs_N for scores in scored]).cpu()


def gap(model: nn.Module, probes: list[Probe]) -> float:
    """Return mean |server - trainer| over all sampled tokens, in nats."""
    return float(torch.cat([(probe.server_logprobs - trainer_logprobs(model, probe)).abs() for probe in probes]).mean())


def gap_of_base(model: PeftModel, probes: list[Probe]) -> float:
    """Return mean |server - base model| over all sampled tokens, in nats."""
    with model.disable_adapter():
        return gap(model, probes)


def allowed_in_fp8(allowed: float, own: float, model: nn.Module, probes: list[Probe]) -> float:
    """Return the largest gap of a server with fp8 weights: `allowed`, or more if rounding moves this model further.

    Args:
        own: the gap to the server.
    """
    if own <= allowed:
        return allowed
    offset = offset_of_fp8(model, probes)
    log.info("the server is %.2g nats a token from the trainer, which is %.2g from itself in fp8", own, offset)
    return max(allowed, min(FP8_MARGIN * offset, FP8_LIMIT))


def offset_of_fp8(model: nn.Module, probes: list[Probe]) -> float:
    """Return mean |trainer - trainer in fp8| over all sampled tokens, in nats."""
    own = [trainer_logprobs(model, probe) for probe in probes]
    with computed_in_fp8(model):
        rounded = [trainer_logprobs(model, probe) for probe in probes]
    return float((torch.cat(own) - torch.cat(rounded)).abs().mean())


def logprobs_of(model: nn.Module, prompts: list[list[int]]) -> Tensor:
    """Return the trainer's logprobs of all tokens of the prompts but the first of each."""
    texts = [Probe(prompt, 1, torch.zeros(len(prompt) - 1)) for prompt in prompts]
    return torch.cat([trainer_logprobs(model, text) for text in texts])
