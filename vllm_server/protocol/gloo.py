"""A group of a trainer and a server's workers over the network, for both sides; its tensors are in main memory.

torch's default group holds the processes of one program, and vLLM has one already. This is another group, made from
its own store. An operation whose partner has died, or does not come in time, is a `RuntimeError`.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

JOIN_SECONDS = 30.0
BROADCAST_SECONDS = 60.0
"""Time limit of a broadcast: then a partner is presumed dead."""
PIECE_BYTES = 64 << 20
"""Largest broadcast, so that one operation takes far less than its time limit."""


def address_towards(host: str, port: int) -> str:
    """Return the address under which a peer reaches this process: of the interface that leads there."""
    with socket.create_connection((host, port), timeout=JOIN_SECONDS) as there:
        return str(there.getsockname()[0])


def make_store(host: str, world_size: int) -> TCPStore:
    """Return a store at which the ranks meet, on a free port of this process. Only rank 0 makes one."""
    limit = timedelta(seconds=JOIN_SECONDS)
    return TCPStore(host, 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)


class GlooGroup:
    """One rank of the group.

    Args:
        store: the store of rank 0, or None to connect to it at `host` and `port`.

    Raises:
        RuntimeError: the ranks did not meet in time.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, store: TCPStore | None = None) -> None:
        limit = timedelta(seconds=JOIN_SECONDS)
        own = host if store is not None else address_towards(host, port)
        self._store = store or TCPStore(host, port, world_size, is_master=False, timeout=limit)
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._devices = [gloo.create_device(hostname=own)]
        settings._timeout = timedelta(seconds=BROADCAST_SECONDS)
        self._group: Any = gloo(self._store, rank, world_size, settings)
        self._root: Any = dist.BroadcastOptions()
        self._root.rootRank = 0

    def broadcast(self, bytes_B: Tensor) -> None:
        """Send rank 0's bytes to all ranks, in place.

        Raises:
            RuntimeError: a rank has ended, or did not come in time. The group is unusable then.
        """
        for piece in bytes_B.split(PIECE_BYTES):
            self._group.broadcast([piece], self._root).wait()
