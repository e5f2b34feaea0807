"""The rollout API's endpoints: each asks the service for its answer. Nothing is decided here."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar, get_type_hints

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from environments.api import intake, wire
from environments.api.answers import json_batch, json_group, packed_batch
from environments.api.history import Overview
from environments.api.http import BodyReader, respond, respond_bytes, stream
from environments.api.metrics import Metrics
from environments.api.queue import RolloutQueue
from environments.api.records import ApiError, NotRegistered, QueueFull, Run, StoreError, UnknownEnvironment
from environments.api.service import Served, Service
from environments.api.waiting import while_there
from grpo_common.errors import Problem
from grpo_common.gate import Gate, Refusal, from_browser
from grpo_common.pages.document import document, plotting

log = logging.getLogger("rollout-api")

P = ParamSpec("P")
Call = TypeVar("Call", bound=Callable[..., Awaitable[object]])
Read = TypeVar("Read")
T = TypeVar("T")
_EMPTY_EXAMPLE: dict[str, list[object]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
        *("inference_logprobs", "messages", "images"),
    )
}


_STATIC = Path(__file__).parent / "static"
_STYLE, _SCRIPTS = plotting()
STATUS_HTML = document(
    "Rollout API",
    (_STATIC / "status.html").read_text(),
    style=_STYLE,
    scripts=[*_SCRIPTS, (_STATIC / "status.js").read_text()],
    asks="'self'",
)
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself says the rest
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

ROUTES: Final[list[Route]] = []


def endpoint(method: str, path: str, *, body_optional: bool = False, changes: bool = False) -> Callable[[Call], Call]:
    """Make a method of `Api` a route: its `query` and `body` are decoded as annotated, and its answer is encoded.

    Args:
        body_optional: an empty body is that of the message without its fields.
        changes: a GET that changes state; HEAD, which shows no answer, is refused.
    """

    def enter(call: Call) -> Call:
        hints = get_type_hints(call)

        async def answer(request: Request) -> Response:
            api: Api = request.app.state.api
            given: dict[str, object] = {}
            if "query" in hints:
                given["query"] = intake.decode_query(request.query_params, hints["query"])
            if "body" in hints:
                given["body"] = await api.message(request, hints["body"], optional=body_optional)
            made = await call(api, request, **given)
            response = made if isinstance(made, Response) else respond(request, made)
            api.metrics.count(path, response.status_code)
            return response

        ROUTES.append(Route(path, answer, methods=[method]))
        if changes:
            (ROUTES[-1].methods or set()).discard("HEAD")
        return call

    return enter


class Api:
    """The endpoints of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.bodies = BodyReader(service.settings.max_body_mb << 20)
        self.metrics = Metrics(service)
        self.parsing = asyncio.Lock()
        """Bodies, and parts of lists, are parsed one at a time with a turn for all others between two: however many
        clients post at once, nobody waits for more than one of them."""

    @endpoint("GET", "/")
    async def root(self, request: Request) -> object:
        """A greeting; to a browser the status page."""
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(STATUS_HTML, headers=PAGE_HEADERS)
        return wire.Message(message="Rollout API")

    @endpoint("POST", "/register")
    async def register(self, request: Request, body: wire.Register) -> wire.RegisterResponse:
        """A trainer starts or takes over."""
        return await self.service.register(body)

    @endpoint("POST", "/register-env")
    async def register_env(self, request: Request, body: wire.RegisterEnv) -> wire.RegisterEnvResponse:
        """An environment asks for its id."""
        return await self.service.register_environment(body)

    @endpoint("POST", "/disconnect-env")
    async def disconnect_env(self, request: Request, body: wire.EnvIdentifier) -> wire.DisconnectResponse:
        """An environment says goodbye."""
        try:
            await self.service.disconnect(body.env_id)
        except UnknownEnvironment as error:
            # As environments of the original protocol expect it: a failure that is no HTTP error.
            return wire.DisconnectResponse(status="failure", error=str(error))
        return wire.DisconnectResponse(status="success")

    @endpoint("GET", "/wandb_info")
    async def wandb_info(self, request: Request) -> wire.WandbInfo:
        """Where the run is logged."""
        run = self.service.queue.run
        return wire.WandbInfo(
            group=run.trainer.wandb_group if run else None, project=run.trainer.wandb_project if run else None
        )

    @endpoint("GET", "/info")
    async def info(self, request: Request) -> wire.Info:
        """Batch size and token limit."""
        run = self.service.queue.run
        return wire.Info(
            batch_size=run.trainer.batch_size if run else -1, max_token_len=run.trainer.max_token_len if run else -1
        )

    @endpoint("GET", "/status")
    async def status(self, request: Request) -> wire.Status:
        """The queue, and why a batch comes or does not."""
        return self.service.status()

    @endpoint("GET", "/status-env")
    async def status_env(self, request: Request, query: wire.StatusEnvQuery) -> wire.StatusEnv:
        """What an environment paces itself by; with `wait` once there is news. Also takes the id as a JSON body."""
        env_id, seen, waits = query.env_id, query.seen, query.wait is not None
        if env_id is None:
            env_id = (await self.message(request, wire.EnvIdentifier)).env_id
        status = self.service.status_env(env_id, waits=waits)
        if waits and status.seen == seen:
            news = self.service.news_waiters.until(lambda: self.service.seen != seen, self._wait(query.wait))
            await while_there(request, news)
            status = self.service.status_env(env_id, waits=waits)
        return status

    @endpoint("POST", "/scored_data")
    async def scored_data(self, request: Request) -> wire.ScoredDataResponse:
        """Post a group."""
        content_type, key = request.headers.get("content-type"), _post_key(request)
        self.service.check_room()  # first without the body: who is refused comes again, and many do
        async with self.bodies.read(request) as body, self.parsing:
            self.service.check_room()
            posted = await _read(len(body), intake.read_one, body, content_type)
            answer = intake.take_one(self.service, posted, key)
            await asyncio.sleep(0)
        await self.service.written()
        return answer

    @endpoint("POST", "/scored_data_list")
    async def scored_data_list(self, request: Request) -> Response:
        """Post groups; those that are wrong are named, the others are received."""
        content_type, key = request.headers.get("content-type"), _post_key(request)
        self.service.check_room()
        async with self.bodies.read(request, intake.GroupCount(content_type).see) as body:
            async with self.parsing:
                self.service.check_room()
                posted = await _read(len(body), intake.PostedList, body, content_type, key)
            for places, size in posted.turns():
                async with self.parsing:
                    read = await _read(size, posted.read, places)
                    posted.take(self.service, places, read)
                    await asyncio.sleep(0)
                if await request.is_disconnected():
                    raise ClientDisconnect
        await self.service.written()
        answer = posted.answer()
        for each in answer.rejected or ():
            self.service.refuse("POST /scored_data_list", 422, f"group {each.group}: {each.detail}")
        if more := answer.more_rejected:
            self.service.refuse("POST /scored_data_list", 422, f"{more} more groups of this list", more)
        return respond(request, answer, 422 if answer.rejected else 200)

    @endpoint("GET", "/batch", changes=True)
    async def batch(self, request: Request, query: wire.BatchQuery) -> object:
        """The next batch; with `wait` as soon as there is one."""
        try:
            served = await self._next_batch(request, query)
        except NotRegistered as error:
            return {"status": "error", "message": str(error), "batch": []}
        if served is None:
            return {"batch": None}
        if wire.prefers_msgpack(request.headers.get("accept")):
            return stream(request, packed_batch(*_parts(served)), wire.MSGPACK, compress=False)
        return stream(request, json_batch(*_parts(served)), wire.JSON, compress=True)

    @endpoint("POST", "/batch/{batch_id}/ack", body_optional=True)
    async def ack(self, request: Request, body: wire.Ack) -> wire.LeaseResponse:
        """The batch is trained."""
        return await self.service.acknowledge(request.path_params["batch_id"], body.step)

    @endpoint("POST", "/batch/{batch_id}/extend")
    async def extend(self, request: Request, query: wire.ExtendQuery) -> wire.LeaseResponse:
        """Hold the batch for longer."""
        return await self.service.extend(request.path_params["batch_id"], query.lease, query.step)

    @endpoint("POST", "/batch/{batch_id}/release")
    async def release(self, request: Request) -> wire.LeaseResponse:
        """Put the batch back."""
        return await self.service.release(request.path_params["batch_id"])

    @endpoint("POST", "/evaluation")
    async def evaluation(self, request: Request, body: wire.Evaluation) -> wire.EvaluationResponse:
        """Post figures on held-out prompts."""
        return self.service.take_evaluation(body)

    @endpoint("GET", "/evaluations")
    async def evaluations(self, request: Request, query: wire.EvaluationsQuery) -> wire.Evaluations:
        """The newest evaluations."""
        return self.service.evaluations_after(query.after)

    @endpoint("GET", "/latest_example")
    async def latest_example(self, request: Request) -> object:
        """The newest group, or empty lists."""
        if self.service.latest is None:
            return _EMPTY_EXAMPLE
        return stream(request, json_group(self.service.latest), wire.JSON, compress=True)

    @endpoint("POST", "/reset_data")
    async def reset_data(self, request: Request) -> Response:
        """Forget everything."""
        log.warning("reset by %s", request.client.host if request.client else "an unknown client")
        await self.service.reset()
        return PlainTextResponse("Reset successful")

    @endpoint("GET", "/reset_data", changes=True)
    async def reset_data_by_get(self, request: Request) -> Response:
        """Forget everything; not for browsers."""
        if from_browser(request.scope["headers"]):
            raise ApiError(403, Problem("GET /reset_data", "a browser", "a program", "use POST /reset_data"))
        return await self.reset_data(request)

    @endpoint("GET", "/overview")
    async def overview(self, request: Request) -> Overview:
        """What the status page shows."""
        return self.service.overview()

    @endpoint("GET", "/report")
    async def report(self, request: Request) -> Response:
        """The run's report."""
        path = self.service.settings.report
        if path is None or not path.exists():
            raise ApiError(404, Problem("GET /report", "none yet", "a report", "grpo report RUN_DIR --watch"))
        return HTMLResponse(await asyncio.to_thread(path.read_bytes), headers=PAGE_HEADERS)

    @endpoint("GET", "/metrics")
    async def metrics_text(self, request: Request) -> Response:
        """For Prometheus."""
        return respond_bytes(request, self.metrics.text(), self.metrics.content_type)

    async def _next_batch(self, request: Request, query: wire.BatchQuery) -> Served | None:
        """The next batch, or None where none comes within `?wait=`."""
        service, queue = self.service, self.service.queue
        until = service.timer() + self._wait(query.wait)
        while True:
            run = queue.run
            served = await service.next_batch(query.lease, query.request, query.uuid)
            left = until - service.timer()
            if served is not None or left <= 0 or service.batch_waiters.ended:
                return served
            await while_there(request, service.batch_waiters.until(partial(_may_answer, queue, run), left))

    def _wait(self, seconds: float | None) -> float:
        """How long a request may be held: an environment must be heard of several times within its time-out."""
        return min(seconds or 0.0, self.service.settings.env_timeout / 3)

    async def message(self, request: Request, message_type: type[T], *, optional: bool = False) -> T:
        """Read and decode a request's body."""
        async with self.bodies.read(request) as body:
            if optional and not body:
                return message_type()
            return intake.decode(body, message_type, request.headers.get("content-type"))


async def _read(size: int, read: Callable[P, Read], *args: P.args, **kwargs: P.kwargs) -> Read:
    """Parse `size` bytes, in a thread if they are many."""
    if size < intake.LONG_BODY:
        return read(*args, **kwargs)
    return await asyncio.to_thread(read, *args, **kwargs)


def _refuse(scope: Scope, refusal: Refusal) -> Response:
    """The answer of the gate: where a browser opens the page without the key, the page itself, which asks for it."""
    request = Request(scope)
    error = ApiError(refusal.status, refusal.problem)
    opens_page = refusal.status == 401 and (scope["method"], scope["path"]) == ("GET", "/")
    if opens_page and "text/html" in request.headers.get("accept", ""):
        response: Response = HTMLResponse(STATUS_HTML, refusal.status, PAGE_HEADERS)
    else:
        response = respond(request, error.response(), refusal.status)
    if refusal.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of one service."""
    api = Api(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        timekeeper = asyncio.create_task(service.keep_time())
        yield
        timekeeper.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError):
            await timekeeper

    cors = service.settings.cors_origins
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])]
        if cors
        else [],
        exception_handlers=dict.fromkeys(_REFUSALS, _refused),
        lifespan=lifespan,
    )
    app.state.api = api
    settings = service.settings
    return Gate(
        app,
        host=settings.host,
        keys=[settings.api_key] if settings.api_key else [],
        origins=cors,
        answer=_refuse,
    )


def _may_answer(queue: RolloutQueue, run: Run | None) -> bool:
    """Whether GET /batch has an answer, or a trainer has registered since the run was `run`."""
    return queue.batch_ready or queue.run is not run


def _parts(served: Served) -> tuple[list[bytes], dict[str, object]]:
    if served.lease is None:
        return served.payloads, {}
    return served.payloads, {
        "batch_id": served.lease.batch_id,
        "expires_in_s": served.lease.seconds,
        "current_step": served.current_step,
    }


def _post_key(request: Request) -> bytes | None:
    key = request.headers.get("idempotency-key")
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"post").digest() if key else None


async def _refused(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in an error of `_REFUSALS`; the status page lists what clients did wrong."""
    api: Api = request.app.state.api
    match error:
        case ClientDisconnect():
            answer = Response(status_code=400)  # nobody is left to read it
        case HTTPException():
            answer = respond(request, wire.ErrorResponse(detail=error.detail), error.status_code)
            answer.headers.update(error.headers or {})
        case ApiError():
            answer = respond(request, error.response(), error.status)
            if isinstance(error, QueueFull):
                answer.headers["Retry-After"] = str(error.RETRY_AFTER_S)
            else:
                api.service.refuse(f"{request.method} {request.url.path}", error.status, str(error))
        case StoreError():  # the server is about to end, and says why
            answer = respond(request, wire.ErrorResponse(detail=str(error)), 503)
        case _:  # a fault of ours, which the log has
            answer = respond(request, wire.ErrorResponse(detail="internal error; the rollout API's log has it"), 500)
    api.metrics.count(getattr(request.scope.get("route"), "path", "unknown"), answer.status_code)
    return answer


_REFUSALS = (ClientDisconnect, HTTPException, ApiError, StoreError, Exception)
