"""Two Triton kernels for the logprobs and ranks of sampled tokens: one read of the logits, spread over the whole GPU.

Shape letters: N rows, V tokens of the vocabulary, C chunks of a row.
"""

# Triton compiles these functions; a type checker does not understand its declarations:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, BLOCKS = 4096, 8
"""Logits that a program reads at once, and how many times it does: together a chunk."""


@triton.jit
def chunks(
    logits_NV,
    row_stride,
    tokens_N,  # int64
    vocabulary,
    largest_NC,  # fp32, results: the chunk's largest logit,
    sums_NC,  # fp32: the sum of exp(logit - largest),
    reached_NC,  # int32: how many logits are at least as large as the token's
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_V = logits_NV + row * row_stride
    of_token = tl.load(logits_V + tl.load(tokens_N + row)).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    reached = 0
    for block in range(BLOCKS):
        places = (chunk * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_V + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0))
        base = tl.where(largest == float("-inf"), 0.0, largest)  # of a chunk whose tokens are all excluded
        total = total * tl.exp(before - base) + tl.sum(tl.exp(logits - base), axis=0)
        reached += tl.sum((logits >= of_token).to(tl.int32), axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(largest_NC + place, largest)
    tl.store(sums_NC + place, total)
    tl.store(reached_NC + place, reached)


@triton.jit
def joined(
    logits_NV,
    row_stride,
    tokens_N,
    largest_NC,
    sums_NC,
    reached_NC,
    count,  # C
    logprobs_N,  # fp32, results
    ranks_N,  # int64
    C: tl.constexpr,  # `count`, as a power of two
):
    row = tl.program_id(0).to(tl.int64)
    of_token = tl.load(logits_NV + row * row_stride + tl.load(tokens_N + row)).to(tl.float32)
    chunk = tl.arange(0, C)
    inside, places = chunk < count, row * count + chunk
    largest_C = tl.load(largest_NC + places, mask=inside, other=float("-inf"))
    sums_C = tl.load(sums_NC + places, mask=inside, other=0.0)
    reached_C = tl.load(reached_NC + places, mask=inside, other=0)
    largest = tl.max(largest_C, axis=0)
    total = tl.sum(sums_C * tl.exp(largest_C - largest), axis=0)
    tl.store(logprobs_N + row, of_token - largest - tl.log(total))
    tl.store(ranks_N + row, tl.sum(reached_C, axis=0).to(tl.int64))


def logprobs_and_ranks(logits_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's logprob (fp32) and its rank (int64; 1 is the likeliest), both [N].

    Args:
        logits_NV: of any floating dtype; -inf excludes a token.
        tokens_N: int64.
    """
    rows, vocabulary = logits_NV.shape
    count = triton.cdiv(vocabulary, BLOCK * BLOCKS)
    largest_NC, sums_NC = (logits_NV.new_empty((rows, count), dtype=torch.float32) for _ in range(2))
    reached_NC = logits_NV.new_empty((rows, count), dtype=torch.int32)
    logprobs_N = logits_NV.new_empty(rows, dtype=torch.float32)
    ranks_N = logits_NV.new_empty(rows, dtype=torch.int64)
    parts, stride = (largest_NC, sums_NC, reached_NC), logits_NV.stride(0)
    chunks[(rows, count)](logits_NV, stride, tokens_N, vocabulary, *parts, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)
    padded = triton.next_power_of_2(count)
    joined[(rows,)](logits_NV, stride, tokens_N, *parts, count, logprobs_N, ranks_N, C=padded, num_warps=1)
    return logprobs_N, ranks_N
