"""A LoRA linear module's forward pass with few kernels, in the base model's dtype.

PEFT's own forward pass casts its input to the adapter's fp32, multiplies in fp32, and needs three passes over the
output to add the result. Here the small matrices are cast instead: `x W + (x A) (s B)`, where the last product adds
into the first one's result. The server computes it like this too. The parameters remain PEFT's, and they and their
gradients stay fp32.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional

ADAPTER = "default"
"""PEFT's name for the only adapter."""


def use_few_kernels(model: nn.Module) -> int:
    """Replace the forward passes of a model's LoRA modules, and return the number of replaced ones.

    Modules in 4 bits, or of another kind than plain LoRA keep their own.
    """
    if not isinstance(model, PeftModel):
        return 0
    found = [module for module in model.modules() if type(module) is Linear and _is_plain(module)]
    for module in found:
        module.forward = types.MethodType(_forward, module)
    return len(found)


def _is_plain(module: Linear) -> bool:
    return (
        type(module.base_layer) is nn.Linear
        and list(module.lora_A) == [ADAPTER]
        and not module.lora_variant
        and module.lora_B[ADAPTER].bias is None
    )


def _forward(module: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if module.disable_adapters or module.merged or args or kwargs or torch.is_autocast_enabled(x.device.type):
        return Linear.forward(module, x, *args, **kwargs)
    down, up = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
    assert isinstance(down, Tensor) and isinstance(up, Tensor)
    result = module.base_layer(x)
    inner = functional.linear(x, down.to(x.dtype))
    scaled_up = (up * module.scaling[ADAPTER]).to(x.dtype)
    result.flatten(0, -2).addmm_(inner.flatten(0, -2), scaled_up.mT)
    return result
