"""The environment's client of the rollout API: register, ask for demand, post groups, disconnect."""

import logging
import math
import uuid
from typing import TypeVar

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig
from environments.peers.http import Peer, PeerError, PeerRefused
from grpo_common.formats import check_format

log = logging.getLogger(__name__)

_EVALUATION_PATIENCE_S = 5.0

T = TypeVar("T")


class NotRegistered(PeerError):
    """The API does not know this environment (any more): it was restarted, and the environment must register again."""


class RolloutApi:
    """Client of the rollout API for one environment. Answers and groups are MessagePack."""

    def __init__(self, config: BaseEnvConfig) -> None:
        self._config = config
        url, key = config.rollout_server_url, config.rollout_api_key
        self._peer = Peer("the rollout API", url, patience=config.retry_timeout, api_key=key, may_be_full=True)

    async def register(self, name: str) -> wire.RegisterEnvResponse:
        """Register; the answer's `status` says whether a trainer is there yet."""
        config = self._config
        body = wire.RegisterEnv(
            max_token_length=config.max_token_length,
            desired_name=config.wandb_name or name,
            weight=config.inference_weight,
            group_size=config.group_size,
            min_batch_allocation=config.min_batch_allocation,
            process=str(config.metrics_path.absolute()) if config.metrics_path else None,
        )
        answer = await self._ask("POST", "/register-env", wire.RegisterEnvResponse, body)
        check_format(f"the rollout API at {config.rollout_server_url}", answer.format, wire.FORMAT, PeerError)
        return answer

    async def info(self) -> wire.Info:
        return await self._ask("GET", "/info", wire.Info)

    async def status(self, env_id: int, *, wait: float = 0.0, seen: str = "") -> wire.StatusEnv:
        """Return the trainer's step and the queue's state, or raise NotRegistered.

        Wait up to `wait` seconds for a change since the answer that had this `seen`.
        """
        path = f"/status-env?wait={wait:g}&seen={seen}"
        try:
            return await self._ask("GET", path, wire.StatusEnv, wire.EnvIdentifier(env_id=env_id))
        except PeerRefused as refusal:
            if refusal.status == 404:
                raise NotRegistered(refusal.summary, field=refusal.field, got=refusal.got) from None
            raise

    async def post(self, group: wire.ScoredData) -> None:
        """Post one scored group; retry until the patience runs out. Raise PeerRefused if the API refuses it.

        Every post has an idempotency key. If its answer is lost and it is repeated, it counts once.
        """
        body = wire.encode_group(group, wire.MSGPACK)
        headers = {"Content-Type": wire.MSGPACK, "Idempotency-Key": uuid.uuid4().hex}
        await self._peer.request("POST", "/scored_data", content=body, headers=headers)

    async def post_evaluation(self, env_id: int, step: int, metrics: dict[str, float]) -> None:
        """Post metrics of an evaluation; best effort."""
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        body = wire.Evaluation(env_id=env_id, step=step, metrics=finite)
        try:
            await self._ask("POST", "/evaluation", wire.EvaluationResponse, body, _EVALUATION_PATIENCE_S)
        except PeerError as error:
            log.info("the rollout API did not accept the evaluation of step %d: %s", step, error)

    async def disconnect(self, env_id: int, patience: float) -> None:
        """Disconnect, so that the API reserves nothing more for this environment."""
        body = wire.EnvIdentifier(env_id=env_id)
        await self._ask("POST", "/disconnect-env", wire.DisconnectResponse, body, patience)

    async def close(self) -> None:
        await self._peer.close()

    async def _ask(
        self, method: str, path: str, kind: type[T], body: msgspec.Struct | None = None, patience: float | None = None
    ) -> T:
        headers = {"Accept": wire.MSGPACK, "Content-Type": wire.JSON}
        content = None if body is None else wire.encode(body)
        response = await self._peer.request(method, path, content=content, headers=headers, patience=patience)
        content_type = response.headers.get("content-type", wire.JSON)
        try:
            return wire.decode(response.content, kind, content_type)
        except msgspec.DecodeError as error:
            raise PeerError(
                field=f"{method} {path} at {self._peer.url}",
                got=error,
                wanted="the answer of a rollout API",
                fix="check --env.rollout_server_url",
            ) from None
