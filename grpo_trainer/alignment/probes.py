"""Probes: what a server samples for some prompts, and how far its logprobs are from the trainer's for these tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_trainer.engine.forward import evaluating
from grpo_trainer.engine.head import token_scores
from grpo_trainer.errors import BridgeError
from grpo_trainer.model.load import weights_of
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import GenerateResponse

SHORT_PROMPT = 12
LONG_PROMPT = 280
"""Tokens of the probe prompts; the long one fills two blocks of the server's KV cache (128 tokens on a CPU)."""

COMPLETION_TOKENS = 8
COMPLETION_TOKENS_COARSE = 48
"""Tokens sampled for each prompt. Rounding to 16 or fewer bits needs a mean over more tokens: with 8 for each of two
prompts, a 7B model in bfloat16 that had learnt sums was refused (0.43 nats a token, 0.33 allowed)."""

FAILED: Final = "bridge proof failed"
"""First words of the field of each error."""

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12
"""So that a matrix or a token of zeros is not divided by zero."""


@dataclass(frozen=True)
class Probe:
    """The server's sample for one prompt: tokens, prompt included, and the logprobs of the sampled ones."""

    tokens: list[int]
    prompt_len: int
    server_logprobs: Tensor


# ---------------------------------------------------------------- the server


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
            wanted = f"{version}, which the server confirmed"
            raise BridgeError(field=f"{FAILED}: version", got=answer.policy_version, wanted=wanted)
        probes.append(probe_of(answer))
    return probes


def probe_of(answer: GenerateResponse) -> Probe:
    """Return the first completion of an answer to a request with `logprobs: 0`."""
    assert answer.logprobs is not None, "asked with logprobs"
    sampled = [next(iter(entry[0].values())) for entry in answer.logprobs[0]]
    return Probe([*answer.prompt_token_ids, *answer.token_ids[0]], len(answer.prompt_token_ids), torch.tensor(sampled))


# ---------------------------------------------------------------- the trainer


def trainer_logprobs(model: nn.Module, probe: Probe, copies: int = 1) -> Tensor:
    """Return the trainer's own logprobs of the sampled tokens, `[copies * N]`: a forward pass of equal rows."""
    device = next(model.parameters()).device
    tokens_BT = torch.tensor([probe.tokens] * copies, device=device)
    columns_N = torch.arange(probe.prompt_len, len(probe.tokens), device=device)
    row_N, ones_N = torch.zeros_like(columns_N), torch.ones(len(columns_N), device=device)
    with torch.no_grad(), evaluating(model):
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        # Row by row: scores copy the logits that they read.
        scored = [token_scores(each_BTV, tokens_BT[:1], row_N, columns_N, ones_N) for each_BTV in logits_BTV.split(1)]
    return torch.cat([scores.logprobs_N for scores in scored]).cpu()


def logprobs_of(model: nn.Module, prompts: list[list[int]]) -> Tensor:
    """Return the trainer's logprobs of all tokens of the prompts but the first of each."""
    return torch.cat([trainer_logprobs(model, Probe(prompt, 1, torch.empty(0))) for prompt in prompts])


def gap(model: nn.Module, probes: list[Probe]) -> float:
    """Return mean |server - trainer| over all sampled tokens, in nats."""
    return float(torch.cat([(probe.server_logprobs - trainer_logprobs(model, probe)).abs() for probe in probes]).mean())


# ---------------------------------------------------------------- what 8 bits do to the trainer's own logprobs


def offset_of_fp8(model: nn.Module, probes: list[Probe]) -> float:
    """Return mean |trainer - trainer in fp8|, in nats a token: a server with fp8 weights is off by about as much."""
    own = [trainer_logprobs(model, probe) for probe in probes]
    with computed_in_fp8(model):
        rounded = [trainer_logprobs(model, probe) for probe in probes]
    return float((torch.cat(own) - torch.cat(rounded)).abs().mean())


@contextmanager
def computed_in_fp8(model: nn.Module) -> Iterator[None]:
    """Compute the model's linear layers in fp8 within the block, as vLLM does with `--quantization fp8`.

    Weights have one scale a matrix (in vLLM one for q, k and v together, and one for gate and up), activations one a
    token. Head and adapters stay as they are, and so do experts that are no linear layers. No second copy of the
    weights is kept: each pass rounds them again.
    """

    def hook(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        x_BTI = args[0]
        weight_OI = weights_of(layer)
        rounded_OI = rounded_to_fp8(weight_OI, weight_OI.abs().max()).to(x_BTI.dtype)
        rounded_BTI = rounded_to_fp8(x_BTI, x_BTI.abs().amax(-1, keepdim=True)).to(x_BTI.dtype)
        return functional.linear(rounded_BTI, rounded_OI, layer.bias)

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer is not head and "lora_" not in name:
                stack.callback(layer.register_forward_hook(hook).remove)
        yield


def rounded_to_fp8(x: Tensor, largest: Tensor) -> Tensor:
    """Return a tensor, rounded to fp8 (e4m3) with the scale that makes `largest` the greatest fp8 number, in fp32."""
    scale = (largest.float() / LARGEST_FP8).clamp(min=SMALLEST_SCALE)
    return (x.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).float() * scale
