"""Long requests, to see what an update does to those in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
import msgspec

from tests.integration.serving import Serving
from vllm_server.protocol import GenerateChunk, GenerateRequest, TokenPrompt

TWO_BLOCKS = [7 + index % 83 for index in range(270)]  # the CPU's KV blocks hold 128 tokens
MANY = 230  # tokens, on which the server is busy for a while


@dataclass
class Stream:
    """A long streamed request, read in a thread that does nothing else, so that it does not lag behind.

    32 completions, of which the test reads one: the server is busy for a while.
    """

    server: Serving
    prompt: list[int]
    _lines: list[str] = field(default_factory=list)
    _running: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Stream:
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._running.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        sampling = {"n": 32, "max_tokens": MANY, "logprobs": 0, "seed": 3, "ignore_eos": True}
        request = GenerateRequest(prompt=TokenPrompt(self.prompt), stream=True, sampling=sampling)
        body = msgspec.json.encode(request.to_body())
        url, headers = f"{self.server.url}/generate", {"content-type": "application/json"}
        with httpx.stream("POST", url, content=body, headers=headers, timeout=120, trust_env=False) as lines:
            for line in lines.iter_lines():
                self._lines.append(line)
                self._running.set()

    def is_held(self) -> bool:
        """Whether it is under way in an engine that is paused, and most of it is still to come."""
        count = -1
        while count < len(self._lines):  # what was made before the pause may still be on its way here
            count = len(self._lines)
            time.sleep(0.5)
            assert self.server.get("/bridge/info").status_code == 200  # its process is not stalled
        return self._thread.is_alive() and len(self.tokens) < MANY // 2

    @property
    def errors(self) -> list[str]:
        return [line for line in self._lines if '"error"' in line]

    @property
    def chunks(self) -> list[GenerateChunk]:
        decoder = msgspec.json.Decoder(GenerateChunk)
        chunks = [decoder.decode(line) for line in list(self._lines) if '"error"' not in line]
        return [chunk for chunk in chunks if chunk.index == 0]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [next(iter(p[0].values())) for chunk in self.chunks for p in chunk.logprobs or []]

    def before_the_update(self) -> int:
        """How many tokens are in chunks that know no other version, and in the first that does."""
        late = next(index for index, chunk in enumerate(self.chunks) if chunk.policy_version_end is not None)
        return sum(len(chunk.token_ids) for chunk in self.chunks[: late + 1])


@contextmanager
def paused(*servers: Serving) -> Iterator[None]:
    """Servers that generate nothing within the block."""
    try:
        for server in servers:
            assert server.post("/bridge/pause", b"").status_code == 200
        yield
    finally:
        answers = [server.post("/bridge/resume", b"") for server in servers]
    assert all(answer.status_code == 200 for answer in answers)


@contextmanager
def held(servers: Sequence[Serving]) -> Iterator[list[Stream]]:
    """Requests that are under way, one on each server, none of which generates meanwhile; then they run to their end.

    On a busy machine most of an answer may be there before the pause. Then other requests are begun.
    """
    for _ in range(10):
        with ExitStack() as stack:
            streams = [stack.enter_context(Stream(server, TWO_BLOCKS)) for server in servers]
            stack.enter_context(paused(*servers))
            if all(stream.is_held() for stream in streams):
                yield streams
                return
    raise AssertionError("each request was nearly over before the pause came")
