"""A completion's tokens and logprobs reach its request in blocks, through vLLM's own messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_server import output_blocks
from vllm_server.output_blocks import BLOCK, FEW, give_back, unpack


@dataclass
class Wish:
    """A request: when it is answered, whether it wants logprobs, which front end asks, and how many tokens it gets."""

    kind: RequestOutputKind
    logprobs: bool
    client: int
    length: int
    stop: str | None = None
    empty: bool = False
    """Whether its last output has no token."""

    @property
    def tokens(self) -> int:
        return self.length - self.empty


@dataclass
class Engine:
    """Steps of a scheduler: each request that has not ended gets one token a step.

    The token of position p of request r is 1000 r + p, and row r of a step has logprobs that depend on both.
    """

    wishes: list[Wish]
    columns: int = 1
    position: int = 0
    requests: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, wish in enumerate(self.wishes):
            params = SamplingParams(output_kind=wish.kind, stop=wish.stop)
            request = SimpleNamespace(request_id=str(number), client_index=wish.client, sampling_params=params)
            self.requests[request.request_id] = request

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Return what the front ends get, as it arrives there."""
        running = [number for number, wish in enumerate(self.wishes) if wish.length > self.position]
        order = running[:: (-1) ** self.position]  # vLLM's order of requests is not that of the rows
        scheduled = SimpleNamespace(num_scheduled_tokens={str(number): 1 for number in order})
        ran = SimpleNamespace(logprobs=self.lists())
        made = Scheduler.update_from_output(self, scheduled, ran)  # pyright: ignore
        assert type(ran.logprobs) is LogprobsLists, "the model runner's own output stays as it is"
        self.position += 1
        return {client: arrived(outputs) for client, outputs in made.items()}

    def lists(self) -> LogprobsLists:
        rows = len(self.wishes)
        ids = 1000 * np.arange(rows, dtype=np.int32)[:, None] + self.position + np.arange(self.columns, dtype=np.int32)
        return LogprobsLists(ids, (-ids / 7).astype(np.float32), np.arange(rows, dtype=np.int32) + self.position)


def vllms(self: Engine, scheduled: Any, ran: Any) -> dict[int, EngineCoreOutputs]:
    """Make a step's outputs, as vLLM's scheduler does."""
    made: dict[int, EngineCoreOutputs] = {}
    for name in scheduled.num_scheduled_tokens:
        number, wish = int(name), self.wishes[int(name)]
        last = self.position == wish.length - 1
        output = EngineCoreOutput(name, [] if last and wish.empty else [1000 * number + self.position])
        own = ran.logprobs.slice_request(number, len(output.new_token_ids)) if wish.logprobs else None
        output.new_logprobs = own
        if last:
            output.finish_reason = FinishReason.STOP
            del self.requests[name]
        made.setdefault(wish.client, EngineCoreOutputs()).outputs.append(output)
    return made


def pause_scheduler(self: Any, mode: str = "abort", clear_cache: bool = True) -> tuple[str, bool]:
    """Pause as vLLM's engine does, which ends all requests in the mode "abort"."""
    return mode, clear_cache


def arrived(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    sent: Any = MsgpackEncoder().encode(outputs)
    got = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in sent])
    give_back(got.outputs)
    return got


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "update_from_output", vllms)
        patch.setattr(EngineCoreProc, "pause_scheduler", pause_scheduler)
        output_blocks.send_in_blocks()
        yield


def rows_of(lists: Any) -> list[Any]:
    """Return (ids, logprobs, rank) of each position."""
    return [] if lists is None else [[*row] for row in zip(*(array.tolist() for array in lists[:3]), strict=True)]


whole, delta = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
wishes = st.builds(
    Wish,
    st.sampled_from([whole, whole, delta]),
    st.booleans(),
    st.integers(0, 1),
    st.integers(1, 2 * BLOCK + 3),
    st.sampled_from([None, None, "a stop string"]),
    st.booleans(),
)


@given(asked=st.lists(wishes, max_size=6), columns=st.lists(st.sampled_from([1, 1, 3]), min_size=40, max_size=40))
def test_requests_get_the_tokens_and_logprobs_that_vllm_would_have_sent(asked: list[Wish], columns: list[int]) -> None:
    engine, seen = Engine(asked), {number: ([], [], []) for number in range(len(asked))}
    expected = {number: [] for number in seen}
    for engine.columns in columns:
        for number in seen:
            expected[number] += rows_of(engine.lists().slice_request(number, 1))
        for client, outputs in engine.step().items():
            for output in outputs.outputs:
                number = int(output.request_id)
                assert asked[number].client == client and len(output.new_token_ids) <= BLOCK
                tokens, rows, reasons = seen[number]
                tokens += output.new_token_ids
                rows += rows_of(output.new_logprobs)
                reasons.append(output.finish_reason)
        for number, (tokens, _, _) in seen.items():
            if asked[number].kind is delta or asked[number].stop:
                assert len(tokens) == min(engine.position, asked[number].tokens), "nothing waits"
    for number, (tokens, rows, reasons) in seen.items():
        wish = asked[number]
        assert tokens == [1000 * number + position for position in range(wish.tokens)]
        assert rows == (expected[number][: wish.tokens] if wish.logprobs else [])
        assert reasons == [None] * (len(reasons) - 1) + [FinishReason.STOP]


def test_a_block_is_sent_when_it_is_full() -> None:
    engine = Engine([Wish(whole, True, 0, 100)])
    sent = [
        len(output.new_token_ids) for _ in range(50) for output in engine.step().get(0, EngineCoreOutputs()).outputs
    ]
    assert sent == [BLOCK] * (50 // BLOCK)


def test_what_is_more_than_tokens_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(self: Engine, scheduled: Any, ran: Any) -> dict[int, EngineCoreOutputs]:
        made = vllms(self, scheduled, ran)
        if self.position == 3:
            made[0].outputs[0].num_nans_in_logits = 5
        return made

    monkeypatch.setattr(Scheduler, "update_from_output", corrupt)
    output_blocks.send_in_blocks()
    engine = Engine([Wish(whole, True, 0, 100)])
    sent = [engine.step()[0].outputs for _ in range(5)]
    assert [len(outputs) for outputs in sent] == [0, 0, 0, 1, 0]
    assert len(sent[3][0].new_token_ids) == 4 and sent[3][0].num_nans_in_logits == 5


def test_a_step_is_three_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.give_back", lambda outputs: None)
    outputs = Engine([Wish(delta, True, 0, 9) for _ in range(512)]).step()[0].outputs
    assert [output.new_logprobs is not None for output in outputs] == [True] + [False] * 511


def test_a_pause_that_aborts_requests_first_sends_what_they_have() -> None:
    engine = Engine([Wish(whole, True, 0, 99), Wish(whole, False, 1, 99), Wish(delta, True, 0, 99)])
    for _ in range(BLOCK + 3):
        engine.step()
    core: Any = SimpleNamespace(scheduler=engine, output_queue=SimpleQueue())
    assert EngineCoreProc.pause_scheduler(core, "keep", clear_cache=False) == ("keep", False)
    assert core.output_queue.empty()
    assert EngineCoreProc.pause_scheduler(core) == ("abort", True)
    sent = dict(core.output_queue.get() for _ in range(2))
    (first,), (second,) = (arrived(sent[client]).outputs for client in (0, 1))
    assert (first.request_id, first.new_token_ids) == ("0", [BLOCK, BLOCK + 1, BLOCK + 2])
    assert len(rows_of(first.new_logprobs)) == 3
    assert (second.request_id, second.new_token_ids) == ("1", [1000 + BLOCK + more for more in range(3)])
    assert second.new_logprobs is None and core.output_queue.empty()


class Routed(LogprobsLists):
    """As `worker.routed_experts.RoutedLists`: a subclass, with further ids in a row."""


@pytest.mark.parametrize("kind", ["experts", "drafts", "further ids", "many"])
def test_other_logprobs_are_sent_as_vllm_does_after_the_block(kind: str) -> None:
    engine = Engine([Wish(whole, True, 0, 100)])
    for _ in range(3):
        assert not engine.step()[0].outputs
    own = engine.lists()
    if kind == "experts":
        own = Routed(*own)
    elif kind == "drafts":
        own = own._replace(cu_num_generated_tokens=[0, 1])
    elif kind == "further ids":
        own = own._replace(logprob_token_ids=np.zeros((1, 3), np.int32))
    else:
        many = np.zeros((1, FEW + 1), np.int32)
        own = LogprobsLists(many, many.astype(np.float32), np.zeros(1, np.int32))
    scheduled, ran = SimpleNamespace(num_scheduled_tokens={"0": 1}), SimpleNamespace(logprobs=own)
    made = Scheduler.update_from_output(engine, scheduled, ran)  # pyright: ignore
    first, second = arrived(made[0]).outputs
    assert (first.new_token_ids, second.new_token_ids) == ([0, 1, 2], [3])
    assert len(rows_of(first.new_logprobs)) == 3
    assert rows_of(second.new_logprobs) == rows_of(own.slice_request(0, 1))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("wanted", "columns"), [(0, 1), (0, 3), (2, 3), (-1, 3)])
def test_a_request_keeps_of_its_rows_what_vllm_would_have_kept(
    monkeypatch: pytest.MonkeyPatch, wanted: int, columns: int, flat: bool
) -> None:
    def processor() -> LogprobsProcessor:
        return LogprobsProcessor(None, FlatLogprobs() if flat else [], None, 0.0, wanted, None)

    engine, expected, kept = Engine([Wish(whole, True, 0, 9)] * 4, columns), processor(), processor()
    lists = engine.lists()
    for first, positions in ((2, 1), (0, 3)):
        expected._update_sample_logprobs(lists.slice_request(first, positions))
    monkeypatch.setattr(AsyncMPClient, "get_output_async", AsyncMPClient.get_output_async)
    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", LogprobsProcessor._update_sample_logprobs)
    unpack()
    for first, positions in ((2, 1), (0, 3)):
        kept._update_sample_logprobs(lists.slice_request(first, positions))
    assert (kept.logprobs, kept.cumulative_logprob) == (expected.logprobs, expected.cumulative_logprob)
