"""The rollout API's routes: each reads its request, asks the service and answers. Nothing is decided here."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

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
from environments.api.http import ApiError, BodyReader, respond, respond_bytes, stream
from environments.api.limit import RETRY_AFTER_S, QueueFull
from environments.api.metrics import Metrics
from environments.api.openapi import openapi
from environments.api.page import DOCS_HTML, PAGE_HEADERS, STATUS_HTML
from environments.api.polling import StatusEnvShortcut
from environments.api.queue import RolloutQueue
from environments.api.records import LeaseError, NotRegistered, Run, UnknownEnvironment
from environments.api.service import Served, Service
from environments.api.store import StoreError
from environments.api.waiting import LONGEST_WAIT_S, while_there
from grpo_common.errors import Problem
from grpo_common.gate import Gate, Refusal, from_browser

log = logging.getLogger("rollout-api")

MAX_LEASE_S = 24 * 3600.0
Read = TypeVar("Read")
Answer = TypeVar("Answer")
_PAGES = {"/": STATUS_HTML, "/docs": DOCS_HTML}
_EMPTY_EXAMPLE: dict[str, list[object]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
        *("inference_logprobs", "messages", "images"),
    )
}


class Api:
    """Endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.bodies = BodyReader(service.settings.max_body_mb << 20)
        self.metrics = Metrics(service)
        self.parsing = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Every endpoint; `environments.api.openapi` describes the same ones."""
        return [
            Route("/", self.root),
            Route("/register", self.register, methods=["POST"]),
            Route("/register-env", self.register_env, methods=["POST"]),
            Route("/disconnect-env", self.disconnect_env, methods=["POST"]),
            Route("/wandb_info", self.wandb_info),
            Route("/info", self.info),
            Route("/status", self.status),
            Route("/status-env", self.status_env),
            Route("/scored_data", self.scored_data, methods=["POST"]),
            Route("/scored_data_list", self.scored_data_list, methods=["POST"]),
            Route("/batch", self.batch),
            Route("/batch/{batch_id}/ack", self.ack, methods=["POST"]),
            Route("/batch/{batch_id}/extend", self.extend, methods=["POST"]),
            Route("/batch/{batch_id}/release", self.release, methods=["POST"]),
            Route("/evaluation", self.evaluation, methods=["POST"]),
            Route("/evaluations", self.evaluations),
            Route("/latest_example", self.latest_example),
            Route("/reset_data", self.reset_data, methods=["GET", "POST"]),
            Route("/overview", self.overview),
            Route("/metrics", self.metrics_text),
            Route("/openapi.json", self.openapi_json),
            Route("/docs", self.docs),
        ]

    async def root(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(STATUS_HTML, headers=PAGE_HEADERS)
        return respond(request, wire.Message(message="Rollout API"))

    async def register(self, request: Request) -> Response:
        return respond(request, await self.service.register(await self._message(request, wire.Register)))

    async def register_env(self, request: Request) -> Response:
        message = await self._message(request, wire.RegisterEnv)
        return respond(request, await self.service.register_environment(message))

    async def disconnect_env(self, request: Request) -> Response:
        message = await self._message(request, wire.EnvIdentifier)
        try:
            await self.service.disconnect(message.env_id)
        except UnknownEnvironment as error:
            # As environments of the original protocol expect it: a failure that is no HTTP error.
            return respond(request, wire.DisconnectResponse(status="failure", error=str(error)))
        return respond(request, wire.DisconnectResponse(status="success"))

    async def wandb_info(self, request: Request) -> Response:
        run = self.service.queue.run
        return respond(
            request,
            wire.WandbInfo(
                group=run.trainer.wandb_group if run else None, project=run.trainer.wandb_project if run else None
            ),
        )

    async def info(self, request: Request) -> Response:
        run = self.service.queue.run
        return respond(
            request,
            wire.Info(
                batch_size=run.trainer.batch_size if run else -1, max_token_len=run.trainer.max_token_len if run else -1
            ),
        )

    async def status(self, request: Request) -> Response:
        return respond(request, self.service.status())

    async def status_env(self, request: Request) -> Response:
        if (given := request.query_params.get("env_id")) is not None:
            env_id = _number(given, "env_id", 0, 2**53, whole=True)
        else:
            env_id = (await self._message(request, wire.EnvIdentifier)).env_id
        waits, seen = "wait" in request.query_params, request.query_params.get("seen")
        try:
            status = self.service.status_env(int(env_id), waits=waits)
            if waits and status.seen == seen:
                news = self.service.news_waiters.until(lambda: self.service.seen != seen, self._wait(request))
                await while_there(request, news)
                status = self.service.status_env(int(env_id), waits=waits)
            return respond(request, status)
        except UnknownEnvironment as error:
            raise ApiError(404, error.problems[0], "env_id") from None

    async def scored_data(self, request: Request) -> Response:
        return respond(request, await self._take(request, intake.read_one, intake.take_one))

    async def scored_data_list(self, request: Request) -> Response:
        answer = await self._take(request, intake.read_list, intake.take_list)
        return respond(request, answer, 422 if answer.rejected else 200)

    async def evaluation(self, request: Request) -> Response:
        try:
            return respond(request, self.service.take_evaluation(await self._message(request, wire.Evaluation)))
        except UnknownEnvironment as error:
            raise ApiError(404, error.problems[0], "env_id") from None

    async def evaluations(self, request: Request) -> Response:
        after = int(_number(request.query_params.get("after", "0"), "after", 0, 2**53, whole=True))
        return respond(request, self.service.evaluations_after(after))

    async def batch(self, request: Request) -> Response:
        query = request.query_params
        lease = _number(query["lease"], "lease", 0.1, MAX_LEASE_S) if "lease" in query else None
        uuid = _number(query["uuid"], "uuid", 0, 2**53, whole=True) if "uuid" in query else None
        try:
            served = await self._next_batch(request, lease, None if uuid is None else int(uuid))
        except NotRegistered as error:
            return respond(request, {"status": "error", "message": str(error), "batch": []})
        except LeaseError as error:
            raise ApiError(error.status, error.problems[0], "uuid", error.reason) from None
        if served is None:
            return respond(request, {"batch": None})
        if wire.prefers_msgpack(request.headers.get("accept")):
            return stream(request, packed_batch(*_parts(served)), wire.MSGPACK, compress=False)
        return stream(request, json_batch(*_parts(served)), wire.JSON, compress=True)

    async def ack(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            message = intake.decode(body, wire.Ack, request.headers.get("content-type")) if body else wire.Ack()
        return await self._lease_answer(
            request, self.service.acknowledge(request.path_params["batch_id"], message.step)
        )

    async def extend(self, request: Request) -> Response:
        query = request.query_params
        lease = _number(query.get("lease", ""), "lease", 0.1, MAX_LEASE_S)
        step = int(_number(query["step"], "step", 0, 2**53, whole=True)) if "step" in query else None
        return await self._lease_answer(request, self.service.extend(request.path_params["batch_id"], lease, step))

    async def release(self, request: Request) -> Response:
        return await self._lease_answer(request, self.service.release(request.path_params["batch_id"]))

    async def latest_example(self, request: Request) -> Response:
        if self.service.latest is None:
            return respond(request, _EMPTY_EXAMPLE)
        return stream(request, json_group(self.service.latest), wire.JSON, compress=True)

    async def reset_data(self, request: Request) -> Response:
        if request.method != "POST" and from_browser(request.scope["headers"]):
            raise ApiError(403, Problem("GET /reset_data", "a browser", "a program", "use POST /reset_data"))
        log.warning("reset by %s", request.client.host if request.client else "an unknown client")
        await self.service.reset()
        return PlainTextResponse("Reset successful")

    async def overview(self, request: Request) -> Response:
        return respond(request, self.service.overview())

    async def metrics_text(self, request: Request) -> Response:
        return respond_bytes(request, self.metrics.text(), self.metrics.content_type)

    async def openapi_json(self, request: Request) -> Response:
        return respond_bytes(request, openapi(), wire.JSON)

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(DOCS_HTML, headers=PAGE_HEADERS)

    async def _next_batch(self, request: Request, lease: float | None, uuid: int | None) -> Served | None:
        """The next batch, or None where none comes within `?wait=`."""
        service, queue, key = self.service, self.service.queue, request.query_params.get("request")
        until = service.timer() + self._wait(request)
        while True:
            run = queue.run
            served = await service.next_batch(lease, key, uuid)
            left = until - service.timer()
            if served is not None or left <= 0 or service.batch_waiters.ended:
                return served
            await while_there(request, service.batch_waiters.until(partial(_may_answer, queue, run), left))

    def _wait(self, request: Request) -> float:
        """How long a request may be held: an environment must be heard of several times within its time-out."""
        seconds = _number(request.query_params.get("wait", "0"), "wait", 0.0, LONGEST_WAIT_S)
        return min(seconds, self.service.settings.env_timeout / 3)

    async def _message(self, request: Request, message_type: type[wire.T]) -> wire.T:
        async with self.bodies.read(request) as body:
            return intake.decode(body, message_type, request.headers.get("content-type"))

    async def _take(
        self,
        request: Request,
        read: Callable[[bytes, str | None], Read],
        take: Callable[[Service, Read, bytes | None], Answer],
    ) -> Answer:
        """Read a body, take its groups in and answer when they are written.

        Bodies are parsed one at a time with a turn for all others between two: however many clients post at once,
        nobody waits for more than one of them.
        """
        content_type, key = request.headers.get("content-type"), _post_key(request)
        self.service.limit.check()  # first without the body: who is refused comes again, and many do
        async with self.bodies.read(request) as body, self.parsing:
            self.service.limit.check()
            long = len(body) >= intake.LONG_BODY
            posted = await asyncio.to_thread(read, body, content_type) if long else read(body, content_type)
            answer = take(self.service, posted, key)
            await asyncio.sleep(0)
        await self.service.written()
        return answer

    async def _lease_answer(self, request: Request, answer: Awaitable[wire.LeaseResponse]) -> Response:
        try:
            return respond(request, await answer)
        except LeaseError as error:
            raise ApiError(error.status, error.problems[0], "batch_id", error.reason) from None


def _refuse(scope: Scope, refusal: Refusal) -> Response:
    """The answer of the gate: where a browser opens a page without the key, the page itself, which asks for it."""
    request = Request(scope)
    error = ApiError(refusal.status, refusal.problem)
    page = _PAGES.get(scope["path"]) if refusal.status == 401 and scope["method"] == "GET" else None
    if page is not None and "text/html" in request.headers.get("accept", ""):
        response: Response = HTMLResponse(page, refusal.status, PAGE_HEADERS)
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
        routes=api.routes(),
        middleware=[Middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])]
        if cors
        else [],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            QueueFull: _queue_full,
            StoreError: _store_error,
        },
        lifespan=lifespan,
    )
    settings = service.settings
    return Gate(
        StatusEnvShortcut(api.metrics.around(app), service, api.metrics),
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
        "expires_in_s": served.expires_in_s,
        "current_step": served.current_step,
    }


def _post_key(request: Request) -> bytes | None:
    key = request.headers.get("idempotency-key")
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"post").digest() if key else None


def _number(text: str, field: str, low: float, high: float, whole: bool = False) -> float:
    try:
        number = int(text) if whole and len(text) < 20 else float(text)
    except ValueError:
        raise ApiError(422, Problem(field, repr(text[:40]), "a number"), field) from None
    if not low <= number <= high:
        raise ApiError(422, Problem(field, text[:40], f"{low:g} to {high:g}"), field)
    return number


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond(request, error.response(), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = respond(request, wire.ErrorResponse(detail=error.detail), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _queue_full(request: Request, error: Exception) -> Response:
    answer = respond(request, wire.ErrorResponse(detail=str(error)), 429)
    answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer


async def _store_error(request: Request, error: Exception) -> Response:
    return respond(request, wire.ErrorResponse(detail=str(error)), 503)  # the server is about to end, and says why


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody is left to read it
