"""What computing in 8 bits does to the trainer's own logprobs: a server with fp8 weights is off by about as much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_trainer.model.load import weights_of

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12
"""So that a matrix or a token of zeros is not divided by zero."""


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
        rounded_OI = rounded(weight_OI, weight_OI.abs().max()).to(x_BTI.dtype)
        rounded_BTI = rounded(x_BTI, x_BTI.abs().amax(-1, keepdim=True)).to(x_BTI.dtype)
        return functional.linear(rounded_BTI, rounded_OI, layer.bias)

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer is not head and "lora_" not in name:
                stack.callback(layer.register_forward_hook(hook).remove)
        yield


def rounded(x: Tensor, largest: Tensor) -> Tensor:
    """Return a tensor, rounded to fp8 (e4m3) with the scale that makes `largest` the greatest fp8 number, in fp32."""
    scale = (largest.float() / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
