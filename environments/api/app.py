"""The rollout API over HTTP: endpoints that read long bodies, wait or show pages; refusals and the gate."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Scope

from environments.api import groups, wire
from environments.api.errors import ApiError, StoreError
from environments.api.http import (
    ROUTES,
    TURN_S,
    BodyReader,
    endpoint,
    json_batch,
    json_group,
    packed_batch,
    prefers_msgpack,
    read_message,
    respond,
    stream,
)
from environments.api.service import Service
from grpo_common.errors import Problem
from grpo_common.gate import Gate, Refusal, from_browser
from grpo_common.pages.document import document, plotting

log = logging.getLogger("rollout-api")

T = TypeVar("T")
_EXAMPLE = "tokens masks scores advantages ref_logprobs generation_params inference_logprobs messages images"
_HERE = Path(__file__).parent
_STYLE, _SCRIPTS = plotting()
STATUS_HTML = document(
    "Rollout API",
    (_HERE / "status.html").read_text(),
    style=_STYLE,
    scripts=[*_SCRIPTS, (_HERE / "status.js").read_text()],
    asks="'self'",
)
_FREQUENT = ("/scored_data", "/status-env", "/batch")
"""Routes are tried in turn: these come first."""
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself says the rest
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@endpoint("GET", "/")
def root(service: Service, http: Request) -> object:
    """A greeting; to a browser the status page."""
    if "text/html" in http.headers.get("accept", ""):
        return HTMLResponse(STATUS_HTML, headers=PAGE_HEADERS)
    return {"message": "Rollout API"}


@endpoint("GET", "/report")
async def report(service: Service) -> Response:
    """The run's report."""
    path = service.settings.report
    if path is None or not path.exists():
        raise ApiError(404, Problem("GET /report", "none yet", "a report", "grpo report RUN_DIR --watch"))
    return HTMLResponse(await asyncio.to_thread(path.read_bytes), headers=PAGE_HEADERS)


@endpoint("GET", "/status-env")
async def status_env(
    service: Service,
    http: Request,
    env_id: wire.Id | None = None,
    wait: wire.Wait | None = None,
    seen: str | None = None,
) -> wire.StatusEnv:
    """What an environment paces itself by; with `wait` once there is news. Also takes the id as a JSON body."""
    if env_id is None:
        env_id = (await read_message(http, wire.EnvIdentifier)).env_id
    status = service.status_env(env_id, waits=wait is not None)
    if wait is not None and status.seen == seen:
        await service.news_waiters.until(http, lambda: service.seen != seen, _held(service, wait))
        status = service.status_env(env_id, waits=True)
    return status


@endpoint("POST", "/scored_data")
async def scored_data(service: Service, http: Request) -> wire.ScoredDataResponse:
    """Post a group."""
    content_type, key = http.headers.get("content-type"), _post_key(http)
    service.check_room()  # first without the body: clients whose posts are refused come again, and there are many
    async with http.app.state.bodies.read(http) as body, http.app.state.parsing:
        service.check_room()
        try:
            posted = await _parsed(body, groups.read, content_type)
        except groups.REFUSED as error:
            raise groups.refusal(error, content_type) from None
        answer = service.take(posted, key)
        await asyncio.sleep(0)
    await service.written()
    return answer


@endpoint("POST", "/scored_data_list")
async def scored_data_list(service: Service, http: Request) -> Response:
    """Post groups; those that are wrong are named, the others are received."""
    content_type, key = http.headers.get("content-type"), _post_key(http)
    rejected: list[wire.RejectedGroup] = []
    buffered: list[int] = []
    refused = 0
    service.check_room()
    async with http.app.state.bodies.read(http) as body:
        async with http.app.state.parsing:
            service.check_room()
            try:
                posted, kind = await _parsed(body, groups.split, content_type)
            except groups.REFUSED as error:
                raise groups.refusal(error, content_type) from None
        began = time.perf_counter()
        for place, raw in enumerate(posted):
            async with http.app.state.parsing:
                try:
                    group = await _parsed(memoryview(raw), groups.read, kind)
                    answer = service.take(group, key and key + b"/%d" % place)
                    buffered += [] if answer.buffer_size is None else [answer.buffer_size]
                except (ApiError, *groups.REFUSED) as error:
                    refused += 1
                    if len(rejected) < groups.NAMED_REFUSALS:
                        named = error if isinstance(error, ApiError) else groups.refusal(error, kind)
                        rejected.append(wire.RejectedGroup(group=place, field=named.key or "", detail=str(named)))
            if time.perf_counter() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.perf_counter()
                if await http.is_disconnected():
                    raise ClientDisconnect
    await service.written()
    for each in rejected:
        service.refuse("POST /scored_data_list", 422, f"group {each.group}: {each.detail}")
    if more := refused - len(rejected):
        service.refuse("POST /scored_data_list", 422, f"{more} more groups of this list", more)
    message = wire.ScoredDataListResponse(
        status="partial" if refused else "received",
        groups_processed=len(posted) - refused,
        buffered=len(buffered) or None,
        last_buffer_size=buffered[-1] if buffered else None,
        rejected=rejected or None,
        more_rejected=more or None,
    )
    return respond(http, message, 422 if refused else 200)


@endpoint("GET", "/batch", changes=True)
async def batch(
    service: Service,
    http: Request,
    lease: wire.Seconds | None = None,
    request: str | None = None,
    uuid: wire.Id | None = None,
    wait: wire.Wait | None = None,
) -> object:
    """The next batch; with `wait` as soon as there is one."""
    queue = service.queue
    if queue.run is None:
        return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
    until = service.timer() + _held(service, wait)
    while True:
        run = queue.run
        served = await service.next_batch(lease, request, uuid)
        left = until - service.timer()
        if served is not None or left <= 0 or service.batch_waiters.ended:
            break
        # `run` is another one when a trainer has registered.
        await service.batch_waiters.until(http, lambda run=run: queue.batch_ready or queue.run is not run, left)
    if served is None:
        return {"batch": None}
    fields: dict[str, object] = {}
    if (held := served.lease) is not None:
        fields = {"batch_id": held.batch_id, "expires_in_s": held.seconds, "current_step": served.current_step}
    if prefers_msgpack(http.headers.get("accept")):
        return stream(http, packed_batch(served.payloads, fields), wire.MSGPACK)
    return stream(http, json_batch(served.payloads, fields), wire.JSON)


@endpoint("GET", "/latest_example")
def latest_example(service: Service, http: Request) -> object:
    """The newest group, or empty lists."""
    if service.latest is None:
        return {name: [] for name in _EXAMPLE.split()}
    return stream(http, json_group(service.latest), wire.JSON)


@endpoint("POST", "/reset_data")
async def reset_data(service: Service, http: Request) -> Response:
    """Forget everything."""
    log.warning("reset by %s", http.client.host if http.client else "an unknown client")
    await service.reset()
    return PlainTextResponse("Reset successful")


@endpoint("GET", "/reset_data", changes=True)
async def reset_data_by_get(service: Service, http: Request) -> Response:
    """Forget everything; not for browsers."""
    if from_browser(http.scope["headers"]):
        raise ApiError(403, Problem("GET /reset_data", "a browser", "a program", "use POST /reset_data"))
    return await reset_data(service, http)


async def _parsed(body: groups.Buffer, parse: Callable[[Any, str | None], T], content_type: str | None) -> T:
    """Parse a body, in a thread if it is long."""
    if len(body) < groups.LONG_BODY:
        return parse(body, content_type)
    return await asyncio.to_thread(parse, body, content_type)


def _held(service: Service, wait: float | None) -> float:
    """Return how long a request may be held: an environment must be heard of several times within its time-out."""
    return min(wait or 0.0, service.settings.env_timeout / 3)


def _post_key(http: Request) -> bytes | None:
    key = http.headers.get("idempotency-key")
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"post").digest() if key else None


async def _refused(request: Request, error: Exception) -> Response:
    """Answer a request that ended in an error; the status page lists what clients did wrong."""
    match error:
        case ClientDisconnect():
            answer = Response(status_code=400)  # nobody is left to read it
        case HTTPException():
            answer = respond(request, wire.ErrorResponse(detail=error.detail), error.status_code)
            answer.headers.update(error.headers or {})
        case ApiError():
            answer = respond(request, error.response(), error.status)
            if error.retry_s is not None:
                answer.headers["Retry-After"] = str(error.retry_s)
            else:
                path = f"{request.method} {request.url.path}"
                request.app.state.service.refuse(path, error.status, str(error))
        case StoreError():  # the server is about to end, and says why
            answer = respond(request, wire.ErrorResponse(detail=str(error)), 503)
        case _:  # a fault of ours, which the log has
            answer = respond(request, wire.ErrorResponse(detail="internal error; the rollout API's log has it"), 500)
    return answer


def _turned_away(scope: Scope, refusal: Refusal) -> Response:
    """The answer of the gate: where a browser opens the page without the key, the page itself, which asks for it."""
    request = Request(scope)
    opens_page = refusal.status == 401 and (scope["method"], scope["path"]) == ("GET", "/")
    if opens_page and "text/html" in request.headers.get("accept", ""):
        response: Response = HTMLResponse(STATUS_HTML, refusal.status, PAGE_HEADERS)
    else:
        response = respond(request, ApiError(refusal.status, refusal.problem).response(), refusal.status)
    if refusal.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application of one service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        timekeeper = asyncio.create_task(service.keep_time())
        yield
        timekeeper.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError):
            await timekeeper

    settings = service.settings
    cors = Middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
    routes = sorted(ROUTES, key=lambda route: route.path not in _FREQUENT)
    app = Starlette(
        routes=routes,
        middleware=[cors] if settings.cors_origins else [],
        exception_handlers=dict.fromkeys((ClientDisconnect, HTTPException, ApiError, StoreError, Exception), _refused),
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.bodies = BodyReader(settings.max_body_mb << 20)
    app.state.parsing = asyncio.Lock()
    """Bodies, and parts of lists, are parsed one at a time with a turn for all others between two: however many
    clients post at once, nobody waits for more than one of them."""
    keys = [settings.api_key] if settings.api_key else []
    return Gate(app, host=settings.host, keys=keys, origins=settings.cors_origins, answer=_turned_away)
