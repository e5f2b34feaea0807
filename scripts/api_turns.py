"""How long the rollout API's event loop is held by long groups: `python scripts/api_turns.py`.

Each turn is measured by the CPU time that it takes, so that what else a machine does is no matter. A turn is what runs
between two places where others may have theirs: `http.in_turns` for what comes in, `http.stream` for what goes out.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Generator, Iterable
from typing import Any

from environments.api import gzipping, intake, wire
from environments.api.answers import json_group
from environments.api.http import TURN_S
from environments.api.service import Service
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


def turns(steps: Iterable[Any]) -> list[float]:
    """Milliseconds of CPU of each turn: steps are put together until one has lasted `TURN_S`, as the server does."""
    took = [0.0]
    began = time.thread_time()
    for _ in steps:
        took[-1] = 1e3 * (time.thread_time() - began)
        if took[-1] >= 1e3 * TURN_S:
            took.append(0.0)
            began = time.thread_time()
    took[-1] = 1e3 * (time.thread_time() - began)
    return took


def compressed(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """As `http.stream` sends them to a client that takes gzip."""
    deflater = gzipping.deflater()
    for piece in pieces:
        yield deflater.compress(piece)
    yield deflater.flush()


def main() -> None:
    """A row for each shape and way."""
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
            service = Service(Settings())
            say(f"POST {sequences} x {tokens}, {name}", len(body), turns(intake.take_one(service, body, kind, None)))
            if kind == wire.JSON:
                steps = intake.take_list(service, b"[" + body + b"]", kind, None)
                say(f"POST {sequences} x {tokens}, list in JSON", len(body), turns(steps))
        assert service.latest is not None
        size = sum(map(len, json_group(service.latest)))
        say(f"GET /latest_example, {sequences} x {tokens}", size, turns(compressed(json_group(service.latest))))


def say(what: str, size: int, took: list[float]) -> None:
    """One row."""
    print(f"{f'{what} ({size / 1e6:.1f} MB)':<44}{max(took):>11.1f} ms{sum(took):>9.0f} ms")


if __name__ == "__main__":
    main()
