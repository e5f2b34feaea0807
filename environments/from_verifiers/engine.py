"""The inference engine for `verifiers`, in front of ours: vLLM's `/inference/v1/generate` on a separate port.

The library's training client renders conversations to token ids and asks for further tokens with their logprobs. This
engine turns its requests into ours (`Inference`). It also keeps each rollout's policy versions and sampling, for which
the library's traces have no field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from environments.peers.http import PeerError, PeerRefused
from environments.peers.inference import Completion, Inference, Sampling
from vllm_server.protocol.routed_experts import joined

SESSION_HEADER = "x-session-id"
"""Header in which verifiers sends the trace's id with every turn."""
MODEL = "policy"
REMEMBERED = 10_000
"""Limit of rollouts whose versions are kept for a later call of `Engine.rollout`."""


@dataclass(slots=True)
class Rollout:
    """The policy versions, temperatures and other parameters that sampled one trace's turns."""

    versions: list[int | None] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    cuts: dict[str, float] = field(default_factory=dict)
    routed: list[Completion] = field(default_factory=list)

    @property
    def policy_version(self) -> int | None:
        """Return the oldest version; None if one is unknown."""
        known = [version for version in self.versions if version is not None]
        return min(known) if known and len(known) == len(self.versions) else None

    def routed_experts(self, tokens: Sequence[int]) -> bytes | None:
        """Return the experts of one branch of the trace; None if a turn has none."""
        turns = sorted(self.routed, key=lambda turn: len(turn.prompt_token_ids))
        own: list[bytes | None] = []
        for turn in turns:
            ids = turn.prompt_token_ids + turn.token_ids
            if [*tokens[: len(ids)]] == ids:
                own.append(turn.routed_experts)
        return joined(own)


class _SamplingParams(msgspec.Struct):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None


class _Generate(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _SamplingParams


class Engine:
    """Serves `/inference/v1/generate` and `/v1/models` on a free port of this machine."""

    def __init__(self, server: Inference, max_length: int, stops: Sequence[int] = ()) -> None:
        """Make a server that forwards to `server`.

        Args:
            max_length: limit of a sequence (prompt and completion), in tokens.
            stops: tokens at which answers end in addition to those of a request.
        """
        self._client = server
        self._stops = tuple(stops)
        self._max_length = max_length
        self._rollouts: dict[str, Rollout] = {}
        routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = cast("Any", nullcontext)  # the environment handles signals
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start the engine; return its base URL when it listens."""
        self._task = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the engine for verifiers ended during its start")
            await asyncio.sleep(0.01)
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/v1"

    async def close(self) -> None:
        """Stop the engine."""
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        if self._task is not None:
            await self._task

    def rollout(self, trace_id: str) -> Rollout:
        """Return a trace's versions and temperatures, and forget them."""
        return self._rollouts.pop(trace_id, Rollout())

    async def _generate(self, request: Request) -> JSONResponse:
        try:
            asked = msgspec.json.decode(await request.body(), type=_Generate)
        except msgspec.DecodeError as error:
            return _refusal(422, str(error))
        sampling = self._sampling(asked)
        if sampling.max_tokens < 1:
            return _refusal(
                400,
                f"This model's maximum context length is {self._max_length} tokens, the prompt has "
                f"{len(asked.token_ids)} (--env.max_token_length)",
            )
        try:
            (completion,) = await self._client.generate(asked.token_ids, 1, sampling)
        except PeerRefused as refusal:
            return _refusal(refusal.status, str(refusal))
        except PeerError as error:
            return _refusal(502, str(error))
        if trace_id := request.headers.get(SESSION_HEADER):
            rollout = self._rollouts.setdefault(trace_id, Rollout())
            while len(self._rollouts) > REMEMBERED:  # failed rollouts and evaluations are never fetched
                del self._rollouts[next(iter(self._rollouts))]
            rollout.versions.append(completion.policy_version)
            rollout.temperatures.append(completion.temperature)
            rollout.cuts |= completion.cuts
            rollout.routed += [completion] if completion.routed_experts else []
        return JSONResponse(_answer(completion))

    def _sampling(self, asked: _Generate) -> Sampling:
        params, room = asked.sampling_params, self._max_length - len(asked.token_ids)
        return Sampling(
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=1.0 if params.top_p is None else params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            min_p=params.min_p or 0.0,
            stop=tuple(params.stop or ()),
            stop_token_ids=(*(params.stop_token_ids or ()), *self._stops),
        )

    async def _models(self, _: Request) -> JSONResponse:
        card = {"id": MODEL, "object": "model", "owned_by": "grpo", "max_model_len": self._max_length - 1}
        return JSONResponse({"object": "list", "data": [card]})


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "grpo", "code": status}}, status_code=status)


def _answer(completion: Completion) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token_id}", "logprob": logprob}
        for token_id, logprob in zip(completion.token_ids, completion.rollout_logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": content},
    }
    return {"request_id": "grpo", "choices": [choice]}
