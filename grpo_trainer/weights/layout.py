"""Named tensors in the form in which they are sent: in buckets, each of which is the data of a safetensors file.

An adapter is a layout of one bucket; a model is a layout of several.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.engine.allocator import shareable
from grpo_trainer.model.export import plan_shards
from grpo_trainer.model.lora import adapter_settings, adapter_state
from grpo_trainer.model.text_part import published
from vllm_server.protocol.flat import TensorSpan, encode_header, lay_out

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BUCKET_BYTES = 256 << 20
"""Size of a bucket of a model, unless a single tensor is larger."""


class Layout:
    """Places of tensors in buckets, each a safetensors file.

    `shapes` are the names and shapes of the tensors, by bucket. They are sent in `dtype`, which is the server's.
    """

    def __init__(
        self, shapes: Sequence[Sequence[tuple[str, tuple[int, ...]]]], dtype: torch.dtype, metadata: Mapping[str, str]
    ) -> None:
        self.spans: list[tuple[TensorSpan, ...]] = [lay_out(bucket, DTYPE_NAMES[dtype]) for bucket in shapes]
        # Each begins with its length.
        self.headers = [encode_header(spans, {"format": "pt", **metadata}) for spans in self.spans]
        ends = [spans[-1].end for spans in self.spans]
        self.nbytes = sum(ends)
        self.largest = max(ends) // dtype.itemsize  # elements of the largest bucket
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.headers)


class AdapterLayout(Layout):
    """An adapter in one bucket: a persistent buffer on the model's device, filled again for each publish.

    `pack` reads the adapter's parameters in place, so they must stay the same tensors; optimizers keep them.
    """

    def __init__(self, model: PeftModel, dtype: torch.dtype) -> None:
        state = adapter_state(model)
        self.settings: dict[str, Any] = adapter_settings(model)  # contents of adapter_config.json
        shapes = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
        super().__init__([shapes], dtype, {"adapter_config": json.dumps(self.settings)})
        device = next(iter(state.values())).device
        with shareable():
            self.buffer_E = torch.empty(self.largest, dtype=dtype, device=device)
        self._sources = [tensor.detach() for tensor in state.values()]
        self._targets = [
            self.buffer_E[span.start // dtype.itemsize : span.end // dtype.itemsize].view(span.shape)
            for span in self.spans[0]
        ]

    def pack(self) -> Tensor:
        """Copy the adapter's present values into the buffer, on the current stream, and return it."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore[reportPrivateImportUsage]
        return self.buffer_E

    @cached_property
    def _file_B(self) -> Tensor:
        """Main memory for header and data: the bytes of a safetensors file."""
        header = self.headers[0]
        file_B = torch.empty(len(header) + self.nbytes, dtype=torch.uint8, pin_memory=self.buffer_E.is_cuda)
        file_B[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return file_B

    def pack_file(self) -> Tensor:
        """Return the bytes of a safetensors file with the adapter's present values; the next call overwrites them."""
        self._file_B[len(self.headers[0]) :].copy_(self.pack().view(torch.uint8))
        return self._file_B


class ModelLayout(Layout):
    """All weights in buckets, under a checkpoint's names.

    transformers renames some tensors when it loads them and fuses others (the experts of a mixture); the server expects
    a checkpoint's names and shapes, so both are undone here. Of `stored`, the weights by the model's names
    (`export.stored_tensors`), only names and shapes are used.
    """

    def __init__(
        self, model: PreTrainedModel, stored: Mapping[str, Tensor], dtype: torch.dtype, limit: int | None = None
    ) -> None:
        self._model = model
        sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in stored.items()}
        self.names = plan_shards(sizes, limit or BUCKET_BYTES)  # of `stored`, by bucket
        shapes = [
            [
                (final, tuple(part.shape))
                for name in names
                for final, part in self.plain(name, torch.empty(stored[name].shape, device="meta")).items()
            ]
            for names in self.names
        ]
        super().__init__(shapes, dtype, {})
        self._converting = threading.Lock()

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor as a checkpoint has it: perhaps under another name, or in several parts."""
        return published(self._model, {name: tensor})

    def parts(self, number: int, stored: Mapping[str, Tensor]) -> Iterator[tuple[TensorSpan, Tensor]]:
        """Yield a bucket's tensors, on any device and in any dtype, with their places. Several threads may do this."""
        spans = iter(self.spans[number])
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

        The buffer has `largest` elements of `dtype`, or more.
        """
        end = 0
        for span, part in self.parts(number, stored):
            start, end = span.start // self.dtype.itemsize, span.end // self.dtype.itemsize
            if part.device != buffer_E.device:
                part = part.to(self.dtype)  # where it is: `copy_` would cast on the CPU
            buffer_E[start:end].view(span.shape).copy_(part)
        return buffer_E[:end]
