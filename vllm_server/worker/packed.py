"""Tensors in one flat buffer, of an adapter or of a bucket of weights: layout, check, recorded copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    """A layout and the buffer that has its elements, in the layout's dtype, on the receiving device."""

    layout: Layout
    buffer_E: Tensor
    lasting: bool = False  # the next adapter of this layout arrives in the same buffer: views of it can be reused

    def tensors(self, buffer_E: Tensor | None = None) -> dict[str, Tensor]:
        """Return views by name, of this buffer or of another one with the same layout."""
        buffer_E = self.buffer_E if buffer_E is None else buffer_E
        return {name: buffer_E[p.offset : p.end].view(p.shape) for name, p in self.layout.places.items()}


def layout_of(header: bytes, settings: str) -> Layout:
    """Return the layout that the header of a safetensors file describes.

    `settings` is text: what else the engine's use of the tensors depends on (rank, alpha, …). Raise a ValueError if a
    dtype is not a float, or the dtypes differ.
    """
    parsed = decode_header(header)
    dtypes = {span.dtype for span in parsed.spans}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        found = ", ".join(sorted(dtypes)) or "no dtype"
        raise ValueError(f"tensors of {found}, wanted all of one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtypes.pop()]
    places = {span.name: Place(span.start // dtype.itemsize, span.shape) for span in parsed.spans}
    return Layout(f"{hash(bytes(header[: parsed.size]))}:{settings}", dtype, places)


def cast(adapter: PackedAdapter, dtype: torch.dtype) -> PackedAdapter:
    """Return the same adapter in another dtype."""
    if adapter.layout.dtype == dtype:
        return adapter
    layout = Layout(f"{adapter.layout.key}:{dtype}", dtype, adapter.layout.places)
    return PackedAdapter(layout, adapter.buffer_E.to(dtype))  # a new buffer each time, so not lasting


# ----------------------------------------------------------------------------------------------------------------------
# Refuse adapters and weights that are not finite before they are written.
#
# NaN spreads, because NaN times 0 is NaN: from a slot it would reach tokens of other adapters, since our kernels
# multiply them by 0 there.


class NotFiniteError(ValueError):
    """An adapter is not finite in the served dtype: the value `got` of `field`, a tensor's name or `lora_alpha`."""

    def __init__(self, field: str, got: str) -> None:
        super().__init__(f"{field}: {got}")
        self.field = field
        self.got = got


def scaling_of(config: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's product, from its adapter_config.json."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_finite(adapter: PackedAdapter, scaling: float) -> None:
    """Raise a NotFiniteError if a value is not finite in the buffer's dtype, before or after it is scaled.

    The check is one reduction over the whole buffer. The host waits for its result, so nothing is written before.
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


# ----------------------------------------------------------------------------------------------------------------------
# Copies out of a flat buffer that vLLM's own code makes once: recorded, then repeated in one call.


@dataclass(frozen=True)
class Piece:
    """A piece of a packed buffer: offset in elements, size and stride as in `torch.as_strided`."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, buffer_E: Tensor) -> Tensor:
        return torch.as_strided(buffer_E, self.size, self.stride, buffer_E.storage_offset() + self.offset)


@dataclass
class CopyPlan:
    """Copies to repeat, and targets to multiply afterwards: those of an adapter's B, by its scaling."""

    targets: list[Tensor]
    sources: list[Piece]
    scaled: list[Tensor] = field(default_factory=list)
    scaling: float = 1.0
    _bound: tuple[int, list[Tensor]] | None = field(default=None, repr=False)

    def run(self, buffer_E: Tensor, *, lasting: bool) -> None:
        torch._foreach_copy_(self.targets, self._pieces(buffer_E, lasting=lasting), non_blocking=True)  # pyright: ignore
        if self.scaling != 1.0:
            torch._foreach_mul_(self.scaled, self.scaling)  # pyright: ignore

    def _pieces(self, buffer_E: Tensor, *, lasting: bool) -> list[Tensor]:
        """Return views of the sources. Views of a lasting buffer are cached, because creating hundreds is slow."""
        if self._bound is not None and self._bound[0] == buffer_E.data_ptr():
            return self._bound[1]  # its views keep the memory allocated: no other buffer has its address
        pieces = [source.of(buffer_E) for source in self.sources]
        self._bound = (buffer_E.data_ptr(), pieces) if lasting else None
        return pieces

    def forget_views(self) -> None:
        """Drop cached views, so that the buffer can be freed."""
        self._bound = None


class CopyRecorder(TorchDispatchMode):
    """Records every copy out of a buffer while it is active."""

    def __init__(self, buffer_E: Tensor) -> None:
        super().__init__()
        self._storage = buffer_E.untyped_storage().data_ptr()
        self._start = buffer_E.storage_offset()
        self.copies: list[tuple[Tensor, Piece]] = []
        self.edited = False
        """Something else was computed in the place of a copy afterwards, so the copies alone do not repeat it."""
        self._written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self._storage:
            target, source = args[0], args[1]
            offset = source.storage_offset() - self._start
            self.copies.append((target, Piece(offset, tuple(source.shape), source.stride())))
            self._written.add(target.data_ptr())
        elif func._schema.is_mutable and isinstance(args[0], Tensor):
            self.edited |= args[0].data_ptr() in self._written
        return func(*args, **(kwargs or {}))


def owners(copies: list[tuple[Tensor, Piece]], layout: Layout) -> list[str] | None:
    """Return the name of the tensor that each copy reads, or None if the copies do not cover all tensors.

    Where vLLM creates new tensors (it joins the shards of a fused layer, or stacks experts), it does not copy from the
    buffer, and only vLLM's own code can write.
    """
    places = sorted((place.offset, place.end, name) for name, place in layout.places.items())
    starts = torch.tensor([start for start, _, _ in places])
    found = []
    for _, source in copies:
        _, end, name = places[int(torch.searchsorted(starts, source.offset, right=True)) - 1]
        if source.offset >= end:
            return None
        found.append(name)
    return found if set(found) == set(layout.places) else None


# ----------------------------------------------------------------------------------------------------------------------
# Writing beside the forward passes.


def stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new CUDA stream; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def writing_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Write on a stream, concurrently with forward passes that do not read the target; on a CPU write at once.

    The writes are complete when the block ends.
    """
    if stream is None:
        with torch.no_grad():
            yield
        return
    with torch.no_grad(), torch.cuda.stream(stream):
        yield
        stream.synchronize()
