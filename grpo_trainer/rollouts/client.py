"""The trainer's client of the rollout API: register, lease a batch, extend the lease, acknowledge the batch.

A batch is acknowledged once a checkpoint contains its update. Until then it is leased. A killed trainer gets the same
batches again, in the same order, from the step of its checkpoint on.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import uuid4

import httpx
import msgspec

from environments.api import wire
from grpo_common.errors import Problem
from grpo_common.formats import check_format
from grpo_common.http import CONNECT_S, complaint, may_pass
from grpo_common.status import NOTICE, OWN, WAITS
from grpo_trainer.config.train import RolloutConfig
from grpo_trainer.errors import ServerError, TrainingError
from grpo_trainer.phases import report_at
from grpo_trainer.rollouts.groups import RolloutBatch, to_group
from grpo_trainer.signals import running_time

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.02
"""Least time between two attempts, if the API does not wait itself."""

ALONE_POLL_SECONDS = 0.1

WAIT_SECONDS = 0.5
"""Time for which the API holds a request if there is no batch yet; it delays a stop by this much at most."""


NO_STATUS = wire.Status(current_step=0, queue_size=0)


@dataclass(frozen=True)
class _Wait:
    """Why no batch has come yet."""

    reason: str


class RolloutClient:
    """Leases batches from the rollout API and acknowledges them.

    The client waits for an API that is away, and registers again if the API has forgotten the trainer (no store). One
    thread may lease batches while another trains; a third extends leases before they expire. `check_stop` is called
    while the client waits, and raises to end the wait.
    """

    def __init__(self, config: RolloutConfig, registration: wire.Register, check_stop: Callable[[], None]) -> None:
        headers = {"Accept": wire.MSGPACK}
        if config.rollout_api_key:
            headers["Authorization"] = f"Bearer {config.rollout_api_key}"
        timeout = httpx.Timeout(30.0, connect=CONNECT_S)
        # Python's own context takes the certificates that SSL_CERT_FILE names, as environments do.
        verify = ssl.create_default_context() if config.atropos_url.startswith("https:") else True
        self._http = httpx.Client(
            base_url=config.atropos_url, timeout=timeout, headers=headers, verify=verify, trust_env=False
        )
        self._config = config
        self._registration = registration  # its `starting_step` follows the trained steps
        self._registering = threading.Lock()
        self._check_stop = check_stop
        self._lock = threading.Lock()  # for the next two, which the keeper's thread uses, too
        self._deadlines: dict[str, float] = {}  # of leased batches
        self._trained: list[str] = []  # leased batches that wait for a checkpoint, in the order of training
        self._evaluated = 0
        self._has_warned = False
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None

    def register(self) -> None:
        """Wait for the API, and register the trainer.

        Raises:
            ServerError: the API refused.
            TrainingError: the API did not answer within `--rollout-timeout`.
        """
        self._wait_for(self._try_register, "the rollout API to be there", self._check_stop)
        self.evaluations()  # skips those that a former process has logged

    def _try_register(self) -> bool | _Wait:
        with self._registering:
            answer = self._send("POST", "/register", msgspec.json.encode(self._registration))
            if isinstance(answer, _Wait):
                return answer
            registered = wire.decode(answer.content, wire.RegisterResponse, answer.headers["content-type"])
            check_format(f"the rollout API at {self._config.atropos_url}", registered.format, wire.FORMAT, ServerError)
            self._registration = msgspec.structs.replace(self._registration, uuid=registered.uuid)
            return True

    # Batches in

    def lease(self, check_stop: Callable[[], None]) -> RolloutBatch:
        """Wait for the next batch, and lease it.

        Raises:
            TrainingError: no batch came within `--rollout-timeout`.
        """
        check_stop()
        request = uuid4().hex  # if the answer is lost, a repeated request returns the same lease
        try:
            batch = self._wait_for(partial(self._try_lease, request), "a batch of rollouts", check_stop, is_batch=True)
        finally:
            OWN.update(lacks_batch=False)
        batch_id = batch.batch_id or ""
        self._hold(batch_id)
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="lease keeper", daemon=True)
            self._keeper.start()
        return RolloutBatch(batch_id, tuple(to_group(packed) for packed in batch.batch or ()))

    def _try_lease(self, request: str) -> wire.PackedBatch | _Wait:
        lease = f"lease={self._config.lease_seconds:g}&request={request}&uuid={self._registration.uuid}"
        answer = self._send("GET", f"/batch?{lease}&wait={WAIT_SECONDS:g}")
        if isinstance(answer, _Wait):
            return answer
        if not wire.is_msgpack(answer.headers.get("content-type")):
            raise ServerError(
                "is this `grpo api`?",
                field=f"--rollout-url {self._config.atropos_url}: content type of /batch",
                got=answer.headers.get("content-type"),
                wanted=wire.MSGPACK,
            )
        batch = wire.decode(answer.content, wire.PackedBatch, wire.MSGPACK)
        if batch.status == "error":
            self._try_register()
            return _Wait(f"the API to know this trainer: {batch.message}")
        return batch if batch.batch else _Wait("enough scored groups")

    # Batches out

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Trained batches that are not acknowledged, in the order of training."""
        with self._lock:
            return tuple(self._trained)

    def trained(self, batch: RolloutBatch) -> tuple[str, ...]:
        """Record that a batch was trained on, and return all such batches; they stay leased until `settle`."""
        with self._lock:
            self._trained.append(batch.batch_id)
            return tuple(self._trained)

    def report(self, step: int) -> None:
        """Report to the API that the newest trained batch has led to `step`."""
        with self._registering:
            self._registration = msgspec.structs.replace(self._registration, starting_step=step)
        batch_id = self.unsettled[-1]
        path = f"/batch/{batch_id}/extend?lease={self._config.lease_seconds:g}&step={step}"
        attempt = partial(self._send, "POST", path, frank=True)
        answer = self._wait_for(attempt, "the rollout API to record a trained batch", self._check_stop)
        if answer.is_success:
            self._hold(batch_id)
        else:
            self._note_lost(batch_id, answer)
            self._end(batch_id)

    def evaluations(self) -> list[wire.NumberedEvaluation]:
        """Return the environments' evaluations on held-out prompts since the last call. Best effort."""
        answer = self._ask(f"/evaluations?after={self._evaluated}", wire.Evaluations(evaluations=[]))
        found = answer.evaluations if answer else []  # the next step asks again
        self._evaluated = max([self._evaluated, *(each.number for each in found)])
        return found

    @property
    def has_evaluations(self) -> bool:
        """Whether an environment has evaluated during this run."""
        return self._evaluated > 0

    def wait_until_alone(self, seconds: float) -> None:
        """Wait until the environments have left that leave after the last step, once they have evaluated it."""
        deadline = running_time() + seconds
        there: list[str] = []
        while True:
            status = self._ask("/status", NO_STATUS)
            found = [each.name for each in status.environments if each.alive and each.follows] if status else there
            if status and not found:
                return
            if found and not there:
                log.info("waiting for the last evaluation of %s", ", ".join(found))
            there = found
            if running_time() > deadline:
                log.warning("no longer waiting for the last evaluation of %s", ", ".join(there) or "the environments")
                return
            self._check_stop()
            time.sleep(ALONE_POLL_SECONDS)

    def settle(self, batches: Sequence[str], *, resumed: bool = False) -> None:
        """Acknowledge trained batches that a checkpoint contains; the API never serves them again.

        If `resumed`, a former process trained on them, and may have acknowledged them already.
        """
        body = msgspec.json.encode(wire.Ack(step=self._registration.starting_step))
        for batch_id in batches:
            attempt = partial(self._send, "POST", f"/batch/{batch_id}/ack", body, frank=True)
            answer = self._wait_for(attempt, "the rollout API to take an acknowledgement", self._check_stop)
            if answer.is_client_error:
                self._note_lost(batch_id, answer, resumed=resumed)
            self._end(batch_id)

    def settle_at_once(self, batches: Sequence[str]) -> None:
        """Acknowledge batches without waiting for the API. Best effort: a resumed trainer acknowledges them first."""
        body = msgspec.json.encode(wire.Ack(step=self._registration.starting_step))
        for batch_id in batches:
            try:
                self._http.post(
                    f"/batch/{batch_id}/ack", content=body, headers={"Content-Type": wire.JSON}, timeout=5.0
                )
            except httpx.HTTPError as error:
                log.warning("batch %s is not acknowledged yet (%s); a resumed run acknowledges it", batch_id, error)
                return
            self._end(batch_id)

    def drop(self, batch: RolloutBatch, why: str) -> None:
        """Acknowledge a batch that can't be trained on, and log why."""
        log.warning("a whole batch was dropped: %s", why)
        self.settle([batch.batch_id])

    def release(self, batch: RolloutBatch) -> None:
        """Release a leased batch untrained. Best effort: without a release, the lease expires."""
        self._end(batch.batch_id)
        try:
            self._http.post(f"/batch/{batch.batch_id}/release", timeout=2.0)
        except httpx.HTTPError as error:
            log.warning("batch %s was not given back (%s); its lease runs out by itself", batch.batch_id, error)

    def let_leases_run_out(self) -> None:
        """Stop extending leases."""
        self._closing.set()

    def close(self) -> None:
        """Close the connection; remaining leases expire, or pass to the next trainer that registers."""
        self.let_leases_run_out()
        if self._keeper is not None:
            self._keeper.join()  # at most for one request, which has a time limit
        self._http.close()

    def _note_lost(self, batch_id: str, answer: httpx.Response, *, resumed: bool = False) -> None:
        """Log that the API refuses a trained batch, whose groups may now be trained on again.

        Raises:
            TrainingError: another trainer has taken the run over.
        """
        if answer.status_code == 404:
            log.warning("batch %s: the API does not know it (restarted without --store?)", batch_id)
            return
        refused = wire.decode(answer.content, wire.ErrorResponse, answer.headers.get("content-type", wire.JSON))
        if refused.reason == "taken over" and not resumed:
            raise self._taken_over(refused.detail)
        log.warning("a batch that was trained on comes again, perhaps: %s", refused.detail)

    def _taken_over(self, detail: str) -> TrainingError:
        field = f"--rollout-url {self._config.atropos_url}"
        return TrainingError("another trainer has taken the run over", field=field, got=detail)

    # Leases

    def _hold(self, batch_id: str) -> None:
        """Record that a batch was leased or extended just now."""
        with self._lock:
            self._deadlines[batch_id] = time.monotonic() + self._config.lease_seconds

    def _end(self, batch_id: str) -> None:
        """Record that a batch was acknowledged or released."""
        with self._lock:
            self._deadlines.pop(batch_id, None)
            self._trained = [each for each in self._trained if each != batch_id]

    def _keep(self) -> None:
        """Extend leases with less than half of their time left; the keeper's thread."""
        seconds = self._config.lease_seconds
        while not self._closing.wait(seconds / 8):
            soon = time.monotonic() + self._config.lease_seconds / 2
            with self._lock:
                expiring = [batch_id for batch_id, deadline in self._deadlines.items() if deadline < soon]
            for batch_id in expiring:
                try:
                    answer = self._http.post(f"/batch/{batch_id}/extend?lease={seconds:g}", timeout=2.0)
                except httpx.HTTPError as error:  # the next round tries again; training raises lasting errors
                    log.debug("batch %s was not extended: %s", batch_id, error)
                    break  # hundreds of failing requests would delay `close` by minutes
                if answer.status_code < 300:
                    self._hold(batch_id)

    def _send(
        self, method: str, path: str, body: bytes | None = None, *, frank: bool = False
    ) -> httpx.Response | _Wait:
        """Send one request; return a `_Wait` if the API is away or failing, and raise an error if it refuses.

        If `frank`, return the answer if the batch is unknown (404) or taken over (409), for the caller to handle.
        """
        headers = {"Content-Type": wire.JSON} if body else {}
        try:
            answer = self._http.request(method, path, content=body, headers=headers)
        except httpx.TransportError as error:
            return _Wait(f"{self._config.atropos_url} to answer ({type(error).__name__}: {error})")
        if may_pass(answer.status_code):
            return _Wait(f"{self._config.atropos_url} to recover (status {answer.status_code})")
        if answer.status_code < 400 or (frank and answer.status_code in (404, 409)):
            return answer
        reason = complaint(answer.content, answer.headers.get("content-type")).reason  # the API's, or a proxy's
        if answer.status_code == 409:
            raise self._taken_over(reason)
        field = f"{method} {self._config.atropos_url}{path}"
        raise ServerError("refused", field=field, got=f"{answer.status_code} {reason}")

    def _wait_for(
        self, attempt: Callable[[], T | _Wait], what: str, check_stop: Callable[[], None], *, is_batch: bool = False
    ) -> T:
        """Repeat an attempt until it succeeds, log the wait, and raise an error after `--rollout-timeout`."""
        started = running_time()
        said = 0.0
        while True:
            began = time.monotonic()
            result = attempt()  # before the check: a stop must not prevent the acknowledgement of a trained batch
            if not isinstance(result, _Wait):
                return result
            check_stop()
            waited = running_time() - started
            if waited >= report_at(said):
                said = waited
                OWN.update(lacks_batch=is_batch)
                reason = self._explanation() or result.reason
                log.info("waiting %.0f s for %s: %s", waited, what, reason, extra=NOTICE | WAITS)
            if 0 < self._config.rollout_timeout < waited:
                raise TrainingError(
                    f"waited {waited:.0f} s for {what}",
                    field="--rollout-timeout",
                    got=self._explanation() or result.reason,
                    fix=f"look at the environments' logs and at {self._config.atropos_url}/status, or wait longer",
                )
            pause = POLL_SECONDS if waited < 5.0 else 10 * POLL_SECONDS
            time.sleep(max(0.0, pause - (time.monotonic() - began)))

    def environment_name(self, env_id: int | None) -> str:
        """Return an environment's name for messages."""
        status = self._ask("/status", NO_STATUS) or NO_STATUS
        names = {each.env_id: each.name for each in status.environments}
        if env_id is None:
            return "an environment that gave no env_id"
        return f"environment {names[env_id]}" if env_id in names else f"environment {env_id}"

    def _explanation(self) -> str | None:
        """Return the API's own reason why no batch comes, or None."""
        status = self._ask("/status", NO_STATUS) or NO_STATUS  # without an answer the caller has its own reason
        if status.unfit_sizes and not self._has_warned:  # only warned of: an environment that comes may change that
            self._has_warned = True
            wanted, size = f"sizes that add up to {status.batch_size}, the sequences of a step", status.batch_size
            fix = f"use --env.group_size {size} or a divisor of it, or other --prompts-per-step and --batch-size"
            sizes = ", ".join(map(str, status.unfit_sizes))
            log.warning("%s", Problem("--env.group_size", f"groups of {sizes}", wanted, fix, "no batch can come"))
        return "; ".join(filter(None, [status.waiting_for, *status.warnings])) or None

    def _ask(self, path: str, otherwise: T) -> T | None:
        """Return an answer of the API; `otherwise`: it is of another kind, or a refusal; None: no answer came."""
        try:
            answer = self._http.get(path, headers={"Accept": wire.JSON}, timeout=5.0)
            return wire.decode(answer.content, type(otherwise)) if answer.is_success else otherwise
        except httpx.TransportError:
            return None
        except (httpx.HTTPError, msgspec.DecodeError):
            return otherwise
