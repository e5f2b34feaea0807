"""Routed experts: those that the server chose for each token of a sequence, in each layer of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_common.errors import UserError
from vllm_server.protocol.routed_experts import RoutedShape, unpack


class ExpertsError(UserError, ValueError):
    """Bytes that are no routed experts."""


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts of a sequence's first T tokens; later ones have none.

    Attributes:
        shape: the model's layers, experts of a token in each, and experts in all.
        ids_TLK: ids of experts, unsigned, of 8 or 16 bits.
    """

    shape: RoutedShape
    ids_TLK: NDArray[np.unsignedinteger]


def decode(data: bytes) -> RoutedExperts:
    """Return the experts from bytes (the format: `vllm_server.protocol.routed_experts`).

    Raises:
        ExpertsError: the bytes are no routed experts.
    """
    try:
        shape, rows = unpack(data)
    except ValueError as error:
        raise _broken(str(error), "a header and whole rows") from None
    ids = np.frombuffer(rows, "<u1" if shape.id_bytes == 1 else "<u2")
    if ids.size and ids.max() >= shape.experts:
        raise _broken(f"expert {ids.max()}", f"less than {shape.experts}")
    return RoutedExperts(shape, ids.reshape(-1, shape.layers, shape.top_k))


def _broken(got: str, wanted: str) -> ExpertsError:
    return ExpertsError(field="routed_experts", got=got, wanted=wanted, fix="send those of grpo serve as they are")
