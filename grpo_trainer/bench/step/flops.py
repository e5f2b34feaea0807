"""Floating-point operations of a step: the model's own arithmetic, without recomputation."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_trainer.bench.sync.shapes import Shape


def step_flops(shape: Shape, lengths: Iterable[tuple[int, int]], lora_r: int, *, readers: int = 1) -> float:
    """A product with a matrix of n elements is 2n operations a token forward; as many backward for the gradient of its
    input, and as many for its own unless it is frozen.

    * layers: 6 n for each token, 4 n if frozen (LoRA), and 6 n of the adapter;
    * head: the same, for trained tokens only, and its own is frozen with LoRA;
    * attention: 2 products of heads x head size for each pair of tokens that sees one another, t (t + 1) / 2 of t
      tokens, forward, and twice that backward.

    Args:
        lengths: tokens of each sequence's prompt and completion.
        readers: sequences that have one prompt, computed once for all of them.
    """
    kv = shape.kv_heads * shape.head_dim
    layer = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * kv + 3 * shape.hidden * shape.intermediate
    factor = 4 if lora_r else 6
    adapter = shape.adapter_parameters(lora_r) if lora_r else 0
    total = 0.0
    for prompt, completion in lengths:
        tokens = prompt / readers + completion
        pairs = prompt * (prompt + 1) / 2 / readers + completion * (prompt + (completion + 1) / 2)
        total += tokens * (factor * layer * shape.layers + 6 * adapter)
        total += completion * factor * shape.hidden * shape.vocab
        total += 3 * 4 * pairs * shape.hidden * shape.layers
    return total
