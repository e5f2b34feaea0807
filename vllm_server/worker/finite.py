"""Nothing that is not finite is served: adapters that are refused, logits that are marked, KV blocks that are cleaned.

NaN spreads: its product with 0 is NaN, too. From a slot it reaches tokens of other adapters, which our kernels multiply
by 0 there. From a KV block it reaches the next request that has the block: on a CPU, attention multiplies what lies
behind a sequence's end by 0 instead of leaving it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_server import compat
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
    """What an adapter's product is multiplied by, from its adapter_config.json."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_finite(adapter: PackedAdapter, scaling: float) -> None:
    """Refuse what is not finite, or is not once it is multiplied by `scaling`, in the dtype of the buffer.

    One reduction over the whole buffer. The host waits for its result, so nothing is written before.

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


def mark_logits() -> None:
    """Before a model is loaded: have each row of logits without a finite maximum contain NaN, which vLLM counts.

    Raises:
        FatalError: this vLLM makes logits elsewhere.
    """
    name = "LogitsProcessor"
    processor = getattr(compat.seam(("vllm.model_executor.layers.logits_processor",), name), name)
    vllms: Callable[..., Tensor | None] = processor.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        logits = vllms(self, *args, **kwargs)
        return logits if logits is None else marked(logits)

    processor.forward = forward
    runner = compat.seam(("vllm.v1.worker.gpu_model_runner",))
    if hasattr(runner, "count_nans_per_row"):  # which makes a mask of all logits, and adds it up
        vars(runner)["count_nans_per_row"] = rows_with_nan


def marked(logits_NV: Tensor) -> Tensor:
    """The same tensor; the first logit of a row is NaN where the row has NaN, +inf, or -inf alone.

    Counted before sampling: what a request's own sampling parameters do to its logits is no fault of the weights.
    """
    largest_N = logits_NV.amax(-1)
    logits_NV[..., 0] += largest_N - largest_N  # 0 of a finite number, else NaN
    return logits_NV


def rows_with_nan(logits_NV: Tensor) -> Tensor:
    """1 for each row that has NaN, else 0; int32, on the device."""
    return logits_NV.amax(-1).isnan().to(torch.int32)


def zero_new_blocks() -> None:
    """Have vLLM zero each KV block before a request gets it, as it does for some models; in each process of the engine.

    Raises:
        FatalError: this vLLM has no such switch.
    """
    config = compat.seam(("vllm.v1.kv_cache_interface",), "KVCacheConfig").KVCacheConfig
    if not isinstance(getattr(config, "needs_kv_cache_zeroing", None), property):
        raise compat.moved("KVCacheConfig.needs_kv_cache_zeroing")
    config.needs_kv_cache_zeroing = property(lambda _: True)
