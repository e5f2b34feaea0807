"""Limit what one HTTP request may use of the engine: its number of tokens, and its share of concurrent sequences.

vLLM's scheduler begins completions in the order of their arrival. Without shares, a later request waits until all
completions of a large one have begun. With them, a request has a bounded number of completions in the engine. Its
other completions wait here until an earlier one of the same request ends. They then join the end of the engine's
queue, behind requests that arrived meanwhile.

All routes that generate, vLLM's own included, call `generate` of the engine, which passes each completion to the
engine's process by `add_request_async`. `Shares.install` replaces both.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_server import compat, seams
from vllm_server.errors import ServeError
from vllm_server.http import error_response

LEAST_PLACES = 64
"""A request with up to this many completions is never divided, however few sequences the engine runs at once."""

FULL_LENGTHS = 1024
"""Limit of a request's tokens, as a number of completions of the model's full length."""

_LOOK_S = 0.005  # interval of checks whether a completion of a large request has ended


@dataclass(eq=False)
class Share:
    """What one HTTP request uses, over all its prompts.

    Attributes:
        tokens: the number of tokens that it asked for.
        running: the engine's ids of its completions in the engine; some may have ended.
        door: a lock, held by the completion that begins next.
        refusal: why the request is refused.
    """

    tokens: int = 0
    running: set[str] = field(default_factory=set)
    door: asyncio.Lock = field(default_factory=asyncio.Lock)
    refusal: ServeError | None = None


_OF_REQUEST: ContextVar[Share | None] = ContextVar("share", default=None)


class ShareOfRequest:
    """ASGI middleware that gives each HTTP request a share, and answers a request that exceeds it.

    vLLM's routes would answer such a refusal with 400 and another message.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        share, begun = Share(), False
        _OF_REQUEST.set(share)  # visible to this request only: uvicorn handles each request in a task

        async def answer(message: Message) -> None:
            nonlocal begun
            if begun or share.refusal is None:
                begun = True
                await send(message)

        await self.app(scope, receive, answer)
        if share.refusal is not None and not begun:
            await error_response(share.refusal)(scope, receive, send)


@dataclass(frozen=True)
class Shares:
    """The limits of one engine.

    Attributes:
        places: how many completions of a request may be in the engine at once.
        longest: tokens of the longest sequence that the model supports.
        unfinished: the engine's ids of all completions that have not ended.
        passage: waits while no request may begin; raises a ServeError if none can.
        forget: removes a completion that has not begun from vLLM's tables.
    """

    places: int
    longest: int
    unfinished: Container[str]
    passage: Callable[[], Awaitable[None]]
    forget: Callable[[str], object] = lambda _: None

    @classmethod
    def install(cls, engine: compat.Engine, passage: Callable[[], Awaitable[None]]) -> None:
        """Apply the limits to every request of this engine.

        Raises:
            FatalError: this vLLM has no table of unfinished requests.
        """
        config, processor = engine.vllm_config, engine.output_processor
        for seam in ("request_states", "abort_requests"):
            if not hasattr(processor, seam):
                raise seams.moved(f"OutputProcessor.{seam}")
        places = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size // 2
        shares = cls(
            max(LEAST_PLACES, places),
            config.model_config.max_model_len,
            processor.request_states,
            passage,
            lambda name: processor.abort_requests([name], internal=True),
        )
        owner: Any = engine
        owner.generate = shares.counted(engine.generate)
        owner.engine_core.add_request_async = shares.in_turn(engine.engine_core.add_request_async)

    def counted(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
        """Return `generate` with a check: it refuses a request for too many tokens before it sends any answer."""

        def counted(prompt: Any, sampling_params: Any, *given: Any, **named: Any) -> AsyncGenerator[Any, None]:
            self.count(_OF_REQUEST.get() or Share(), sampling_params)
            return generate(prompt, sampling_params, *given, **named)

        return counted

    def count(self, share: Share, params: Any) -> None:
        """Add the completions of one prompt to the request's tokens.

        Raises:
            ServeError: 422, the request asks for too many tokens.
        """
        length = self.longest if params.max_tokens is None else min(params.max_tokens, self.longest)
        share.tokens += params.n * length
        limit = FULL_LENGTHS * self.longest
        if share.tokens > limit:
            share.refusal = ServeError(
                422,
                "n x max_tokens",
                got=f"{share.tokens} tokens (of the prompts read so far, if there are several)",
                wanted=f"{limit} or fewer: {FULL_LENGTHS} completions of {self.longest} tokens",
                fix="lower n or max_tokens, or ask in several requests",
            )
            raise share.refusal

    def in_turn(self, add: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        """Return `add` with a wait: a completion begins when fewer than `places` of its request are in the engine."""

        async def add_in_turn(request: Any) -> None:
            share = _OF_REQUEST.get()
            if share is not None:
                await self._enter(share, request.request_id)
            await add(request)

        return add_in_turn

    async def _enter(self, share: Share, name: str) -> None:
        """Wait until the completion of this name may begin. vLLM has registered it already."""
        try:
            async with share.door:
                if len(share.running) >= self.places:
                    await self._wait(share)
                await self._pass(share)
                share.running.add(name)
        except BaseException:
            self.forget(name)  # vLLM removes only completions that its engine has begun
            raise

    async def _wait(self, share: Share) -> None:
        while True:
            # Polled: vLLM signals the end of a completion only to its own consumer.
            share.running = {name for name in share.running if name in self.unfinished}
            if len(share.running) < self.places:
                break
            await asyncio.sleep(_LOOK_S)

    async def _pass(self, share: Share) -> None:
        """Wait while the weights change. The request itself may have passed before they began to."""
        try:
            await self.passage()
        except ServeError as error:
            share.refusal = error
            raise
