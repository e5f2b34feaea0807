"""A group of a trainer (rank 0) and a server's workers, for both sides: NCCL between GPUs, Gloo between main memories.

torch's default group holds the processes of one program, and vLLM has one already. A Gloo group is made from its own
store, an NCCL one from a unique id. Needs torch.
"""

from __future__ import annotations

import ctypes
import functools
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from grpo_common.errors import UserError
from vllm_server.protocol.channels import GroupSpec

# ----------------------------------------------------------------------------------------------------------------------
# The few NCCL calls that connect trainer and server.
#
# NCCL itself needs only a unique id (128 bytes, sent over HTTP) and one call on each side. The library is the one that
# torch has loaded. Communicators are non-blocking, so that a missing partner is an error and not a hang.
#
# Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html (2.18 and later).


INIT_TIMEOUT_S = 60.0
BROADCAST_TIMEOUT_S = 20.0

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1  # ncclDataType_t: ncclUint8
_POLL_S = 0.0002


class GroupError(UserError, RuntimeError):
    """A rank of a group has ended, or did not answer in time; the group is unusable."""


class NcclError(GroupError):
    """NCCL failed, or a partner did not answer in time; the communicator is unusable.

    `field` is the attempted operation: `NCCL broadcast`.
    """


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14; later libraries accept it because it carries its size and version."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Return this process's NCCL library. Raise an NcclError if there is none."""
    try:
        found = ctypes.CDLL("libnccl.so.2")  # torch has loaded it, so its name finds it in any folder
    except OSError as error:
        raise NcclError(
            field="NCCL", got=error, wanted="the library of a CUDA build of torch, which must be imported first"
        ) from error
    found.ncclGetErrorString.restype = ctypes.c_char_p
    found.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ]
    found.ncclBroadcast.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    for name in ("ncclCommAbort", "ncclCommDestroy", "ncclCommFinalize"):
        getattr(found, name).argtypes = [ctypes.c_void_p]
    found.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return found


def _check(status: int, doing: str) -> None:
    if status not in (_SUCCESS, _IN_PROGRESS):
        reason = library().ncclGetErrorString(status).decode()
        raise NcclError(field=f"NCCL {doing}", got=reason, fix="set NCCL_DEBUG=INFO to see more")


def unique_id() -> bytes:
    """Return a new communicator's id. The process that calls this must take part, as rank 0."""
    made = _UniqueId()
    _check(library().ncclGetUniqueId(ctypes.byref(made)), "unique id")
    return bytes(made.internal)


class Communicator:
    """One rank of a communicator on the current CUDA device; all ranks are created together.

    `abandoned` is called while waiting for the others; it raises if they are known not to come. An NcclError says that
    they did not answer in time.
    """

    def __init__(self, name: bytes, rank: int, size: int, abandoned: Callable[[], None] = lambda: None) -> None:
        self._handle = ctypes.c_void_p()
        self._using = threading.Lock()  # another thread may abort; the handle is not used afterwards
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, blocking=0)
        status = library().ncclCommInitRankConfig(
            ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(name), rank, ctypes.byref(config)
        )
        self._settle(status, f"rank {rank} of {size}", INIT_TIMEOUT_S, abandoned)

    def broadcast(
        self, pointer: int, nbytes: int, *, root: int, stream: int, abandoned: Callable[[], None] = lambda: None
    ) -> None:
        """Enqueue a broadcast on a CUDA stream: root's bytes are copied to `pointer` on every rank."""
        with self._using:
            self._check_there()
            status = library().ncclBroadcast(pointer, pointer, nbytes, _UINT8, root, self._handle, stream)
        self._settle(status, "broadcast", BROADCAST_TIMEOUT_S, abandoned)

    def wait(self, done: Callable[[], bool], abandoned: Callable[[], None] = lambda: None) -> None:
        """Wait until `done()` (a stream's query) reports that the enqueued work has finished.

        Raise an NcclError if it does not finish in time, or a rank fails.
        """
        self._until(done, "broadcast", BROADCAST_TIMEOUT_S, abandoned)

    def _settle(self, status: int, doing: str, limit_s: float, abandoned: Callable[[], None]) -> None:
        """Wait until NCCL has finished a call that returned `status`. A call that failed ends the communicator."""

        def settled() -> bool:
            _check(status, doing)
            return self._async_status() == _SUCCESS

        self._until(settled, doing, limit_s, abandoned)

    def _until(self, done: Callable[[], bool], doing: str, limit_s: float, abandoned: Callable[[], None]) -> None:
        deadline = time.monotonic() + limit_s
        try:
            while not done():
                abandoned()
                _check(self._async_status(), doing)
                if time.monotonic() > deadline:
                    raise NcclError(
                        "the others did not answer", field=f"NCCL {doing}", wanted=f"an answer within {limit_s:.0f} s"
                    )
                time.sleep(_POLL_S)
        except BaseException:
            self.abort()
            raise

    def _check_there(self) -> None:
        if not self._handle:
            raise NcclError("is gone after a failure", field="NCCL communicator", fix="open the channel again")

    def _async_status(self) -> int:
        status = ctypes.c_int()
        with self._using:
            self._check_there()
            _check(library().ncclCommGetAsyncError(self._handle, ctypes.byref(status)), "communicator")
        return status.value

    def abort(self) -> None:
        """Leave without the others, which may have exited: kernels that wait for them return. For any thread."""
        with self._using:
            if self._handle:
                handle, self._handle = self._handle, ctypes.c_void_p()
                library().ncclCommAbort(handle)


# ----------------------------------------------------------------------------------------------------------------------
# One rank of a group.


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

    Raise an NcclError if this process has no NCCL, a GroupError if the store can't be made.
    """
    if backend == "nccl":
        return GroupSpec(backend=backend, meet=b64encode(unique_id()).decode(), world_size=world_size), None
    store = _store(host, 0, world_size, is_master=True)
    return GroupSpec(backend=backend, meet=f"{host}:{store.port}", world_size=world_size), store


def _store(host: str, port: int, world_size: int, *, is_master: bool) -> TCPStore:
    """Return a store, or raise a GroupError: torch also looks up the name of an address, beyond its time limit."""
    limit, began = timedelta(seconds=JOIN_SECONDS), time.monotonic()
    try:
        return TCPStore(host, port, world_size, is_master=is_master, timeout=limit, wait_for_workers=not is_master)
    except RuntimeError as error:
        raise GroupError(
            field=f"Gloo store at {host}",
            got=f"{str(error).strip().partition(chr(10))[0]} (after {time.monotonic() - began:.0f} s)",
            wanted=f"a connection within {JOIN_SECONDS:.0f} s, in which names are looked up, too",
            fix=f"check that {f'{host} is of this machine' if is_master else 'the other side runs'}, and that "
            f"`getent hosts {host}` answers at once",
        ) from error


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
        own = host if store is not None else address_towards(host, int(port))
        self._store = store or _store(host, int(port), spec.world_size, is_master=False)
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._devices = [gloo.create_device(hostname=own)]
        settings._timeout = timedelta(seconds=seconds)
        self._gloo = gloo(self._store, rank, spec.world_size, settings)

    def broadcast(self, data: Tensor) -> None:
        """Send rank 0's data to all ranks, in place. By NCCL this is only enqueued on the current stream: see `wait`.

        The data is on a GPU for NCCL, in main memory for Gloo. A GroupError says that a rank has ended, or did not come
        in time; the group is unusable then.
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

        Raise a GroupError if it does not finish in time, or a rank fails.
        """
        if self._nccl is not None:
            self._nccl.wait(done)

    def abort(self) -> None:
        """Leave without the others, whose broadcasts then fail. Any thread may call this."""
        if self._nccl is not None:
            self._nccl.abort()
