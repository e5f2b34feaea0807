"""All weights in the form that is sent to a server: under a checkpoint's names, grouped in buckets.

A bucket is the data of a safetensors file. transformers renames some tensors when it loads them and fuses others (the
experts of a mixture); the server expects a checkpoint's own names and shapes, so both are undone here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.model.export import plan_shards
from grpo_trainer.model.text_part import published
from grpo_trainer.weights.packed import DTYPE_NAMES
from vllm_server.protocol.flat import TensorSpan, encode_header, lay_out

BUCKET_BYTES = 256 << 20
"""Size of a bucket, unless a single tensor is larger."""


class Buckets:
    """The layout of a model's weights in buckets.

    Args:
        model: its class knows the names of checkpoints.
        stored: the weights by the model's names (`export.stored_tensors`); only names and shapes are used.
        dtype: dtype in which they are sent, the server's.

    Attributes:
        headers: length and header of a safetensors file, for each bucket.
        nbytes: bytes of all buckets' data.
        names: names of `stored`, by bucket.
        dtype: dtype in which they are sent.
        largest: elements of the largest bucket.
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
        self.dtype = dtype
        self.largest = max(ends) // dtype.itemsize
        self._converting = threading.Lock()

    def __len__(self) -> int:
        return len(self.names)

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor as a checkpoint has it: perhaps under another name, or in several parts."""
        return published(self._model, {name: tensor})

    def parts(self, number: int, stored: Mapping[str, Tensor]) -> Iterator[tuple[TensorSpan, Tensor]]:
        """Yield a bucket's tensors with their places in its data. Several threads may do this.

        Args:
            stored: the weights, on any device and in any dtype.
        """
        spans = iter(self._spans[number])
        for name in self.names[number]:
            with self._converting:  # transformers' converters keep what they have collected
                found = self.plain(name, stored[name].detach())
            for final, part in found.items():
                span = next(spans)
                assert span.name == final and span.shape == tuple(part.shape), (span, final)
                yield span, part

    @torch.no_grad()
    def pack(self, number: int, stored: Mapping[str, Tensor], buffer_E: Tensor) -> Tensor:
        """Write a bucket's present data to a flat buffer on any device; return the part of the buffer that has it.

        Args:
            stored: the weights, on any device and in any dtype.
            buffer_E: `largest` elements of `dtype`, or more.
        """
        end = 0
        for span, part in self.parts(number, stored):
            start, end = span.start // self.dtype.itemsize, span.end // self.dtype.itemsize
            if part.device != buffer_E.device:
                part = part.to(self.dtype)  # where it is: `copy_` would cast on the CPU
            buffer_E[start:end].view(span.shape).copy_(part)
        return buffer_E[:end]
