"""What stands in for other processes: servers that answer from a function, a scripted policy, the rollout API here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar, cast

import uvicorn
from starlette.types import ASGIApp

from environments.api import wire
from environments.api.app import build_app
from environments.api.http import Waiters
from environments.api.service import Service
from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.peers.http import Answer
from environments.peers.inference import Completion, Sampling
from environments.peers.rollout_api import RolloutApi
from environments.running.runner import Runner, until
from environments.scoring import settled
from tests.processes import free_port

EnvT = TypeVar("EnvT", bound=BaseEnv[Any, Any])


def pass_time(seconds: float) -> None:
    """Set the clock of the running event loop forward: its time-outs that are shorter are over."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: Message
    content: bytes
    connection: tuple[str, int] = ("", 0)
    """Address of the other end."""

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True)
class Reply:
    """An answer: `json`, or else `content` as it is."""

    status: int = 200
    json: Any = None
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    closes: bool = False
    """The connection, without saying so."""

    @property
    def body(self) -> bytes:
        return self.content if self.json is None else json.dumps(self.json).encode()


Handle = Callable[[Asked], Reply | None]
"""What is answered to a request; None: the connection is closed without a word."""


@contextmanager
def answering(handle: Handle) -> Iterator[str]:
    """Yield the URL of a server that answers from a function; each connection has a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = handle(Asked(self.command, self.path, self.headers, content, self.client_address))
            if reply is None:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)
            self.close_connection |= reply.closes

        do_GET = do_POST = do_HEAD = answer

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def generated(asked: Mapping[str, Any], *completions: Sequence[int], version: int = 0, **others: Any) -> dict[str, Any]:
    """The answer of `/generate` with these ids, each with a logprob of -0.5, and without text."""
    answer = {"text": [""] * len(completions), "prompt": None, "finish_reasons": ["stop"] * len(completions)}
    logprobs = [[[{str(token): -0.5}] for token in ids] for ids in completions]
    answer |= {"policy_version": version, "model": "m", "prompt_token_ids": asked["prompt"]["prompt_token_ids"]}
    return {**answer, "token_ids": [*completions], "logprobs": logprobs, **others}


@dataclass
class Scripted:
    """An inference server, without HTTP, that says texts in turn as version 4 of the policy.

    Attributes:
        say: The texts that answer a prompt, in which the end token is written out.
        asked: Prompt, number of completions and sampling of each request.
    """

    tokenizer: Any
    say: Callable[[list[int]], Sequence[str]]
    asked: list[tuple[list[int], int, Sampling]] = field(default_factory=list)

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt_token_ids, n, sampling))
        texts = self.say(prompt_token_ids)
        return [self._completion(prompt_token_ids, texts[i % len(texts)]) for i in range(n)]

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        raise NotImplementedError

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise NotImplementedError

    async def close(self) -> None:
        return

    def _completion(self, prompt: list[int], text: str) -> Completion:
        ids = self.tokenizer.encode(text)
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Completion(prompt, ids, [-0.25] * len(ids), text, reason, 4)


def scripted(
    env_cls: type[EnvT], *says: str, config: type[BaseEnvConfig] = BaseEnvConfig, tokenizer: Any = None, **settings: Any
) -> EnvT:
    """Return an environment before a server that says these texts in turn; by default of the demo model's tokenizer."""
    if tokenizer is None:
        from environments.demo_model.model import build_tokenizer  # imports torch

        tokenizer = build_tokenizer()
    made = config(**({"tokenizer_name": "demo", "group_size": max(1, len(says))} | settings))
    return env_cls(made, Scripted(tokenizer, lambda _: says), tokenizer)


def then_closed(client: Any, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return what work on a client or an environment gives, which is closed after it."""

    async def whole() -> Any:
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(whole(), 120))


def after_setup(env: BaseEnv[Any, Any], work: Callable[[], Awaitable[Any]]) -> Any:
    """Return what work on an environment gives, between its `setup` and its `close`."""

    async def prepared(env: BaseEnv[Any, Any]) -> Any:
        await settled(env.setup())
        return await work()

    return then_closed(env, prepared)


def registration(batch_size: int, **fields: Any) -> wire.Register:
    """What a trainer registers with; `fields` replaces some of it."""
    given: dict[str, Any] = {"wandb_group": "group", "wandb_project": "project", "max_token_len": 16, "num_steps": 3}
    given |= {"checkpoint_dir": "checkpoints", "save_checkpoint_interval": 3, "starting_step": 0}
    return wire.Register(batch_size=batch_size, **(given | fields))


class LocalApi:
    """The rollout API in this event loop, on a port that can be without it for a while, or get another."""

    def __init__(self, service: Service, app: ASGIApp | None = None) -> None:
        self.service = service
        self.app = app
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve; also again after `stop`."""
        if self.service.news_waiters.ended:
            self.service.batch_waiters, self.service.news_waiters = Waiters(), Waiters()
        app = self.app or build_app(self.service)
        config = uvicorn.Config(app, port=self.port, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._server.capture_signals = cast("Any", nullcontext)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Let the port go."""
        self.service.end_waits()
        self._server.should_exit = True
        await self._task

    async def exchange(self, service: Service) -> None:
        """Have another API in its place."""
        await self.stop()
        self.service = service
        await self.start()


@asynccontextmanager
async def local_api(service: Service, app: ASGIApp | None = None) -> AsyncIterator[LocalApi]:
    """Yield the API on a free port; requests go to `app` first, if it is given."""
    api = LocalApi(service, app)
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


async def serving(env: BaseEnv[Any, Any], served: Service | LocalApi, stop: asyncio.Event | None = None) -> None:
    """Run an environment for an API in this event loop."""
    if isinstance(served, Service):
        async with local_api(served) as local:
            return await serving(env, local, stop)
    api = RolloutApi(env.config.model_copy(update={"rollout_server_url": served.url}))
    try:
        await until(stop or asyncio.Event(), Runner(env, api).run())
    finally:
        await api.close()


async def trained(
    service: Service, steps: int, environment: asyncio.Task[None] | None = None
) -> list[list[wire.ScoredData]]:
    """Take and acknowledge batches as a trainer does; return their groups. Raise what ends the environment."""
    taken = []
    for _ in range(steps):
        while (served := await service.next_batch(lease=60.0)) is None:
            await asyncio.sleep(0.01)
            if environment is not None and environment.done():
                environment.result()
        taken.append([wire.decode_group(payload) for payload in served.payloads])
        assert served.lease is not None
        await service.acknowledge(served.lease.batch_id, None)
    return taken
