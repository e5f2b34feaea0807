"""Transports `disk` and `memory`: the worker reads a safetensors file, on a disk or in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_server.protocol.flat import read_header
from vllm_server.worker.packed import Layout, PackedAdapter, layout_of


class FileReader:
    """Reads files of one layout into the same memory, one after the other.

    A file is read in one piece into pinned memory and copied from there to the GPU: mapping it costs more, in page
    faults.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[bytes, str] | None = None
        self._layout: Layout | None = None
        self._host_E = torch.empty(0)
        self._device_E = self._host_E

    def read(self, path: Path, settings: str) -> PackedAdapter:
        """Return the file's adapter, which is valid until the next read.

        Raises:
            ValueError: the file is damaged; the message says how.
        """
        with path.open("rb") as stream:
            layout = self._layout_of(read_header(stream), settings)
            target = self._host_E.view(torch.uint8).numpy().data
            if (got := stream.readinto(target)) != len(target):
                raise ValueError(f"a file that ends early ({got} of {len(target)} bytes)")
        if self._device_E is not self._host_E:
            self._device_E.copy_(self._host_E, non_blocking=True)
        return PackedAdapter(layout, self._device_E, lasting=True)

    def _layout_of(self, header: bytes, settings: str) -> Layout:
        if self._layout is None or self._known != (header, settings):
            layout = layout_of(header, settings)
            on_gpu = self._device.type == "cuda"
            self._host_E = torch.empty(layout.numel, dtype=layout.dtype, pin_memory=on_gpu)
            self._device_E: Tensor = torch.empty_like(self._host_E, device=self._device) if on_gpu else self._host_E
            self._layout, self._known = layout, (header, settings)
        return self._layout
