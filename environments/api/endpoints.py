"""The table of endpoints, and GET /openapi.json: the protocol in OpenAPI 3.1, made from that table.

What an endpoint takes and answers is in the annotations of its function: `query` and `body`, and what it returns.
"""

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from starlette.responses import Response

from environments.api import wire

Call = TypeVar("Call", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True)
class Endpoint:
    """One method of one path.

    Attributes:
        answers: by HTTP status, alternatives as a tuple.
        reads_groups: the function reads the body itself, which may be long.
    """

    method: str
    path: str
    call: Callable[..., Awaitable[object]]
    summary: str
    answers: Mapping[int, Any]
    query: Any
    body: Any
    body_optional: bool
    reads_groups: bool


ENDPOINTS: Final[list[Endpoint]] = []


def endpoint(
    method: str,
    path: str,
    *refused: int,
    answer: Any = None,
    groups: Any = None,
    partial: Any = None,
    body_optional: bool = False,
) -> Callable[[Call], Call]:
    """Put a function into the table; its docstring is the summary.

    Args:
        refused: HTTP statuses of its errors, except those that follow from what it takes.
        answer: what it answers, where the function returns a whole response; without it the reference has no such path.
        groups: what its body is, where it reads groups by itself.
        partial: what status 422 carries where a part of the groups was received.
        body_optional: an empty body is that of the message without its fields.
    """

    def enter(call: Call) -> Call:
        hints = get_type_hints(call)
        query, body = hints.get("query"), groups or hints.get("body")
        gate = (401, 403, 415) if method == "POST" else (401, 403)
        unfit = (400, 408, 413, 415, 422) if body else (422,) if query else ()
        answers: dict[int, Any] = {200: answer or hints["return"]}
        answers |= dict.fromkeys((*gate, *unfit, *refused), wire.ErrorResponse)
        if partial is not None:
            answers[422] = (partial, wire.ErrorResponse)
        summary = call.__doc__ or ""
        ENDPOINTS.append(Endpoint(method, path, call, summary, answers, query, body, body_optional, groups is not None))
        return call

    return enter


def by_path(endpoints: Sequence[Endpoint] = ENDPOINTS) -> dict[str, dict[str, Endpoint]]:
    """The endpoints of each path, by method."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method] = each
    return paths


@functools.cache
def openapi() -> bytes:
    """The document, as JSON."""
    listed = [each for each in ENDPOINTS if each.answers[200] is not Response]
    unique = list(dict.fromkeys(each for endpoint in listed for each in _types(endpoint)))
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(unique, schemas, strict=True))
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Rollout API", "version": "1", "description": (wire.__doc__ or "").strip()},
            "paths": {
                path: {name.lower(): _describe(each, by_type) for name, each in methods.items()}
                for path, methods in by_path(listed).items()
            },
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _types(endpoint: Endpoint) -> Iterator[Any]:
    if endpoint.body is not None:
        yield endpoint.body
    for answer in endpoint.answers.values():
        yield from answer if isinstance(answer, tuple) else (answer,)


def _describe(endpoint: Endpoint, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    parameters = [*_parameters(endpoint.query)] if endpoint.query else []
    if "{batch_id}" in endpoint.path:
        parameters.append({"name": "batch_id", "in": "path", "required": True, "schema": {"type": "string"}})
    answers = {
        str(status): {"description": _STATUS[status], "content": _content(answer, schemas)}
        for status, answer in endpoint.answers.items()
    }
    described: dict[str, Any] = {"summary": endpoint.summary, "parameters": parameters, "responses": answers}
    if endpoint.body is not None:
        described["requestBody"] = {
            "required": not endpoint.body_optional,
            "content": {wire.JSON: {"schema": schemas[endpoint.body]}},
        }
    return described


def _parameters(query: Any) -> Iterator[dict[str, Any]]:
    schema = msgspec.json.schema(query)["$defs"][query.__name__]
    for name, own in schema["properties"].items():
        yield {"name": name, "in": "query", "required": name in schema["required"], "schema": own}


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
