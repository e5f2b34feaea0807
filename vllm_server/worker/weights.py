"""All weights of a version, written into a running worker's parameters.

The first version goes through vLLM's own `load_weights`, which merges q, k and v, takes this worker's shard, and puts
experts together. A recorder notes its copies. Every later version repeats them in one call for each bucket.
"""

from __future__ import annotations

import importlib
import time
from base64 import b64decode
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch import Tensor

from grpo_common.sharing import VOCABULARY_PADDING
from vllm_server.protocol import WeightsDone
from vllm_server.protocol.channels import ChannelRequest
from vllm_server.worker.channels import open_end
from vllm_server.worker.packed import (
    CopyPlan,
    CopyRecorder,
    Layout,
    PackedAdapter,
    Piece,
    check_finite,
    layout_of,
    owners,
    stream_beside,
    writing_on,
)

SPARE_BYTES = 1 << 30
"""GPU memory that staging leaves free."""

COPIES = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")
"""Parameters that latent attention computes from kv_b_proj: no checkpoint has them."""


class WeightChannel:
    """One worker's open channel of all weights.

    The parameters of vLLM's model are plain (`on_cpu.keep_weights_plain`) and have no LoRA wrappers. `shards` is as in
    `ParameterWriter`.

    Raises:
        RuntimeError: the trainer can't be reached, or there is too little memory for staging that was asked for.
        ValueError: the layout is damaged, or the trainer can't be reached.
    """

    def __init__(
        self, request: ChannelRequest, model: Any, device: torch.device, worker_rank: int, shards: int
    ) -> None:
        headers = [b64decode(header) for header in request.buckets]
        self._layouts = [layout_of(header, "") for header in headers]
        self._device = device
        self._stream = stream_beside(device)
        self._writer = ParameterWriter(model, shards)
        sizes = [layout.numel * layout.dtype.itemsize for layout in self._layouts]
        staged = request.staging == "on" or (
            request.staging == "auto"
            and (device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > sum(sizes) + SPARE_BYTES)
        )
        # Without staging one buffer has all buckets, one after the other.
        kept = self._layouts if staged else [max(self._layouts, key=lambda layout: layout.numel)]
        self._buffers = [torch.empty(layout.numel, dtype=layout.dtype, device=device) for layout in kept]
        self.staging_bytes = sum(sizes) if staged else 0  # memory set aside; 0: versions are not staged
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # kernels that are queued may still use what the buffers' memory was
        try:
            self._end = open_end(request.spec, headers, self._layouts, device, worker_rank)
        except BaseException:  # another channel may be tried, which counts the driver's free memory
            self._buffers.clear()
            torch.cuda.empty_cache()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receive weights")
        self._receiving: Future[None] | None = None
        self._version: int | None = None

    @property
    def staged(self) -> bool:
        return self.staging_bytes > 0

    def _buffer(self, number: int) -> Tensor:
        return self._buffers[number] if self.staged else self._buffers[0][: self._layouts[number].numel]

    def begin_staging(self, version: int) -> None:
        """Begin to receive a version in a thread."""
        self._version = version
        self._receiving = self._thread.submit(self._receive_all, version)

    def _receive_all(self, version: int) -> None:
        buffers = list(self._buffers)  # kept until the stream has written them, even if the channel is closed meanwhile
        with writing_on(self._stream):
            for number, buffer_E in enumerate(buffers):
                self._receive(version, number, buffer_E)

    def _receive(self, version: int, number: int, buffer_E: Tensor) -> PackedAdapter:
        """Receive a bucket, and refuse values that are not finite in the server's dtype."""
        self._end.fill(version, number, buffer_E)
        bucket = PackedAdapter(self._layouts[number], buffer_E, lasting=True)
        check_finite(bucket, 1.0)
        return bucket

    def has_staged(self) -> bool:
        """Return whether the version has arrived; raise a RuntimeError, ValueError or OSError if it never will."""
        assert self._receiving is not None, "begin_staging comes first"
        if not self._receiving.done():
            return False
        self._receiving.result()
        return True

    @torch.no_grad()
    def apply(self, version: int) -> WeightsDone:
        """Write the staged version, or receive one and write it. No forward pass may run.

        After a RuntimeError, ValueError or OSError the parameters may be torn: some new, some old.
        """
        started = time.perf_counter()
        if self.staged and not (self._receiving and self.has_staged()):
            raise RuntimeError("no version is staged")
        if self.staged and self._version != version:
            raise RuntimeError(f"version {self._version} is staged, not {version}")
        self._receiving = None
        replayed = True
        for number, layout in enumerate(self._layouts):
            if self.staged:
                bucket = PackedAdapter(layout, self._buffer(number), lasting=True)
            else:
                bucket = self._receive(version, number, self._buffer(number))
            replayed &= self._writer.write(number, bucket)
        self._writer.compute_copies()
        if not replayed:
            self._writer.check_complete()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return WeightsDone(seconds=time.perf_counter() - started, replayed=replayed)

    def close(self) -> None:
        """Free the memory. A version that is being received is given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._receiving = None  # an exception in it would keep this object, and what it maps
        self._end.close()
        self._writer.forget()
        self._buffers.clear()
        torch.cuda.empty_cache()  # the next channel counts the driver's free memory


class ParameterWriter:
    """Writes buckets into the parameters of a model, whose matrices are cut over `shards` workers."""

    def __init__(self, model: Any, shards: int) -> None:
        self._model = model
        self._shards = shards
        self._plans: dict[int, CopyPlan] = {}
        self._latent = [
            module for module in model.modules() if hasattr(module, "W_UV") and hasattr(module, "kv_b_proj")
        ]
        self._convolutions = [each for each in model.modules() if hasattr(each, "_cpu_unpacked_conv_weight")]
        copies = {id(each) for module in self._latent for name, each in module.named_parameters() if name in COPIES}
        parameters = {name: each for name, each in model.named_parameters() if id(each) not in copies}
        self._names = {parameter.untyped_storage().data_ptr(): name for name, parameter in parameters.items()}
        self._sizes = {name: _least(name, parameter) for name, parameter in parameters.items()}
        self._written: Counter[str] = Counter()
        self._computed: set[str] = set()

    def write(self, number: int, bucket: PackedAdapter) -> bool:
        """Write a bucket; return whether recorded copies did it. Raise what vLLM raises if it refuses a tensor."""
        if (plan := self._plans.get(number)) is not None:
            plan.run(bucket.buffer_E, lasting=bucket.lasting)
            return True
        with CopyRecorder(bucket.buffer_E) as recorder:
            names = self._model.load_weights(iter(bucket.tensors().items()))
        for target, _ in recorder.copies:
            self._written[self._owner(target)] += target.numel()
        if not recorder.edited and self._are_all(recorder.copies, bucket.layout):
            targets, pieces = [target for target, _ in recorder.copies], [piece for _, piece in recorder.copies]
            self._plans[number] = CopyPlan(targets, pieces)
        else:
            self._computed |= set(self._sizes) if names is None else set(names)
        return False

    def _owner(self, target: Tensor) -> str:
        """Return the parameter that a copy writes; empty: it writes a temporary tensor."""
        return self._names.get(target.untyped_storage().data_ptr(), "")

    def _are_all(self, copies: list[tuple[Tensor, Piece]], layout: Layout) -> bool:
        """Return whether the recorded copies alone write the bucket: they read this worker's shard of each tensor."""
        names = owners(copies, layout)
        if names is None or not all(self._owner(target) for target, _ in copies):
            return False
        read: Counter[str] = Counter()
        for name, (target, _) in zip(names, copies, strict=True):
            read[name] += target.numel()
        return all(read[name] * self._shards >= prod(place.shape) for name, place in layout.places.items())

    def check_complete(self) -> None:
        """Raise a ValueError that names parameters that no bucket has. Call after the last bucket."""
        missing = sorted(
            name for name, size in self._sizes.items() if self._written[name] < size and name not in self._computed
        )
        if missing:
            raise ValueError(f"no weights came for {', '.join(missing[:5])} ({len(missing)} in all)")

    def compute_copies(self) -> None:
        """Compute again, in the same memory, what vLLM made of weights when it loaded them; call after all writes.

        Latent attention keeps parts of kv_b_proj. On a CPU convolutions of recurrent layers are packed in place.
        """
        for module in self._latent:
            module.process_weights_after_loading(next(module.kv_b_proj.parameters()).dtype)
        for module in self._convolutions:
            pack = importlib.import_module("vllm._custom_ops").causal_conv1d_weight_pack
            plain = module._cpu_unpacked_conv_weight
            plain.copy_(module.weight.view_as(plain))
            module.weight.copy_(pack(plain).view_as(module.weight))

    def forget(self) -> None:
        """Drop cached views, so that buffers can be freed."""
        for plan in self._plans.values():
            plan.forget_views()


def _least(name: str, parameter: Tensor) -> int:
    """Return how many elements of a parameter a checkpoint has: all, but for the rows that pad a vocabulary."""
    is_padded = any(part in name for part in ("embed", "lm_head", "wte")) and parameter.ndim == 2
    return parameter.numel() - (VOCABULARY_PADDING * parameter.shape[1] if is_padded else 0)
