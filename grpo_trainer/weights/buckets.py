"""All weights in the form that is sent to a server: under a checkpoint's names, grouped in buckets.

A bucket is the data of a safetensors file. transformers renames some tensors when it loads them and fuses others (the
experts of a mixture); the server expects a checkpoint's own names and shapes, so both are undone here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from grpo_trainer.model.export import plan_shards
from grpo_trainer.weights.packed import DTYPE_NAMES
from vllm_server.protocol.flat import TensorSpan, encode_header, lay_out

BUCKET_BYTES = 256 << 20
"""Size of a bucket, unless a single tensor is larger."""


class Buckets:
    """The layout of a model's weights, and one buffer in main memory that holds a bucket at a time.

    Args:
        model: its class knows the names of checkpoints.
        stored: the weights by the model's names (`export.stored_tensors`); only names and shapes are used.
        dtype: dtype in which they are sent, the server's.

    Attributes:
        headers: length and header of a safetensors file, for each bucket.
        nbytes: bytes of all buckets' data.
        names: names of `stored`, by bucket.
    """

    def __init__(
        self, model: PreTrainedModel, stored: Mapping[str, Tensor], dtype: torch.dtype, limit: int | None = None
    ) -> None:
        self._model = model
        sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in stored.items()}
        self.names = plan_shards(sizes, limit or BUCKET_BYTES)
        self._spans: list[tuple[TensorSpan, ...]] = []
        for names in self.names:
            shapes = [
                (final, tuple(part.shape))
                for name in names
                for final, part in self.plain(name, torch.empty(stored[name].shape, device="meta")).items()
            ]
            self._spans.append(lay_out(shapes, DTYPE_NAMES[dtype]))
        self.headers = [encode_header(spans, {"format": "pt"}) for spans in self._spans]
        ends = [spans[-1].end for spans in self._spans]
        self.nbytes = sum(ends)
        self._dtype = dtype
        self._ends = [end // dtype.itemsize for end in ends]

    @cached_property
    def _buffer_E(self) -> Tensor:
        return torch.empty(max(self._ends), dtype=self._dtype)

    def __len__(self) -> int:
        return len(self.names)

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor as a checkpoint has it: perhaps under another name, or in several parts."""
        return revert_weight_conversion(self._model, {name: tensor})

    @torch.no_grad()
    def pack(self, number: int, stored: Mapping[str, Tensor]) -> Tensor:
        """Return a bucket's present data; it is valid until the next call.

        Args:
            stored: the weights, on any device and in any dtype.
        """
        spans = iter(self._spans[number])
        item = self._buffer_E.element_size()
        for name in self.names[number]:
            for final, part in self.plain(name, stored[name].detach()).items():
                span = next(spans)
                assert span.name == final and span.shape == tuple(part.shape), (span, final)
                self._buffer_E[span.start // item : span.end // item].view(span.shape).copy_(part)
        return self._buffer_E[: self._ends[number]]
