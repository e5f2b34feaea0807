"""The fence around an update of shared weights: nothing is computed while a trainer writes them.

    begin ──▶ (no forward pass is under way: the trainer writes) ──▶ end ──▶ generation goes on as the new version
      └──▶ torn, by the trainer's word or when time is up ──▶ poisoned: refused, until an update has ended well

New requests wait at `passage`, so that each begins on one side of an update; those that run are held in the engine.
Caches are keyed by `salt`, which changes with each update: no request finds what was computed before it began.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from grpo_common.trace import since
from vllm_server.errors import ServeError
from vllm_server.policy import check_version
from vllm_server.protocol import (
    PROOF_VERSION,
    InFlight,
    UpdateBeginRequest,
    UpdateBeginResponse,
    UpdateEndRequest,
    UpdateEndResponse,
)

logger = logging.getLogger("vllm.grpo.fence")  # below "vllm": vLLM's handler and format


class FencedEngine(Protocol):
    """What the fence needs of the engine; `compat.SharedEngine` is it."""

    async def hold(self, *, abort: bool) -> None:
        """Schedule nothing more, end running requests early if `abort`, and wait for the forward pass under way."""

    async def renew(self, *, recompute: bool) -> None:
        """Drop what was computed from the old weights; of running requests too, to be made anew, if `recompute`."""

    async def release(self) -> None:
        """Go on."""


@dataclass(eq=False)
class Update:
    """The one under way."""

    token: str
    in_flight: InFlight
    timeout_s: float
    started: float
    held: bool = False  # the trainer may write
    ending: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass
class Fence:
    """One server's fence.

    Attributes:
        shared: whether there are shared weights at all.
        on_version: told the version that the weights are of once an update has ended well.
        fault: why the weights are in no known state (None: they are in one).
        updates: how many have ended well.
        paused: generation was paused from outside: an update that ends leaves it so.
    """

    boot_id: str
    engine: FencedEngine
    on_version: Callable[[int], None]
    shared: bool = True
    fault: str | None = None
    updates: int = 0
    last_update_time: float = 0.0
    last_stall_seconds: float = 0.0
    paused: bool = False
    _update: Update | None = None
    _settled: asyncio.Event = field(default_factory=asyncio.Event)
    _tearing: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def salt(self) -> str:
        """Keys the engine's caches; the same from one update to the next."""
        return f"{self.boot_id[:8]}-{self.updates}"

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None

    # -------------------------------------------------------------------------------------------- requests

    def check_healthy(self) -> None:
        """Raise a ServeError, 503, while the weights are in no known state."""
        if self.fault is not None:
            raise ServeError(
                503, "weights", got=self.fault, wanted="weights in a known state",
                fix="end an update that writes all of them (the trainer does when it is started again)",
            )  # fmt: skip

    async def passage(self) -> None:
        """Wait while an update is under way.

        Raises:
            ServeError: 503, the weights are in no known state.
        """
        self.check_healthy()
        while self.updating:
            await self._settled.wait()
            self.check_healthy()

    def check_idle(self) -> None:
        """Raise a ServeError, 409, while an update is under way: what holds generation is not for others to change."""
        if self._update is not None:
            raise self._busy(self._update)

    # --------------------------------------------------------------------------------------------- updates

    async def begin(self, asked: UpdateBeginRequest) -> UpdateBeginResponse:
        """Hold generation; when this returns nothing reads the weights, and nothing will before `end`.

        Raises:
            ServeError: 409 nothing is shared, another server was meant, or an update is under way; 422 no time limit.
        """
        if not self.shared:
            raise ServeError(
                409, "update", got="a server that does not share its weights", wanted="one that shares them",
                fix="start it with --shared-weights",
            )  # fmt: skip
        if asked.boot_id != self.boot_id:
            raise ServeError(
                409, "boot_id", got=asked.boot_id, wanted=f"{self.boot_id}, this server's",
                fix="the server was restarted: attach to its weights again",
            )  # fmt: skip
        if not 0 < asked.timeout_s < float("inf"):
            raise ServeError(422, "timeout_s", got=asked.timeout_s, wanted="more than 0 seconds", fix="raise it")
        self.check_idle()
        update = Update(uuid4().hex, asked.in_flight, asked.timeout_s, time.monotonic())
        self._update = update  # at once: whoever comes while we wait for the engine is refused
        self._settled.clear()
        try:
            await self.engine.hold(abort=asked.in_flight == "abort")
        except BaseException:
            try:
                if self.fault is None and not self.paused:
                    await self.engine.release()
            finally:
                self._settle()
            raise
        update.held = True
        update.timer = asyncio.get_running_loop().call_later(asked.timeout_s, self._time_is_up, update)
        return UpdateBeginResponse(token=update.token, pause_seconds=time.monotonic() - update.started)

    async def end(self, asked: UpdateEndRequest) -> UpdateEndResponse:
        """Let generation go on with the weights as they are now; or, if they are torn, refuse it from now on.

        Raises:
            ServeError: 409, no such update is under way (any more).
        """
        update = self._update
        if update is None or not update.held or update.ending or asked.token != update.token:
            raise ServeError(
                409, "token", got=asked.token, wanted="the token of the update that is under way",
                fix=f"begin another ({self.fault})" if self.fault else "begin an update first",
            )  # fmt: skip
        if asked.version != PROOF_VERSION:
            check_version(asked.version)
        self._stop_clock(update)
        if asked.torn:
            await self._tear(update, "its trainer says that it did not come to its end")
        else:
            await self._finish(update, asked.version)
        stall = self.last_stall_seconds = time.monotonic() - update.started
        since("fence", update.started, version=asked.version, torn=asked.torn)
        return UpdateEndResponse(policy_version=asked.version, stall_seconds=stall)

    async def _finish(self, update: Update, version: int) -> None:
        try:
            await self.engine.renew(recompute=update.in_flight == "recompute")
            self.updates += 1
            self.last_update_time = time.time()
            self.on_version(version)
            self.fault = None
            if not self.paused:
                await self.engine.release()
        except BaseException as error:
            self.fault = f"generation could not go on after an update ({error!r})"
            raise
        finally:
            self._settle()
        logger.info(
            "Weights updated in-place: version %d, generation held %.2f ms",
            *(version, (time.monotonic() - update.started) * 1e3),
        )

    def _time_is_up(self, update: Update) -> None:
        self._stop_clock(update)
        why = f"it had not ended after {update.timeout_s:g} s: its trainer is taken for dead"
        tearing = asyncio.get_running_loop().create_task(self._tear(update, why))
        self._tearing.add(tearing)
        tearing.add_done_callback(self._tearing.discard)

    async def _tear(self, update: Update, why: str) -> None:
        """Poison, and end what still runs: nobody knows when there will be weights for it."""
        self.fault = f"an update of the weights is torn: {why}"
        logger.error("Generation is refused: %s", self.fault)
        try:
            await self.engine.hold(abort=True)
        finally:
            self._settle()

    def _stop_clock(self, update: Update) -> None:
        update.ending = True
        if update.timer is not None:
            update.timer.cancel()

    def _settle(self) -> None:
        self._update = None
        self._settled.set()

    def _busy(self, update: Update) -> ServeError:
        seconds = time.monotonic() - update.started
        return ServeError(
            409, "update", got=f"an update that began {seconds:.1f} s ago and has not ended", wanted="none under way",
            fix=f"end it, or wait: after {update.timeout_s:g} s it counts as torn",
        )  # fmt: skip
