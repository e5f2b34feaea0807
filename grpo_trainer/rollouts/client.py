"""The trainer's end of the rollout API: register, lease a batch, acknowledge it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from environments.api import wire
from grpo_trainer.config import RolloutConfig
from grpo_trainer.errors import ServerError, TrainingError
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample, Teacher

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.02
TROUBLE = frozenset({500, 502, 503, 504})
"""What a server answers, or a proxy before it, that may work a little later."""

PATIENCE_SECONDS = 15.0
"""After this long without a batch, and each time again, the log says what is being waited for."""


@dataclass(frozen=True)
class _Wait:
    """Why no batch has come yet."""

    reason: str


class RolloutClient:
    """Leases batches from the rollout API and acknowledges them once they are trained on.

    An API that goes away and comes back is waited for; one that has forgotten the trainer (no store) is registered with
    anew.

    Args:
        registration: what the API is told of this run; `starting_step` follows the acknowledged steps.
        check_stop: called while waiting; raises to end the wait.
    """

    def __init__(self, config: RolloutConfig, registration: wire.Register, check_stop: Callable[[], None]) -> None:
        headers = {"Accept": wire.MSGPACK}
        if config.api_key:
            headers["Authorization"] = f"Bearer {config.api_key}"
        self._http = httpx.Client(base_url=config.url, timeout=30.0, headers=headers, trust_env=False)
        self._config = config
        self._registration = registration
        self._check_stop = check_stop

    def register(self) -> None:
        """Announce the trainer; waits for the API to be there.

        Raises:
            ServerError: the API refused, or was not there within `--rollout-timeout`.
        """
        self._wait_for(self._try_register, "the rollout API to be there")

    def _try_register(self) -> bool | _Wait:
        answer = self._send("POST", "/register", msgspec.json.encode(self._registration))
        if isinstance(answer, _Wait):
            return answer
        uuid = wire.decode(answer.content, wire.RegisterResponse, answer.headers["content-type"]).uuid
        self._registration = msgspec.structs.replace(self._registration, uuid=uuid)
        return True

    def next_batch(self, policy_version: int) -> RolloutBatch:
        """Lease the next batch; waits for one.

        Args:
            policy_version: the newest published version, from which staleness counts.

        Raises:
            TrainingError: none came within `--rollout-timeout`.
        """
        started = time.perf_counter()
        dropped = 0
        while True:
            self._check_stop()
            request = uuid4().hex  # an answer that is lost on the way can be asked for again: it is the same lease
            leased = self._wait_for(partial(self._try_lease, request), "a batch of rollouts")
            batch_id, groups = leased.batch_id or "", [to_group(packed) for packed in leased.batch or ()]
            fresh = [group for group in groups if not self._too_stale(group, policy_version)]
            dropped += len(groups) - len(fresh)
            if fresh:
                break
            self._acknowledge(batch_id, self._registration.starting_step)
            log.warning("a whole batch was more than %s versions old and dropped", self._config.max_staleness)
        waited = time.perf_counter() - started
        metrics = _staleness(fresh, policy_version) | {
            "train/data_fetch_time": Sum(waited),
            "rollout/dropped_stale_groups": Sum(dropped),
        }
        return RolloutBatch(batch_id, tuple(fresh), metrics, policy_version)

    def _too_stale(self, group: Group, policy_version: int) -> bool:
        versions = [sample.policy_version for sample in group.samples if sample.policy_version is not None]
        limit = self._config.max_staleness
        return limit is not None and bool(versions) and policy_version - min(versions) > limit

    def _try_lease(self, request: str) -> wire.PackedBatch | _Wait:
        lease = f"lease={self._config.lease_seconds:g}&request={request}&uuid={self._registration.uuid}"
        answer = self._send("GET", f"/batch?{lease}")
        if isinstance(answer, _Wait):
            return answer
        if not wire.is_msgpack(answer.headers.get("content-type")):
            raise ServerError(
                f"--rollout-url {self._config.url}: answers /batch in {answer.headers.get('content-type')}, wanted "
                f"{wire.MSGPACK}; is this `grpo api`?"
            )
        batch = wire.decode(answer.content, wire.PackedBatch, wire.MSGPACK)
        if batch.status == "error":
            self._try_register()
            return _Wait(f"the API to know this trainer: {batch.message}")
        return batch if batch.batch else _Wait("enough scored groups")

    def ack(self, batch: RolloutBatch, step: int) -> None:
        """Say that a batch was trained on and that `step` steps are done; its groups are never served again."""
        self._registration = msgspec.structs.replace(self._registration, starting_step=step)
        self._acknowledge(batch.batch_id, step)

    def _acknowledge(self, batch_id: str, step: int) -> None:
        body = msgspec.json.encode(wire.Ack(step=step))

        def attempt() -> bool | _Wait:
            answer = self._send("POST", f"/batch/{batch_id}/ack", body, unknown_is_fine=True)
            return answer if isinstance(answer, _Wait) else True

        self._wait_for(attempt, "the rollout API to take an acknowledgement")

    def release(self, batch: RolloutBatch) -> None:
        """Give a leased batch back untrained. Best effort: an unreleased lease runs out by itself."""
        try:
            self._http.post(f"/batch/{batch.batch_id}/release", timeout=2.0)
        except httpx.HTTPError as error:
            log.warning("batch %s was not given back (%s); its lease runs out by itself", batch.batch_id, error)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _send(
        self, method: str, path: str, body: bytes | None = None, *, unknown_is_fine: bool = False
    ) -> httpx.Response | _Wait:
        """One request. A server that is away, or in trouble of its own, is worth waiting for; a refusal is not."""
        headers = {"Content-Type": wire.JSON} if body else {}
        try:
            answer = self._http.request(method, path, content=body, headers=headers)
        except httpx.TransportError as error:
            return _Wait(f"{self._config.url} to answer ({type(error).__name__}: {error})")
        if answer.status_code in TROUBLE:
            return _Wait(f"{self._config.url} to recover (status {answer.status_code})")
        if answer.status_code == 409:
            raise TrainingError(f"another trainer has taken the run over at {self._config.url}: {answer.text[:500]}")
        if answer.status_code == 404 and unknown_is_fine:
            log.warning("%s %s: the API does not know this batch (restarted without --store?)", method, path)
        elif answer.status_code >= 400:
            raise ServerError(f"{method} {self._config.url}{path}: refused: {answer.status_code} {answer.text[:500]}")
        return answer

    def _wait_for(self, attempt: Callable[[], T | _Wait], what: str) -> T:
        """Try until it succeeds; say what is waited for, and give up after `--rollout-timeout`."""
        started = time.monotonic()
        said = 0.0
        while True:
            result = attempt()  # before the check: a stop must not keep a trained batch from being acknowledged
            if not isinstance(result, _Wait):
                return result
            self._check_stop()
            waited = time.monotonic() - started
            if waited - said >= PATIENCE_SECONDS:
                said = waited
                log.info("waiting %.0f s for %s: %s", waited, what, self._explanation() or result.reason)
            if 0 < self._config.rollout_timeout < waited:
                raise TrainingError(
                    f"waited {waited:.0f} s for {what}: {self._explanation() or result.reason}. Look at the "
                    f"environments' logs and at {self._config.url}/status (--rollout-timeout sets the limit)"
                )
            time.sleep(POLL_SECONDS if waited < 5.0 else 10 * POLL_SECONDS)

    def _explanation(self) -> str | None:
        """The API's own word on why no batch comes."""
        try:
            status = wire.decode(self._http.get("/status", headers={"Accept": wire.JSON}).content, wire.Status)
        except (httpx.HTTPError, msgspec.DecodeError):
            return None  # it can't be asked: the caller has a reason of its own
        return "; ".join(filter(None, [status.waiting_for, *status.warnings])) or None


def to_group(packed: wire.PackedGroup) -> Group:
    """A group of the wire as the trainer's; its arrays are views of the bytes that came.

    Of overrides those of a sequence stand over the group's: `sft`, `set_advantage_to_zero`, `temperature`.
    """
    ends = np.cumsum(packed.lengths)[:-1]
    tokens = np.split(np.frombuffer(packed.tokens, "<i4").astype(np.int64), ends)
    trained = np.split(np.frombuffer(packed.masks, "<i4") != wire.IGNORED, ends)
    advantages = _floats(packed.advantages, ends, sum(packed.lengths))
    logprobs = _floats(packed.inference_logprobs, ends, sum(packed.lengths))
    count = len(packed.lengths)
    overrides = [{**(packed.group_overrides or {}), **own} for own in packed.overrides or [{}] * count]
    requested = (packed.generation_params or {}).get("temperature")
    versions = packed.policy_versions or [None] * count
    samples = tuple(
        Sample(
            tokens_T=tokens[i],
            trained_T=trained[i],
            reward=packed.scores[i],
            advantages_T=_advantages(advantages, i, packed.lengths[i], overrides[i]),
            rollout_logprobs_T=logprobs[i] if logprobs and _are_logprobs(logprobs[i], trained[i]) else None,
            policy_version=versions[i],
            temperature=float(overrides[i].get("temperature") or requested or 1.0),
            supervised=bool(overrides[i].get("sft")),
            teacher=_teacher(packed, i),
        )
        for i in range(count)
    )
    return Group(samples, packed.env_id)


def _advantages(
    given: list[NDArray[np.float32]] | None, i: int, length: int, override: dict[str, Any]
) -> NDArray[np.float32] | None:
    """The environment's own, or 0 for a sequence that it wants left out though its reward counts."""
    if override.get("set_advantage_to_zero"):
        return np.zeros(length, np.float32)
    return given[i] if given else None


def _teacher(packed: wire.PackedGroup, i: int) -> Teacher | None:
    """A sequence's ragged lists as arrays; a negative id is filling of the environment's."""
    if not packed.distill_token_ids or not packed.distill_logprobs:
        return None
    ids, logprobs = packed.distill_token_ids[i], packed.distill_logprobs[i]
    width = max(map(len, ids), default=0)
    ids_TK = np.zeros((len(ids), width), np.int64)
    logprobs_TK = np.full((len(ids), width), -np.inf, np.float32)
    for t, (some_ids, some_logprobs) in enumerate(zip(ids, logprobs, strict=True)):
        ids_TK[t, : len(some_ids)] = some_ids
        logprobs_TK[t, : len(some_ids)] = some_logprobs
    logprobs_TK[ids_TK < 0] = -np.inf
    teacher = Teacher(ids_TK.clip(min=0), logprobs_TK)
    return teacher if teacher.given_T.any() else None


def _floats(data: bytes | None, ends: NDArray[np.int64], total: int) -> list[NDArray[np.float32]] | None:
    if not data:
        return None
    width = "<f4" if len(data) == 4 * total else "<f8"
    return np.split(np.frombuffer(data, width).astype(np.float32), ends)


def _are_logprobs(values_T: NDArray[np.float32], trained_T: NDArray[np.bool_]) -> bool:
    """Some environments fill the whole row with the masked value (1.0): that is no logprob, and means "unknown"."""
    return bool((values_T[trained_T] <= 1e-3).all())


def _staleness(groups: list[Group], policy_version: int) -> dict[str, Metric]:
    ages = [
        policy_version - sample.policy_version
        for group in groups
        for sample in group.samples
        if sample.policy_version is not None
    ]
    if not ages:
        return {}
    return {"rollout/staleness_mean": Mean(sum(ages), len(ages)), "rollout/staleness_max": Max(max(ages))}
