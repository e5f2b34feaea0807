"""Refuse adapters and weights that are not finite before they are written.

NaN spreads, because NaN times 0 is NaN: from a slot it would reach tokens of other adapters, since our kernels multiply
them by 0 there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_server.worker.packed import PackedAdapter


class NotFiniteError(ValueError):
    """An adapter is not finite in the dtype in which it is served.

    Attributes:
        field: the tensor's name, or `lora_alpha`.
        got: what was found.
    """

    def __init__(self, field: str, got: str) -> None:
        super().__init__(f"{field}: {got}")
        self.field = field
        self.got = got


def scaling_of(config: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's product, from its adapter_config.json."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_finite(adapter: PackedAdapter, scaling: float) -> None:
    """Raise if a value is not finite in the buffer's dtype, before or after multiplication by `scaling`.

    The check is one reduction over the whole buffer. The host waits for its result, so nothing is written before.

    Raises:
        NotFiniteError: names the first tensor.
    """
    limit = torch.finfo(adapter.buffer_E.dtype).max
    largest = float(torch.linalg.vector_norm(adapter.buffer_E, math.inf))  # NaN if one entry is
    if largest <= limit and largest * abs(scaling) <= limit:
        return
    for name, tensor in adapter.tensors().items():
        if not bool(tensor.isfinite().all()):
            raise NotFiniteError(name, "nan" if bool(tensor.isnan().any()) else "inf")
    dtype = str(adapter.buffer_E.dtype).removeprefix("torch.")
    raise NotFiniteError("lora_alpha", f"a scale of {scaling:g}, which takes {largest:g} beyond {dtype}")
