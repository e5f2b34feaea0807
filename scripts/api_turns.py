"""How long the rollout API's event loop is held by long groups: `python scripts/api_turns.py`.

Each turn is measured by its CPU time, so that other work on the machine does not count. A body is read in a thread: its
longest turn is the longest call into C, during which no other thread runs. A long answer is sent in turns of `TURN_S`.
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections.abc import Callable, Generator, Iterable
from typing import Any

from environments.api import intake, wire
from environments.api.answers import json_group
from environments.api.http import TURN_S, gzip_deflater
from environments.api.settings import Settings

SHAPES = ((16, 32_768), (32, 32_768), (64, 32_768))
"""Sequences of a group, tokens of each."""
LIMIT = Settings().max_body_mb << 20


def group(sequences: int, tokens: int) -> wire.PackedGroup:
    """One with all that is usual: masks, advantages and the server's logprobs for each token."""
    draw = random.Random(0)
    row = array("i", (draw.randrange(150_000) for _ in range(tokens))) * sequences
    logprobs = array("f", (-draw.random() for _ in range(tokens))) * sequences
    return wire.PackedGroup(
        lengths=[tokens] * sequences,
        tokens=row.tobytes(),
        masks=row.tobytes(),
        scores=[float(i) for i in range(sequences)],
        advantages=logprobs.tobytes(),
        inference_logprobs=logprobs.tobytes(),
    )


def turns(steps: Iterable[Any]) -> tuple[float, float]:
    """Milliseconds of CPU of the longest turn and of all; a turn is as many steps as last `TURN_S`, as in serving."""
    took = [0.0]
    began = time.thread_time()
    for _ in steps:
        took[-1] = 1e3 * (time.thread_time() - began)
        if took[-1] >= 1e3 * TURN_S:
            took.append(0.0)
            began = time.thread_time()
    took[-1] = 1e3 * (time.thread_time() - began)
    return max(took), sum(took)


def calls(read: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Milliseconds of CPU of the longest call into C, and in all."""
    began: list[float] = []
    longest = 0.0

    def watch(_frame: Any, event: str, _function: Any) -> None:
        nonlocal longest
        if event == "c_call":
            began.append(time.thread_time())
        elif event in ("c_return", "c_exception") and began:
            longest = max(longest, time.thread_time() - began.pop())

    sys.setprofile(watch)
    read(*arguments)
    sys.setprofile(None)
    start = time.thread_time()
    read(*arguments)
    return 1e3 * longest, 1e3 * (time.thread_time() - start)


def compressed(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """As `http.stream` sends them to a client that takes gzip."""
    deflater = gzip_deflater()
    for piece in pieces:
        yield deflater.compress(piece)
    yield deflater.flush()


def read_list(body: bytes, content_type: str) -> None:
    posted = intake.PostedList(body, content_type, None)
    for places, _ in posted.turns():
        posted.read(places)


def main() -> None:
    print(f"{'':<44}{'longest turn':>14}{'in all':>12}")
    for sequences, tokens in SHAPES:
        packed = group(sequences, tokens)
        lists = wire.unpack(packed)
        for name, body, kind in (
            ("MessagePack", wire.encode(packed, wire.MSGPACK), wire.MSGPACK),
            ("JSON", wire.encode(lists, wire.JSON), wire.JSON),
        ):
            if len(body) > LIMIT:
                continue  # refused before anything is read of it
            say(f"POST {sequences} x {tokens}, {name}", len(body), calls(intake.read_one, body, kind))
            if kind == wire.JSON:
                listed = b"[" + body + b"]"
                say(f"POST {sequences} x {tokens}, list in JSON", len(body), calls(read_list, listed, kind))
        payload = wire.encode(packed, wire.MSGPACK)
        size = sum(map(len, json_group(payload)))
        say(f"GET /latest_example, {sequences} x {tokens}", size, turns(compressed(json_group(payload))))


def say(what: str, size: int, took: tuple[float, float]) -> None:
    print(f"{f'{what} ({size / 1e6:.1f} MB)':<44}{took[0]:>11.1f} ms{took[1]:>9.0f} ms")


if __name__ == "__main__":
    main()
