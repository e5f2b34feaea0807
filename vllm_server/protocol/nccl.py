"""The few NCCL calls that connect trainer and server, for both sides.

torch.distributed does not help here: its process groups hold the processes of one program, and vLLM has one already.
NCCL itself needs only a unique id (128 bytes, sent over HTTP) and one call on each side. The library is the one that
torch has loaded. Communicators are non-blocking, so that a missing partner is an error and not a hang.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html (2.18 and later).
"""

import ctypes
import functools
import threading
import time
from collections.abc import Callable

from grpo_common.errors import UserError

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
    """Return this process's NCCL library.

    Raises:
        NcclError: there is none.
    """
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

    Args:
        abandoned: called while waiting for the others; raises if they are known not to come.

    Raises:
        NcclError: the others did not answer in time.
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

        Raises:
            NcclError: it did not finish in time, or a rank failed.
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
