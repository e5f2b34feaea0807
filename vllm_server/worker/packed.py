"""An adapter's tensors in the worker: one flat buffer, and each tensor's place in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from vllm_server.protocol.flat import decode_header

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Place:
    """A tensor's place, in elements from the start of the buffer."""

    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Names, places, and one dtype; `key` is equal for equal layouts with equal settings of the adapter."""

    key: str
    dtype: torch.dtype
    places: Mapping[str, Place]

    @property
    def numel(self) -> int:
        return max(place.end for place in self.places.values())


@dataclass(frozen=True)
class PackedAdapter:
    """A layout and the buffer that has its elements.

    Attributes:
        buffer_E: all elements, in the layout's dtype, on the receiving device.
        lasting: the next adapter of this layout arrives in the same buffer, so views of it can be reused.
    """

    layout: Layout
    buffer_E: Tensor
    lasting: bool = False

    def tensors(self, buffer_E: Tensor | None = None) -> dict[str, Tensor]:
        """Return views by name, of this buffer or of another one with the same layout."""
        buffer_E = self.buffer_E if buffer_E is None else buffer_E
        return {name: buffer_E[p.offset : p.end].view(p.shape) for name, p in self.layout.places.items()}


def layout_of(header: bytes, settings: str) -> Layout:
    """Return the layout that a header describes.

    Args:
        header: length and header of a safetensors file.
        settings: further settings that the engine's use of the tensors depends on (rank, alpha, …), as text.

    Raises:
        ValueError: a tensor's dtype is not a float, or the dtypes differ.
    """
    parsed = decode_header(header)
    dtypes = {span.dtype for span in parsed.spans}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise ValueError(
            f"tensors of {', '.join(sorted(dtypes)) or 'no dtype'}, wanted all of one of {', '.join(DTYPES)}"
        )
    dtype = DTYPES[dtypes.pop()]
    places = {span.name: Place(span.start // dtype.itemsize, span.shape) for span in parsed.spans}
    return Layout(f"{hash(bytes(header[: parsed.size]))}:{settings}", dtype, places)


def cast(adapter: PackedAdapter, dtype: torch.dtype) -> PackedAdapter:
    """Return the same adapter in another dtype."""
    if adapter.layout.dtype == dtype:
        return adapter
    layout = Layout(f"{adapter.layout.key}:{dtype}", dtype, adapter.layout.places)
    return PackedAdapter(layout, adapter.buffer_E.to(dtype))  # a new buffer each time, so not lasting
