"""GET /openapi.json: the protocol in OpenAPI 3.1, its schemas made from the structures that requests are read with."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from environments.api import wire
from environments.api.history import Overview
from environments.api.waiting import LONGEST_WAIT_S

_NUMBER = {"type": "number"}
_WHOLE = {"type": "integer", "minimum": 0, "maximum": 2**53}


@dataclass(frozen=True)
class Operation:
    """One method of one path. `answers` is by HTTP status, alternatives as a tuple."""

    method: str
    path: str
    summary: str
    answers: dict[int, Any]
    body: Any = None
    body_optional: bool = False
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    required_query: frozenset[str] = frozenset()


_REFUSED = {400: wire.ErrorResponse, 408: wire.ErrorResponse, 413: wire.ErrorResponse, 415: wire.ErrorResponse}
_READ = _REFUSED | {422: wire.ErrorResponse}
_FULL = {429: wire.ErrorResponse}
_LEASE = {200: wire.LeaseResponse, 404: wire.ErrorResponse, 409: wire.ErrorResponse}
_SECONDS = {"type": "number", "minimum": 0.1, "maximum": 86400}
_WAIT = {"type": "number", "minimum": 0, "maximum": LONGEST_WAIT_S}

OPERATIONS = (
    Operation("get", "/", "A greeting; to a browser the status page.", {200: wire.Message}),
    Operation(
        "post", "/register", "A trainer starts or takes over.", {200: wire.RegisterResponse} | _READ, wire.Register
    ),
    Operation(
        "post",
        "/register-env",
        "An environment asks for its id.",
        {200: wire.RegisterEnvResponse} | _READ,
        wire.RegisterEnv,
    ),
    Operation(
        "post",
        "/disconnect-env",
        "An environment says goodbye.",
        {200: wire.DisconnectResponse} | _READ,
        wire.EnvIdentifier,
    ),
    Operation("get", "/wandb_info", "Where the run is logged.", {200: wire.WandbInfo}),
    Operation("get", "/info", "Batch size and token limit.", {200: wire.Info}),
    Operation("get", "/status", "The queue, and why a batch comes or does not.", {200: wire.Status}),
    Operation(
        "get",
        "/status-env",
        "What an environment paces itself by; with `wait` once there is news. Also takes the id as a JSON body.",
        {200: wire.StatusEnv, 404: wire.ErrorResponse} | _READ,
        query={"env_id": _WHOLE, "wait": _WAIT, "seen": {"type": "string"}},
        required_query=frozenset({"env_id"}),
    ),
    Operation("post", "/scored_data", "Post a group.", {200: wire.ScoredDataResponse} | _READ | _FULL, wire.ScoredData),
    Operation(
        "post",
        "/scored_data_list",
        "Post groups; those that are wrong are named, the others are received.",
        {200: wire.ScoredDataListResponse}
        | _REFUSED
        | _FULL
        | {422: (wire.ScoredDataListResponse, wire.ErrorResponse)},
        list[wire.ScoredData],
    ),
    Operation(
        "get",
        "/batch",
        "The next batch; with `wait` as soon as there is one.",
        {200: wire.Batch, 409: wire.ErrorResponse, 422: wire.ErrorResponse},
        query={"lease": _SECONDS, "request": {"type": "string"}, "uuid": _WHOLE, "wait": _WAIT},
    ),
    Operation("post", "/batch/{batch_id}/ack", "The batch is trained.", _LEASE | _READ, wire.Ack, body_optional=True),
    Operation(
        "post",
        "/batch/{batch_id}/extend",
        "Hold the batch for longer.",
        _LEASE | {422: wire.ErrorResponse},
        query={"lease": _SECONDS, "step": _WHOLE},
        required_query=frozenset({"lease"}),
    ),
    Operation("post", "/batch/{batch_id}/release", "Put the batch back.", _LEASE),
    Operation(
        "post",
        "/evaluation",
        "Post figures on held-out prompts.",
        {200: wire.EvaluationResponse, 404: wire.ErrorResponse} | _READ,
        wire.Evaluation,
    ),
    Operation(
        "get",
        "/evaluations",
        "The newest evaluations.",
        {200: wire.Evaluations, 422: wire.ErrorResponse},
        query={"after": _WHOLE},
    ),
    Operation("get", "/latest_example", "The newest group, or empty lists.", {200: dict[str, Any]}),
    Operation("get", "/reset_data", "Forget everything; not for browsers.", {200: str}),
    Operation("post", "/reset_data", "Forget everything.", {200: str}),
    Operation("get", "/overview", "What the status page shows.", {200: Overview}),
    Operation("get", "/metrics", "For Prometheus.", {200: str}),
)


@functools.cache
def openapi() -> bytes:
    """The document, as JSON."""
    unique = list(dict.fromkeys(each for operation in OPERATIONS for each in _types(operation)))
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(unique, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Rollout API", "version": "1", "description": (wire.__doc__ or "").strip()},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _types(operation: Operation) -> Iterator[Any]:
    if operation.body is not None:
        yield operation.body
    for answer in operation.answers.values():
        yield from answer if isinstance(answer, tuple) else (answer,)


def _describe(operation: Operation, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "required": name in operation.required_query, "schema": schema}
        for name, schema in operation.query.items()
    ]
    if "{batch_id}" in operation.path:
        parameters.append({"name": "batch_id", "in": "path", "required": True, "schema": {"type": "string"}})
    answers = {
        str(status): {"description": _STATUS[status], "content": _content(answer, schemas)}
        for status, answer in (_gate(operation.method) | operation.answers).items()
    }
    described: dict[str, Any] = {"summary": operation.summary, "parameters": parameters, "responses": answers}
    if operation.body is not None:
        described["requestBody"] = {
            "required": not operation.body_optional,
            "content": {wire.JSON: {"schema": schemas[operation.body]}},
        }
    return described


def _gate(method: str) -> dict[int, Any]:
    """What the gate may answer before a route."""
    return dict.fromkeys((401, 403, 415) if method == "post" else (401, 403), wire.ErrorResponse)


def _content(answer: Any, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if answer is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    return {
        wire.JSON: {
            "schema": {"anyOf": [schemas[each] for each in answer]} if isinstance(answer, tuple) else schemas[answer]
        }
    }


_STATUS = {
    200: "OK",
    400: "No JSON or MessagePack, or gzip that is broken",
    401: "The key is missing or wrong",
    403: "Called by a page of another web site, or by another name than this machine's own",
    404: "Unknown",
    408: "The body came too slowly",
    409: "Given to another trainer meanwhile",
    413: "The body is too large",
    415: "A content type that any web page can send, or an encoding other than gzip",
    422: "A field is wrong; it is named",
    429: "The queue is full; Retry-After says when to post again",
}
