"""`POST /generate`: tokens in; tokens, their logprobs and their policy version out."""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import cache
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from grpo_common.http import unless_disconnected
from grpo_common.suggest import did_you_mean
from vllm_server.errors import ServeError
from vllm_server.http import NDJSON, route
from vllm_server.output_blocks import experts_of
from vllm_server.policy import Lease, Version
from vllm_server.protocol import (
    GENERATE_ROUTE,
    HEALTH_GENERATE_ROUTE,
    ROUTING_KEYS,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    TokenLogprobs,
    TokenPrompt,
)
from vllm_server.seams import engine_dead_error, engine_generate_error, request_errors, require
from vllm_server.server import PolicyServer

# JSON has no −∞. A token outside top_p or top_k gets this value instead, as in vLLM's own /v1 answers.
_FLOOR = -9999.0

_HEALTH_LIMIT_S = 30.0

_UNCHECKED = (AttributeError, KeyError, OverflowError)
"""What vLLM raises when it reads parts of a request that it does not check, for example `extra_args`."""


@route("POST", GENERATE_ROUTE)
async def generate(server: PolicyServer, request: Request, body: dict[str, Any]) -> Response | GenerateResponse:
    """Answer a `GenerateRequest` by a `GenerateResponse`, or by one `GenerateChunk` a line if it sets `stream`.

    Raises:
        ServeError: 404 no such version, 422 an illegal key or value, 503 the server cannot generate.
    """
    check_integers(body)
    try:
        asked = GenerateRequest.from_body(body)
    except msgspec.ValidationError as error:
        raise ServeError(422, "prompt or routing", error, "see docs/server.md", "correct it") from error
    params = build_sampling_params(asked.sampling, stream=asked.stream)
    async with AsyncExitStack() as held:
        lease = await held.enter_async_context(server.serving(asked.model, asked.policy_version))
        outputs = await held.enter_async_context(aclosing(_outputs(server, asked, params, lease.version)))
        # A stream's first output is fetched before its headers are sent, so that a bad request gets an error status.
        output = await unless_disconnected(request, _output(outputs, last=not asked.stream))
        if output is None:
            return Response(status_code=499)  # the client has disconnected
        if asked.stream:
            return _HeldStream(_lines(output, outputs, lease), held.pop_all())
    return _response(server, output, params, lease)


@route("GET", HEALTH_GENERATE_ROUTE)
async def health_generate(server: PolicyServer, request: Request) -> None:
    """Answer 200 after the newest version has generated one token; 503 if it cannot, or not in time."""
    asked = GenerateRequest(prompt=TokenPrompt([0]), sampling={"max_tokens": 1, "temperature": 0.0})
    params = build_sampling_params(asked.sampling, stream=False)
    try:
        async with asyncio.timeout(_HEALTH_LIMIT_S), server.serving() as lease:
            await unless_disconnected(request, _output(_outputs(server, asked, params, lease.version)))
    except TimeoutError:
        wanted = f"one token within {_HEALTH_LIMIT_S:.0f} s"
        raise ServeError(503, "engine", "no token", wanted, "resume generation, or wait") from None


async def _outputs(
    server: PolicyServer, asked: GenerateRequest, params: Any, version: Version
) -> AsyncGenerator[Any, None]:
    """Yield the engine's outputs; turn its complaints about the request into refusals."""
    prompt = asked.prompt if isinstance(asked.prompt, str) else asked.prompt.prompt_token_ids
    try:
        async with aclosing(server.generate(prompt, params, str(uuid4()), version)) as outputs:
            async for output in outputs:
                yield output
    except ServeError:
        raise
    except (*request_errors(), *_UNCHECKED, engine_generate_error(), engine_dead_error()) as error:
        await server.check_engine()  # whatever ends the engine's outputs is raised in every request, also a ValueError
        cause = error.__cause__ if isinstance(error, engine_generate_error()) else error
        if isinstance(cause, ServeError):  # the fence's, since vLLM passes completions to its engine through it
            raise cause from None
        if not isinstance(cause, (*request_errors(), *_UNCHECKED)):
            raise
        raise ServeError(422, "request", cause, "what this model takes", "correct it") from error


async def _output(outputs: AsyncIterator[Any], *, last: bool = True) -> Any:
    """Return the last or the first output."""
    found = None
    async for output in outputs:
        found = output
        if not last:
            break
    assert found is not None, "the engine ended a request without an output"
    return found


def _response(server: PolicyServer, final: Any, params: Any, lease: Lease) -> GenerateResponse:
    prompt_ids = list(final.prompt_token_ids)
    prompt = server.engine.get_tokenizer().decode(prompt_ids) if final.prompt is None else final.prompt
    return GenerateResponse(
        text=[output.text for output in final.outputs],
        prompt=prompt,
        finish_reasons=[output.finish_reason for output in final.outputs],
        policy_version=lease.began_with,
        policy_version_end=lease.ended_with,
        model=lease.version.name,
        prompt_token_ids=prompt_ids,
        token_ids=[list(output.token_ids) for output in final.outputs],
        logprobs=None if params.logprobs is None else [_positions(o.logprobs) for o in final.outputs],
        prompt_logprobs=None
        if params.prompt_logprobs is None
        else [None if position is None else _plain(position) for position in final.prompt_logprobs],
        routed_experts=_experts(server, final) if params.flat_logprobs and params.logprobs is not None else None,
    )


def _experts(server: PolicyServer, final: Any) -> list[bytes] | None:
    """Return the experts of each completion's tokens; None: the server does not record them, or has aborted one.

    A completion that was aborted before its first token has no experts, not even of its prompt.
    """
    if (shape := server.routed_shape) is None or any(output.finish_reason == "abort" for output in final.outputs):
        return None
    prompt = len(final.prompt_token_ids)
    return [experts_of(output.logprobs, shape, prompt + len(output.token_ids) - 1) for output in final.outputs]


class _HeldStream(StreamingResponse):
    """Lines of JSON. `held` (version and engine request) is released after the response.

    The lines' generator cannot release it: it never starts if the client disconnects early.
    """

    def __init__(self, lines: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(lines, media_type=NDJSON)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _lines(first: Any, rest: AsyncIterator[Any], lease: Lease) -> AsyncIterator[bytes]:
    """Yield one line for the new tokens of each completion in each engine step."""
    try:
        yield _chunks(first, lease)
        async for output in rest:
            yield _chunks(output, lease)
    except ServeError as error:  # the status is sent already, so the error is a line
        yield msgspec.json.encode(error.response()) + b"\n"


def _chunks(output: Any, lease: Lease) -> bytes:
    chunks = [
        GenerateChunk(
            index=part.index,
            text=part.text,
            token_ids=list(part.token_ids),
            policy_version=lease.began_with,
            policy_version_end=lease.ended_with,
            model=lease.version.name,
            finish_reason=part.finish_reason,
            logprobs=None if part.logprobs is None else _positions(part.logprobs),
        )
        for part in output.outputs
    ]
    return msgspec.json.Encoder().encode_lines(chunks)


def _positions(logprobs: Any) -> list[list[TokenLogprobs]]:
    """Return the logprobs (vLLM's FlatLogprobs, or mappings) by position; raise as `_check_not_nan`.

    vLLM puts the sampled token first in each position, and so does the wire.
    """
    if (starts := getattr(logprobs, "start_indices", None)) is None:
        return [[_plain(position)] for position in logprobs]
    ids, values = logprobs.token_ids, [max(value, _FLOOR) for value in logprobs.logprobs]
    _check_not_nan(values)
    return [[dict(zip(ids[i:j], values[i:j], strict=True))] for i, j in zip(starts, logprobs.end_indices, strict=True)]


def _plain(position: Mapping[int, Any]) -> TokenLogprobs:
    """Return a position's logprobs for JSON; raise as `_check_not_nan`."""
    found = {token: max(entry.logprob, _FLOOR) for token, entry in position.items()}
    _check_not_nan(found.values())
    return found


def _check_not_nan(values: Iterable[float]) -> None:
    """Raise a ServeError, 422, for NaN: JSON has none, and a trainer can't use it."""
    if any(map(math.isnan, values)):
        wanted = "weights and penalties that keep logits finite"
        fix = "choose smaller penalties; without penalties the version's weights overflow: publish another one"
        raise ServeError(422, "sampling", "logprobs that are not finite", wanted, fix)


# ----------------------------------------------------------------------------------------------------------------------
# A request's sampling keys as vLLM's SamplingParams; unknown keys are refused.

# Fields of SamplingParams that the server sets itself, or that would change the answer's structure.
_NOT_FOR_REQUESTS = frozenset(
    {"output_kind", "skip_clone", "output_text_buffer_length", "flat_logprobs", "prompt_logprob_token_ids"}
)


@cache
def known_keys() -> frozenset[str]:
    fields = require("vllm.sampling_params", "SamplingParams").__struct_fields__
    return frozenset(name for name in fields if not name.startswith("_")) - _NOT_FOR_REQUESTS


def check_integers(body: dict[str, Any]) -> None:
    """Raise a ServeError, 422, if an integer does not fit the 64 bits of the engine's messages and tensors."""
    for key, value in body.items():
        if _too_large(value):
            raise ServeError(422, key, "an integer beyond 64 bits", "-2**63 to 2**63 - 1", "choose a smaller one")


def _too_large(value: object) -> bool:
    if isinstance(value, int):
        return not -(2**63) <= value < 2**63
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(map(_too_large, value))


def build_sampling_params(sampling: dict[str, Any], *, stream: bool) -> Any:
    """Return vLLM's SamplingParams with these values, and vLLM's defaults for the rest.

    Raises:
        ServeError: 422, an unknown key (the error names the nearest known one), or an illegal value.
    """
    for key in sampling:
        if key not in known_keys():
            fix = did_you_mean(key, [*known_keys(), *ROUTING_KEYS], f"known are {', '.join(sorted(known_keys()))}")
            raise ServeError(422, key, "a key that this server does not know", "a sampling parameter of vLLM", fix)
    try:
        params = msgspec.convert(sampling, require("vllm.sampling_params", "SamplingParams"), str_keys=True)
    except request_errors() as error:  # msgspec's are ValueErrors and contain `$.key`; vLLM's name the key
        place = re.search(r"`\$\.(\w+)", str(error))
        field = place.group(1) if place else next((k for k in sampling if k in str(error)), "sampling")
        got = repr(sampling.get(field, sampling))
        raise ServeError(422, field, got, str(error), "correct the value") from error
    if stream and params.prompt_logprobs is not None:
        fix = "omit stream or prompt_logprobs"
        raise ServeError(422, "prompt_logprobs", "stream", "a request without stream", fix)
    kinds = require("vllm.sampling_params", "RequestOutputKind")
    params.output_kind = kinds.DELTA if stream else kinds.FINAL_ONLY
    # Flat logprobs are one list for all positions instead of many small objects: faster, and less work for the garbage
    # collector. Not for prompts: the flat form loses the first position's None.
    params.flat_logprobs = params.prompt_logprobs is None
    return params
