"""Copies out of a flat buffer that vLLM's own code makes once: recorded, then repeated in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_server.worker.packed import Layout


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
    """Records every copy out of a buffer while it is active.

    Attributes:
        edited: something else was computed in the place of a copy afterwards, so the copies alone do not repeat it.
    """

    def __init__(self, buffer_E: Tensor) -> None:
        super().__init__()
        self._storage = buffer_E.untyped_storage().data_ptr()
        self._start = buffer_E.storage_offset()
        self.copies: list[tuple[Tensor, Piece]] = []
        self.edited = False
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
