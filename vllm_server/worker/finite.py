"""Serve only finite values: refuse adapters, mark logits, and clean KV blocks.

NaN spreads, because NaN times 0 is NaN. From a slot it would reach tokens of other adapters: our kernels multiply them
by 0 there. From a KV block it would reach the next request that gets the block: on a CPU, attention multiplies the
entries behind a sequence's end by 0 instead of skipping them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_server import seams
from vllm_server.worker.packed import PackedAdapter

_COUNTERS = {
    "vllm.v1.worker.gpu_model_runner": "count_nans_per_row",
    "vllm.v1.worker.gpu.sample.sampler": "get_num_nans",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": "get_num_nans",
}
"""vLLM's functions that count NaN, by the module that calls them: of its older model runner, then of the newer one."""
COUNTED = "rows_not_finite"
"""Attribute of a tensor of logits: what `rows_with_nan` returns for it."""


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


def mark_logits() -> None:
    """Put NaN into each row of logits whose maximum is not finite, which vLLM counts. Call before a model is loaded.

    Raises:
        FatalError: this vLLM computes logits elsewhere.
    """
    processor = seams.found("vllm.model_executor.layers.logits_processor", "LogitsProcessor")
    vllms: Callable[..., Tensor | None] = processor.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        logits = vllms(self, *args, **kwargs)
        return logits if logits is None else marked(logits)

    processor.forward = forward
    for name, counts in _COUNTERS.items():  # vLLM's own read all logits once more, and one makes a mask of them
        try:
            module = seams.seam((name,))
        except ImportError:  # it has Triton's kernels, which a CPU has not
            continue
        if hasattr(module, counts):
            vars(module)[counts] = rows_with_nan


def marked(logits_NV: Tensor) -> Tensor:
    """Set a row's first logit to NaN if the row has NaN, +inf, or only -inf; return the same tensor, with the count.

    vLLM counts after sampling, which edits fp32 logits in place: a request's own parameters may then have made a sound
    row infinite, or hidden the mark of another. So the count is taken here, and travels with the tensor.
    """
    largest_N = logits_NV.amax(-1)
    mark_N = largest_N - largest_N  # 0 if the maximum is finite, else NaN, without a wait for the GPU
    logits_NV[..., 0] += mark_N
    setattr(logits_NV, COUNTED, mark_N.isnan().to(torch.int32))
    return logits_NV


def rows_with_nan(logits_NV: Tensor) -> Tensor:
    """Return 1 for each row that the forward pass left without finite logits, else 0; int32, on the device."""
    counted_N = getattr(logits_NV, COUNTED, None)
    return logits_NV.amax(-1).isnan().to(torch.int32) if counted_N is None else counted_N


def zero_new_blocks() -> None:
    """Have vLLM zero each KV block before a request gets it, as it does for some models.

    Call this in each process of the engine.

    Raises:
        FatalError: this vLLM has no such switch.
    """
    config = seams.found("vllm.v1.kv_cache_interface", "KVCacheConfig")
    if not isinstance(getattr(config, "needs_kv_cache_zeroing", None), property):
        raise seams.moved("KVCacheConfig.needs_kv_cache_zeroing")
    config.needs_kv_cache_zeroing = property(lambda _: True)
