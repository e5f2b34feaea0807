"""A group of a trainer (rank 0) and a server's workers, for both sides: NCCL between GPUs, Gloo between main memories.

torch's default group holds the processes of one program, and vLLM has one already. A Gloo group is made from its own
store, an NCCL one from a unique id (`nccl`). Needs torch.
"""

from __future__ import annotations

import socket
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from vllm_server.protocol.channels import GroupSpec
from vllm_server.protocol.nccl import Communicator, GroupError, unique_id

JOIN_SECONDS = 30.0
BROADCAST_SECONDS = 60.0
"""Time limit of a broadcast by Gloo: then a partner is presumed dead."""
PIECE_BYTES = 64 << 20
"""Largest broadcast by Gloo, so that one operation takes far less than its time limit."""


def address_towards(host: str, port: int) -> str:
    """Return the address under which a peer reaches this process: of the interface that leads there."""
    with socket.create_connection((host, port), timeout=JOIN_SECONDS) as there:
        return str(there.getsockname()[0])


def meeting(backend: Literal["nccl", "gloo"], world_size: int, host: str) -> tuple[GroupSpec, TCPStore | None]:
    """Return how the ranks meet, and the store at which they do, on a free port of `host`. Only rank 0 calls this.

    Raises:
        NcclError: this process has no NCCL.
    """
    if backend == "nccl":
        return GroupSpec(backend=backend, meet=b64encode(unique_id()).decode(), world_size=world_size), None
    limit = timedelta(seconds=JOIN_SECONDS)
    store = TCPStore(host, 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)
    return GroupSpec(backend=backend, meet=f"{host}:{store.port}", world_size=world_size), store


class Group:
    """One rank of a group; all ranks are created together.

    Args:
        device: of the tensors of an NCCL group, whose current stream connects the ranks.
        store: of rank 0 of a Gloo group.
        seconds: time limit of a broadcast by Gloo.
        abandoned: called while an NCCL group is made; raises if the others are known not to come.

    Raises:
        GroupError: the ranks did not meet in time.
        RuntimeError: Gloo can't be used here.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        device: torch.device,
        store: TCPStore | None = None,
        seconds: float = BROADCAST_SECONDS,
        abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = spec.backend
        self._nccl: Communicator | None = None
        self._gloo: Any = None
        if spec.backend == "nccl":
            self._nccl = Communicator(b64decode(spec.meet), rank, spec.world_size, abandoned)
            # The first broadcast connects the ranks, and takes longest.
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
            self._nccl.wait(torch.cuda.current_stream(device).query, abandoned)
            return
        host, _, port = spec.meet.rpartition(":")
        own, limit = host if store is not None else address_towards(host, int(port)), timedelta(seconds=JOIN_SECONDS)
        self._store = store or TCPStore(host, int(port), spec.world_size, is_master=False, timeout=limit)
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._devices = [gloo.create_device(hostname=own)]
        settings._timeout = timedelta(seconds=seconds)
        self._gloo = gloo(self._store, rank, spec.world_size, settings)

    def broadcast(self, data: Tensor) -> None:
        """Send rank 0's data to all ranks, in place. By NCCL this is only enqueued on the current stream: see `wait`.

        Args:
            data: on a GPU for NCCL, in main memory for Gloo.

        Raises:
            GroupError: a rank has ended, or did not come in time. The group is unusable then.
        """
        if self._nccl is not None:
            stream = torch.cuda.current_stream(data.device)
            self._nccl.broadcast(data.data_ptr(), data.nbytes, root=0, stream=stream.cuda_stream)
            return
        root: Any = dist.BroadcastOptions()
        root.rootRank = 0
        try:
            for piece in data.view(torch.uint8).split(PIECE_BYTES):
                self._gloo.broadcast([piece], root).wait()
        except RuntimeError as error:
            raise GroupError(field="Gloo broadcast", got=str(error).strip().partition("\n")[0]) from error

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` (a stream's or an event's query) reports that what NCCL was given has finished.

        Raises:
            GroupError: it did not finish in time, or a rank failed.
        """
        if self._nccl is not None:
            self._nccl.wait(done)

    def abort(self) -> None:
        """Leave without the others, whose broadcasts then fail. Any thread may call this."""
        if self._nccl is not None:
            self._nccl.abort()
