"""The adapter in the form that is sent to the server: all tensors in one flat buffer, as in a safetensors file."""

from __future__ import annotations

import json

import torch
from peft import PeftModel
from torch import Tensor

from grpo_trainer.engine.allocator import shareable
from grpo_trainer.model.lora import adapter_settings, adapter_state
from vllm_server.protocol.flat import encode_header, lay_out

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class PackedAdapter:
    """One persistent buffer on the model's device, refilled for each publish.

    Args:
        model: `pack` reads its adapter's parameters in place, so they must stay the same tensors; optimizers keep them.
        dtype: dtype of the buffer, in which the server holds adapters.

    Attributes:
        settings: contents of adapter_config.json.
        header: length and header of a safetensors file whose data are the buffer's bytes.
        buffer_E: all elements of all tensors.
    """

    def __init__(self, model: PeftModel, dtype: torch.dtype) -> None:
        state = adapter_state(model)
        spans = lay_out([(name, tuple(tensor.shape)) for name, tensor in state.items()], DTYPE_NAMES[dtype])
        self.settings = adapter_settings(model)
        self.header = encode_header(spans, {"format": "pt", "adapter_config": json.dumps(self.settings)})
        device = next(iter(state.values())).device
        with shareable():
            self.buffer_E = torch.empty(spans[-1].end // dtype.itemsize, dtype=dtype, device=device)
        self._sources = [tensor.detach() for tensor in state.values()]
        self._targets = [
            self.buffer_E[span.start // dtype.itemsize : span.end // dtype.itemsize].view(span.shape) for span in spans
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of data, without the header."""
        return self.buffer_E.numel() * self.buffer_E.element_size()

    def pack(self) -> Tensor:
        """Copy the adapter's present values into the buffer, on the current stream, and return it."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore[reportPrivateImportUsage]
        return self.buffer_E


class HostCopy:
    """The packed adapter in main memory with its header: the bytes of a safetensors file."""

    def __init__(self, packed: PackedAdapter) -> None:
        self._packed = packed
        on_gpu = packed.buffer_E.is_cuda
        self._file_B = torch.empty(len(packed.header) + packed.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._file_B[: len(packed.header)] = torch.frombuffer(bytearray(packed.header), dtype=torch.uint8)
        self._data_B = self._file_B[len(packed.header) :]

    def take(self) -> memoryview:
        """Return the file's bytes with the adapter's present values; they are valid until the next call."""
        self._data_B.copy_(self._packed.pack().view(torch.uint8))
        return self._file_B.numpy().data
