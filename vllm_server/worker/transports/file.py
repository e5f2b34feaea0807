"""Transports `disk` and `memory`: to the worker both are a safetensors file, the one on a disk, the other in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_server.protocol.flat import read_header
from vllm_server.worker.packed import Layout, PackedAdapter, layout_of


class FileReader:
    """Reads files of one layout after the other into the same memory.

    A file goes in one piece into pinned memory and from there to the GPU: mapping it would cost more, in page faults.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[bytes, str] | None = None
        self._layout: Layout | None = None
        self._host_E = torch.empty(0)
        self._device_E = self._host_E

    def read(self, path: Path, settings: str) -> PackedAdapter:
        """What is in the file now; valid until the next read.

        Raises:
            ValueError: it is damaged; the message says in what.
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
