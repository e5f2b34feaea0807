"""NCCL where there is none: an error that says so. What it does with GPUs is in tests/gpu."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_server.protocol import nccl
from vllm_server.protocol.nccl import Communicator, NcclError, unique_id


class StandInLibrary:
    """A library whose communicator never gets ready, and which notes what it was asked.

    `answers`: what calls by their names return at once; 7 is "in progress".
    """

    def __init__(self, state: int = 7) -> None:
        self.state = state
        self.answers = {"init": 7, "broadcast": 0}
        self.aborted: list[int | None] = []

    def ncclCommInitRankConfig(self, handle: Any, size: int, name: Any, rank: int, config: Any) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 17
        return self.answers["init"]

    def ncclCommGetAsyncError(self, handle: Any, status: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = self.state
        return 0

    def ncclBroadcast(self, *_: Any) -> int:
        return self.answers["broadcast"]

    def ncclCommAbort(self, handle: ctypes.c_void_p) -> int:
        self.aborted.append(handle.value)
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return b"status %d" % status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInLibrary]:
    made = StandInLibrary()
    monkeypatch.setattr(nccl, "library", lambda: made)
    yield made


def test_without_the_library_the_error_says_what_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nccl.library.cache_clear()
    for use in (unique_id, lambda: Communicator(bytes(128), 0, 2)):
        with pytest.raises(NcclError) as error:
            use()
        assert error.value.field == "NCCL" and error.value.got.startswith("libnccl.so.2: ")
        assert "CUDA" in error.value.wanted and "torch" in error.value.wanted


def test_a_partner_who_never_comes_is_an_error_and_ends_the_communicator(
    library: StandInLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "INIT_TIMEOUT_S", 0.01)
    with pytest.raises(NcclError) as error:
        Communicator(bytes(128), 1, 2)
    assert error.value.field == "NCCL rank 1 of 2" and error.value.wanted.endswith(f" {nccl.INIT_TIMEOUT_S:.0f} s")
    assert library.aborted == [17]


def test_whoever_knows_that_nobody_comes_ends_the_wait(library: StandInLibrary) -> None:
    class Refused(Exception):
        pass

    def refused() -> None:
        raise Refused

    started = time.monotonic()
    with pytest.raises(Refused):
        Communicator(bytes(128), 0, 2, refused)
    assert time.monotonic() - started < nccl.INIT_TIMEOUT_S
    assert library.aborted == [17]


@pytest.mark.parametrize(("call", "doing"), [("init", "rank 0 of 2"), ("broadcast", "broadcast")])
def test_a_call_that_fails_at_once_ends_the_communicator(library: StandInLibrary, call: str, doing: str) -> None:
    """So that the other ranks need not wait for their time limits."""
    library.state = 0
    library.answers[call] = 3
    with pytest.raises(NcclError) as error:
        Communicator(bytes(128), 0, 2).broadcast(0, 4, root=0, stream=0)
    assert (error.value.field, error.value.got) == (f"NCCL {doing}", "status 3")
    assert library.aborted == [17]


def test_a_communicator_that_failed_is_not_used_again(library: StandInLibrary) -> None:
    library.state = 0
    communicator = Communicator(bytes(128), 0, 2)
    communicator.broadcast(0, 4, root=0, stream=0)
    library.state = 2
    with pytest.raises(NcclError) as error:
        communicator.wait(lambda: False)
    assert (error.value.field, error.value.got) == ("NCCL broadcast", "status 2")
    assert "NCCL_DEBUG=INFO" in error.value.fix
    assert library.aborted == [17]
    for again in (lambda: communicator.broadcast(0, 4, root=0, stream=0), lambda: communicator.wait(lambda: False)):
        with pytest.raises(NcclError) as error:
            again()
        assert (error.value.field, error.value.got) == ("NCCL communicator", "")  # NCCL was not asked
    communicator.close()
    assert library.aborted == [17]  # once
