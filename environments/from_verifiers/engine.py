"""The inference engine for `verifiers`, in front of ours: vLLM's `/inference/v1/generate` on a free local port.

The library's training client renders conversations to token ids and asks for further tokens with their logprobs. This
engine turns its requests into ours (`Inference`), and keeps the completions of each rollout: the library's traces have
no field for policy versions and sampling parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from environments.peers.http import PeerError, PeerRefused
from environments.peers.inference import Completion, Inference, Sampling
from environments.peers.loopback import Loopback

MODEL = "policy"


class _Generate(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]


class Engine(Loopback):
    """Serves `/inference/v1/generate` and `/v1/models`."""

    def __init__(self, server: Inference, max_length: int, stops: Sequence[int] = ()) -> None:
        """Forward to `server`, within `max_length` tokens of a sequence. Answers also end at `stops`."""
        self.turns: defaultdict[str, list[Completion]] = defaultdict(list)
        """The completions of each rollout that is not over, by the id of its trace."""
        self._client, self._max_length, self._stops = server, max_length, tuple(stops)
        routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        super().__init__(Starlette(routes=routes))

    async def _generate(self, request: Request) -> JSONResponse:
        try:
            asked = msgspec.json.decode(await request.body(), type=_Generate)
            prompt, room = asked.token_ids, self._max_length - len(asked.token_ids)
            given = {name: value for name, value in asked.sampling_params.items() if value is not None}
            sampling = msgspec.convert({"max_tokens": room} | given, Sampling)
        except msgspec.DecodeError as error:
            return _refusal(422, str(error))
        if room < 1:
            return _refusal(
                400,
                f"This model's maximum context length is {self._max_length} tokens, the prompt has {len(prompt)} "
                "(--env.max_token_length)",
            )
        most, stops = min(room, sampling.max_tokens or room), (*sampling.stop_token_ids, *self._stops)
        sampling = replace(sampling, max_tokens=most, stop_token_ids=stops)
        try:
            (completion,) = await self._client.generate(prompt, 1, sampling)
        except PeerRefused as refusal:
            return _refusal(refusal.status, str(refusal))
        except PeerError as error:
            return _refusal(502, str(error))
        if trace_id := request.headers.get("x-session-id"):  # verifiers sends it with every turn
            light = replace(completion, prompt_token_ids=[], token_ids=[], rollout_logprobs=[])
            self.turns[trace_id].append(completion if completion.routed_experts else light)
        pairs = zip(completion.token_ids, completion.rollout_logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        choice = {
            "index": 0,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "logprobs": {"content": content},
        }
        return JSONResponse({"request_id": "grpo", "choices": [choice]})

    async def _models(self, _: Request) -> JSONResponse:
        card = {"id": MODEL, "object": "model", "owned_by": "grpo", "max_model_len": self._max_length - 1}
        return JSONResponse({"object": "list", "data": [card]})


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "grpo", "code": status}}, status_code=status)
