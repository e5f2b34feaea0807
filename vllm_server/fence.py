"""The fence around an update of the weights: the engine computes nothing while a trainer writes them.

    begin ──▶ (no forward pass runs: the trainer writes) ──▶ end ──▶ generation resumes with the new version
      └──▶ torn, by the trainer's report or by time-out ──▶ poisoned: refused until an update has completed

New requests wait at `passage`, so each begins entirely before or after an update. In-flight requests are held in the
engine. `salt` is part of every cache key and changes with each update, so no request finds cache entries that were
computed before the update.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
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
from vllm_server.seams import Engine

logger = logging.getLogger("vllm.grpo.fence")  # below "vllm": vLLM's handler and format


@dataclass(frozen=True)
class SharedEngine:
    """The engine, as the fence uses it.

    It calls the engine's core directly: `AsyncLLM.pause_generation` sleeps another 20 ms after the pause.
    """

    engine: Engine

    async def pause(self, mode: str) -> None:
        """Pause generation; return when vLLM has done with requests in flight what the mode says."""
        # With "wait" vLLM would clear caches when requests have ended, even if generation was resumed meanwhile.
        await self.engine.pause_generation(mode=mode, clear_cache=mode == "abort")

    async def forget(self) -> None:
        """Empty the prefix cache."""
        await self.engine.reset_prefix_cache()

    async def hold(self, *, abort: bool) -> None:
        """Hold scheduling.

        vLLM confirms a pause when its queue of batches is empty. Their kernels may still run on the device, so wait for
        the device. Both requests are sent at once. An idle engine confirms the pause before it waits for the device.
        One that confirms it afterwards still had batches, so wait for the device again.
        """
        mode = "abort" if abort else "keep"
        pause = asyncio.ensure_future(self.engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))

        async def was_idle() -> bool:
            await self.engine.collective_rpc("grpo_synchronize")
            return pause.done()

        _, idle = await asyncio.gather(pause, was_idle())
        if not idle:
            await self.engine.collective_rpc("grpo_synchronize")

    async def renew(self, *, recompute: bool) -> None:
        """Drop caches of the old weights.

        New requests cannot match old prefix-cache entries, because the salt differs. In-flight requests lose their
        caches only if they return to the queue; otherwise vLLM resets nothing while a request runs. Encoded images are
        cached by content alone. That cache must be cleared, and in-flight requests must return to the queue.
        """
        images = self.engine.vllm_config.model_config.is_multimodal_model
        if recompute or images:
            await self.engine.engine_core.reset_prefix_cache_async(reset_running_requests=True)
        if images:
            await self.engine.engine_core.reset_encoder_cache_async()

    async def release(self) -> None:
        """Resume the scheduler."""
        await self.engine.engine_core.resume_scheduler_async()

    def salt_caches(self, passage: Callable[[], Awaitable[None]], salt: Callable[[], str]) -> None:
        """Add `salt()` to the cache key of every completion, from any route, when it is passed to the engine.

        A completion that arrives during an update waits at `passage` first, although its HTTP request has passed the
        fence before: with the old key it would read prefixes that the old weights had computed.
        """
        core, processor = self.engine.engine_core, self.engine.output_processor
        add = core.add_request_async

        async def add_salted(request: Any) -> None:
            try:
                await passage()
            except BaseException:
                # vLLM has entered the completion in its tables, and removes only those that its engine has begun.
                processor.abort_requests([request.request_id], internal=True)
                raise
            request.cache_salt = f"{salt()} {request.cache_salt or ''}"
            await add(request)

        core.add_request_async = add_salted


def check_limit(seconds: float) -> None:
    """Raise a ServeError, 422, if this is no time limit."""
    if not 0 < seconds < float("inf"):
        raise ServeError(422, "timeout_s", seconds, "more than 0 seconds", "raise it")


@dataclass(eq=False)
class Update:
    """The current update."""

    token: str
    in_flight: InFlight
    timeout_s: float
    started: float
    held: bool = False  # the trainer may write
    applying: bool = False  # the writing of weights that were sent has begun: an update that fails now is torn
    applied: bool = False  # they are written
    ending: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass
class Fence:
    """One server's fence."""

    boot_id: str
    engine: SharedEngine
    on_version: Callable[[int], None]  # called with the weights' version after each completed update
    writable: bool = True  # a trainer may write the weights: in shared memory, or by sending them
    sent: bool = False  # weights are sent, so this server alone writes them, and knows whether it has
    fault: str | None = None  # why the state of the weights is unknown; None if it is known
    updates: int = 0  # that have completed
    last_update_time: float = 0.0
    last_stall_seconds: float = 0.0
    pauses: set[asyncio.Event] = field(default_factory=set)
    """Pauses by clients, in progress or completed, that hold generation: it stays paused after an update ends."""
    asleep: bool = False  # the weights are not in the device's memory: adapters are refused
    _pausing: set[asyncio.Event] = field(default_factory=set)  # those for which an update waits; set when they end
    _update: Update | None = None
    _settled: asyncio.Event = field(default_factory=asyncio.Event)
    _tearing: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def salt(self) -> str:
        """The current part of cache keys; it changes with each update."""
        return f"{self.boot_id[:8]}-{self.updates}"

    @property
    def paused(self) -> bool:
        return bool(self.pauses)

    @property
    def updating(self) -> bool:
        return self._update is not None

    def check_healthy(self) -> None:
        """Raise a ServeError, 503, while the state of the weights is unknown, or the engine could not resume."""
        if self.fault is not None:
            if not self.writable:
                wanted = "an engine that generates"
                raise ServeError(503, "generation", self.fault, wanted, "POST /bridge/resume, or restart the server")
            fix = "complete an update that writes all of them (a restarted trainer does that)"
            raise ServeError(503, "weights", self.fault, "weights in a known state", fix)

    async def passage(self) -> None:
        """Wait while an update is in progress. Raise a ServeError, 503, if the state of the weights is unknown."""
        self.check_healthy()
        while self.updating:
            await self._settled.wait()
            self.check_healthy()

    def check_idle(self) -> None:
        """Raise a ServeError, 409, during an update: only the update may pause or resume generation then."""
        if (update := self._update) is not None:
            got = f"an update that began {time.monotonic() - update.started:.1f} s ago and has not ended"
            fix = f"end it, or wait: after {update.timeout_s:g} s it counts as torn"
            raise ServeError(409, "update", got, "none in progress", fix)

    def check_writable(self, field: str) -> None:
        """Raise a ServeError, 409, if no trainer writes this server's weights."""
        if not self.writable:
            got, wanted = "a server whose weights do not change", "one whose weights a trainer writes"
            raise ServeError(409, field, got, wanted, "start it with --shared-weights or --receive-weights")

    def check_boot(self, boot_id: str) -> None:
        """Raise a ServeError, 409, if another server was meant."""
        if boot_id != self.boot_id:
            wanted, fix = f"{self.boot_id}, this server's", "the server was restarted: connect to it again"
            raise ServeError(409, "boot_id", boot_id, wanted, fix)

    def check_awake(self) -> None:
        """Raise a ServeError, 409, while the weights are not in the device's memory."""
        if self.asleep:
            raise ServeError(409, "sleep", "a server that sleeps", "one that is awake", "POST /bridge/wake_up first")

    async def pause(self, mode: str) -> None:
        """Pause generation until `resume`. If the engine fails to pause, generation resumes unless another pause holds.

        An update that begins meanwhile waits for the engine. `resume` may end a pause that waits for requests. Raise a
        ServeError, 409, if an update is in progress.
        """
        self.check_idle()
        pausing = asyncio.Event()
        self.pauses.add(pausing)
        self._pausing.add(pausing)
        try:
            await self.engine.pause(mode)
            if mode == "wait" and pausing in self.pauses:
                await self.engine.forget()
        except BaseException:
            self.pauses.discard(pausing)  # `resume` may have come meanwhile
            if not self.updating:
                await self._release()
            raise
        finally:
            self._pausing.discard(pausing)
            pausing.set()

    async def resume(self) -> None:
        """Resume generation after `pause`.

        Raises:
            ServeError: 409, an update is in progress, or the server sleeps; 503, the state of the weights is unknown.
        """
        self.check_idle()
        self.check_awake()
        if self.writable:
            self.check_healthy()
        fault, ended, self.pauses = self.fault, self.pauses, set()
        try:
            await self.engine.release()
        except BaseException:
            self.pauses |= ended
            raise
        if not self.writable and self.fault is fault:  # its weights are as they were: it only could not resume before
            self.fault = None
        self._pausing -= ended
        for pausing in ended:
            pausing.set()

    async def tear(self, token: str, why: str) -> None:
        """Poison the weights: a write of weights that were sent has failed. If the update has ended, it is torn."""
        if (update := self._update) is not None and update.token == token and not update.ending:
            self._stop_clock(update)
            await self._tear(why)

    def held(self, token: str) -> Update:
        """Return the update within which the weights may be written; raise a ServeError, 409, for another's token."""
        update = self._update
        if update is None or not update.held or update.ending or token != update.token:
            fix = f"begin another ({self.fault})" if self.fault else "begin an update first"
            raise ServeError(409, "token", "another token", "that of the update in progress", fix)
        return update

    async def begin(self, asked: UpdateBeginRequest) -> UpdateBeginResponse:
        """Hold generation. After this returns, nothing reads the weights before `end`.

        Raises:
            ServeError: 409 nothing is shared, another server was meant, it sleeps, an update is in progress, or a pause
                does not end within the time limit; 422 no time limit.
        """
        self.check_writable("update")
        self.check_boot(asked.boot_id)
        check_limit(asked.timeout_s)
        try:  # an update would stop requests that a pause waits for
            async with asyncio.timeout(asked.timeout_s):
                while self._pausing:
                    await next(iter(self._pausing)).wait()
        except TimeoutError:
            got = f"a pause that has waited more than {asked.timeout_s:g} s for requests in flight"
            raise ServeError(409, "pause", got, "one that has ended", "POST /bridge/resume, or wait") from None
        self.check_awake()
        self.check_idle()
        update = Update(uuid4().hex, asked.in_flight, asked.timeout_s, time.monotonic())
        self._update = update  # set before the engine is held: a second update that begins meanwhile is refused
        self._settled.clear()
        try:
            await self.engine.hold(abort=asked.in_flight == "abort")
        except BaseException:
            await self._cancel()
            raise
        update.held = True
        update.timer = asyncio.get_running_loop().call_later(asked.timeout_s, self._time_is_up, update)
        return UpdateBeginResponse(token=update.token, pause_seconds=time.monotonic() - update.started)

    async def end(self, asked: UpdateEndRequest) -> UpdateEndResponse:
        """Resume generation with the current weights. If they are torn, refuse generation from now on.

        Raise a ServeError, 409, if the token is not that of an update in progress.
        """
        update = self.held(asked.token)
        if asked.version != PROOF_VERSION:
            check_version(asked.version)
        if self.sent and not update.applied and not asked.torn:
            fix = "apply them first, or end the update with torn"
            raise ServeError(409, "update", "no weights", "weights that were sent and applied", fix)
        self._stop_clock(update)
        if asked.torn and self.sent and not update.applying:
            await self._cancel()
        elif asked.torn:
            await self._tear("the trainer reported that its write was not completed")
        else:
            await self._finish(update, asked.version)
        stall = self.last_stall_seconds = time.monotonic() - update.started
        if not asked.torn:
            logger.info("Weights updated in-place: version %d, generation held %.2f ms", asked.version, stall * 1e3)
        since("fence", update.started, version=asked.version, torn=asked.torn)
        return UpdateEndResponse(policy_version=asked.version, stall_seconds=stall)

    async def _cancel(self) -> None:
        """Resume generation with the weights as they were: nothing was written."""
        try:
            await self._release()
        finally:
            self._settle()

    async def _release(self, when: str = "") -> None:
        """Let the engine compute, unless a client paused it, it sleeps, or the state of the weights is unknown."""
        update = self._update
        if self.fault is None and not self.paused and not self.asleep:
            try:
                await self.engine.release()
            except BaseException as error:  # requests would wait for it for ever; an update or `resume` heals it
                if self._update is update:  # else one has begun meanwhile, whose end resumes
                    await self._poison(f"generation could not resume{when} ({error!r})")
                raise

    async def _finish(self, update: Update, version: int) -> None:
        when = " after an update"
        try:
            await self.engine.renew(recompute=update.in_flight == "recompute")
            self.updates += 1
            self.last_update_time = time.time()
            self.on_version(version)
        except BaseException as error:
            await self._poison(f"generation could not resume{when} ({error!r})")
            raise
        self.fault = None
        await self._release(when)
        self._settle()

    def _time_is_up(self, update: Update) -> None:
        if update is not self._update:
            return
        self._stop_clock(update)
        why = f"it did not end within {update.timeout_s:g} s: the trainer is presumed dead"
        tearing = asyncio.get_running_loop().create_task(self._tear(why))
        self._tearing.add(tearing)
        tearing.add_done_callback(self._tearing.discard)

    async def _tear(self, why: str) -> None:
        await self._poison(f"an update of the weights is torn: {why}")

    async def _poison(self, fault: str) -> None:
        """End the update, and in-flight requests with it: they may never get valid weights."""
        self.fault, update = fault, self._update
        logger.error("Generation is refused: %s", fault)
        try:
            await self.engine.hold(abort=True)
        except Exception:  # the fault is known, and matters more
            logger.exception("Requests in flight could not be ended")
        finally:
            if self._update is update:
                self._settle()

    def _stop_clock(self, update: Update) -> None:
        update.ending = True
        if update.timer is not None:
            update.timer.cancel()

    def _settle(self) -> None:
        self._update = None
        self._settled.set()
