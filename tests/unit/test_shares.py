"""A request's share of the engine: how many tokens it may ask for, and how many of its completions begin at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from vllm_server.errors import ServeError
from vllm_server.shares import FULL_LENGTHS, LEAST_PLACES, Share, ShareOfRequest, Shares

LONGEST = 100
LIMIT = FULL_LENGTHS * LONGEST  # 102,400 tokens


class StandInEngine:
    """Remembers what it was given; a completion ends when its name leaves `unfinished`."""

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self.begun: list[str] = []
        self.fault: ServeError | None = None

    async def add(self, request: Any) -> None:
        self.begun.append(request.request_id)
        self.unfinished.add(request.request_id)

    async def passage(self) -> None:
        if self.fault is not None:
            raise self.fault


def shares(engine: StandInEngine, places: int = 2) -> Shares:
    return Shares(places, LONGEST, engine.unfinished, engine.passage)


def named(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def sampling(n: int, max_tokens: int | None) -> Any:
    return SimpleNamespace(n=n, max_tokens=max_tokens)


async def asked(*calls: Any) -> list[tuple[int, bytes]]:
    """Status and body of an HTTP request to each of these applications, all at once."""

    async def one(app: Any) -> tuple[int, bytes]:
        heard: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            heard.append(message)

        await ShareOfRequest(app)({"type": "http"}, receive, send)
        starts = [message["status"] for message in heard if message["type"] == "http.response.start"]
        assert len(starts) == 1
        return starts[0], b"".join(message.get("body", b"") for message in heard)

    return await asyncio.gather(*(asyncio.create_task(one(app)) for app in calls))


def adding(engine: StandInEngine, rules: Shares, *names: str, at_once: bool = False) -> Any:
    """An application that begins these completions, in turn or all at once."""
    add = rules.in_turn(engine.add)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if at_once:
            await asyncio.gather(*(add(named(name)) for name in names))
        else:
            for name in names:
                await add(named(name))
        await PlainTextResponse("done")(scope, receive, send)

    return app


# tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "max_tokens", "tokens"),
    [(8, 16, 128), (1024, 100, LIMIT), (8000, 12, 96_000), (64, 10**9, 6400), (64, None, 6400)],
)
def test_a_request_is_counted_by_what_it_may_generate(n: int, max_tokens: int | None, tokens: int) -> None:
    share = Share()
    shares(StandInEngine()).count(share, sampling(n, max_tokens))
    assert share.tokens == tokens and share.refusal is None


@pytest.mark.parametrize(("n", "max_tokens"), [(1025, 100), (1025, None), (8000, 13), (LIMIT + 1, 1)])
def test_a_request_for_too_many_tokens_is_refused_in_parts(n: int, max_tokens: int | None) -> None:
    share = Share()
    with pytest.raises(ServeError) as refused:
        shares(StandInEngine()).count(share, sampling(n, max_tokens))
    assert (refused.value.status, refused.value.field) == (422, "n x max_tokens")
    assert str(share.tokens) in refused.value.got and str(LIMIT) in refused.value.wanted and refused.value.fix
    assert share.refusal is refused.value


def test_a_list_of_prompts_is_counted_together_and_refused_before_anything_is_generated() -> None:
    generated: list[int] = []

    async def generate(prompt: int, sampling_params: Any, request_id: str) -> AsyncGenerator[int, None]:
        generated.append(prompt)
        yield prompt

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        counted = shares(StandInEngine()).counted(generate)
        with suppress(ServeError):
            for prompt in range(3):  # 3 x 400 x 100 tokens; no generator is asked for anything yet
                counted(prompt, sampling_params=sampling(400, None), request_id="r")
        await PlainTextResponse("in its own words", 400)(scope, receive, send)

    ((status, body),) = asyncio.run(asked(app))
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (422, 422, "n x max_tokens")
    assert "120000" in error["got"]
    assert not generated


def test_an_answer_that_has_begun_is_not_replaced() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with suppress(ServeError):
            shares(StandInEngine()).counted(lambda *_: None)(0, sampling(2000, None))  # type: ignore[arg-type]
        await send({"type": "http.response.body", "body": b"the rest"})

    assert asyncio.run(asked(app)) == [(200, b"the rest")]


# places ----------------------------------------------------------------------------------------------------


def test_completions_beyond_the_share_wait_for_their_own_and_other_requests_go_past_them() -> None:
    engine = StandInEngine()

    async def story() -> None:
        rules = shares(engine)
        large = asyncio.create_task(asked(adding(engine, rules, *"abcde")))
        while len(engine.begun) < 2:
            await asyncio.sleep(0)
        await asked(adding(engine, rules, "x", "y"))
        assert engine.begun == ["a", "b", "x", "y"]
        for ended, begun in (("a", "c"), ("c", "d"), ("b", "e")):
            engine.unfinished.discard("x")  # another's end is no place of theirs
            engine.unfinished.discard(ended)
            while begun not in engine.begun:
                await asyncio.sleep(0.001)
        assert await large == [(200, b"done")]

    asyncio.run(asyncio.wait_for(story(), 60))
    assert engine.begun == [*"abxycde"]


def test_a_list_of_prompts_has_one_share() -> None:
    engine = StandInEngine()
    names = [str(number) for number in range(50)]

    async def story() -> None:
        asking = asyncio.create_task(asked(adding(engine, shares(engine, 8), *names, at_once=True)))
        while not asking.done():
            assert len(engine.unfinished) <= 8
            if engine.unfinished and len(engine.begun) >= min(8, len(names)):
                engine.unfinished.pop()
            await asyncio.sleep(0.001)
        assert asking.result() == [(200, b"done")]

    asyncio.run(asyncio.wait_for(story(), 60))
    assert engine.begun == names


def test_a_completion_that_waits_when_its_client_goes_is_forgotten() -> None:
    engine, forgotten = StandInEngine(), list[str]()
    rules = Shares(1, LONGEST, engine.unfinished, engine.passage, forgotten.append)

    async def scene() -> None:
        leaving = asyncio.create_task(asked(adding(engine, rules, "a", "b")))
        while engine.begun != ["a"]:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving

    asyncio.run(scene())
    assert forgotten == ["b"] and engine.begun == ["a"]


def test_a_completion_that_comes_while_the_weights_change_waits() -> None:
    engine, changed = StandInEngine(), asyncio.Event()

    async def passage() -> None:
        await changed.wait()

    async def story() -> None:
        rules = Shares(2, LONGEST, engine.unfinished, passage)
        asking = asyncio.create_task(asked(adding(engine, rules, "a")))
        await asyncio.sleep(0.02)
        assert engine.begun == []
        changed.set()
        assert await asking == [(200, b"done")]

    asyncio.run(asyncio.wait_for(story(), 60))
    assert engine.begun == ["a"]


def test_completions_that_wait_are_refused_when_none_may_begin() -> None:
    engine = StandInEngine()
    add_in_turn = adding(engine, shares(engine), *"abc")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await add_in_turn(scope, receive, send)
        except ServeError:
            await PlainTextResponse("in its own words", 400)(scope, receive, send)

    async def story() -> list[tuple[int, bytes]]:
        large = asyncio.create_task(asked(app))
        while len(engine.begun) < 2:
            await asyncio.sleep(0)
        engine.fault = ServeError(503, "weights", got="torn", wanted="whole ones", fix="write them again")
        engine.unfinished.clear()
        return await large

    ((status, body),) = asyncio.run(asyncio.wait_for(story(), 60))
    assert (status, json.loads(body)["error"]["param"]) == (503, "weights")
    assert engine.begun == ["a", "b"]


@pytest.mark.parametrize(("seqs", "engines", "places"), [(16, 1, LEAST_PLACES), (128, 1, 64), (256, 2, 256)])
def test_a_request_has_half_of_the_places_but_never_less_than_a_group(seqs: int, engines: int, places: int) -> None:
    names = [str(number) for number in range(600)]
    engine, unfinished = StandInEngine(), dict.fromkeys(names)
    vllm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=seqs),
            parallel_config=SimpleNamespace(data_parallel_size=engines),
            model_config=SimpleNamespace(max_model_len=LONGEST),
        ),
        engine_core=SimpleNamespace(add_request_async=engine.add),
        output_processor=SimpleNamespace(request_states=unfinished, abort_requests=None),
        generate=lambda *_, **__: None,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for name in names:
            await vllm.engine_core.add_request_async(named(name))
        await PlainTextResponse("done")(scope, receive, send)

    async def story() -> int:
        Shares.install(vllm, engine.passage)
        asking = asyncio.create_task(asked(app))
        for _ in range(2 * len(names)):
            await asyncio.sleep(0)
        at_first = len(engine.begun)
        unfinished.clear()  # all have ended; each later one ends at once
        await asking
        return at_first

    assert asyncio.run(asyncio.wait_for(story(), 60)) == places
    assert engine.begun == names
