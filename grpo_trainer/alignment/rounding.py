"""What computing in 8 bits does to the trainer's own logprobs: a server with fp8 weights is off by about as much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LARGEST = torch.finfo(torch.float8_e4m3fn).max


@contextmanager
def computed_in_fp8(model: nn.Module) -> Iterator[None]:
    """Compute the model's linear layers in fp8 within the block, as vLLM does with `--quantization fp8`.

    Weights have one scale a matrix, activations one a token; head and adapters stay as they are. No second copy of the
    weights is kept: each pass rounds them again.
    """

    def hook(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        x_BTI, weight_OI = args[0], layer.weight
        scale_BT1 = x_BTI.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x_BTI.dtype).tiny) / LARGEST
        return functional.linear(
            _rounded(x_BTI, scale_BT1), _rounded(weight_OI, weight_OI.abs().max() / LARGEST), layer.bias
        )

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer is not head and "lora_" not in name:
                stack.callback(layer.register_forward_hook(hook).remove)
        yield


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
