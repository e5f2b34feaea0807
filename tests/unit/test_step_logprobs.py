"""A step's logprobs reach each request, through vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_server.step_logprobs import FEW, Row, Step, give_back, unpack
from vllm_server.worker import step_logprobs


@dataclass
class Ran:
    """What a forward pass returns, as far as the scheduler's logprobs are concerned."""

    logprobs: Any


def lists(rows: int, columns: int) -> LogprobsLists:
    """Row r has the ids 100 r, 100 r + 1, …, logprobs of minus a hundredth of that, and rank r + 1."""
    ids = 100 * np.arange(rows, dtype=np.int32)[:, None] + np.arange(columns, dtype=np.int32)
    return LogprobsLists(ids, (-ids / 100).astype(np.float32), np.arange(1, rows + 1, dtype=np.int32))


def scheduled(tokens: list[int], clients: list[int], wanting: list[bool]) -> Any:
    """Return vLLM's function: request r has `tokens[r]` new tokens, and gets its logprobs if it wants them."""

    def update_from_output(self: Any, order: list[int], ran: Ran) -> dict[int, EngineCoreOutputs]:
        made: dict[int, EngineCoreOutputs] = {}
        for row in order:
            wants = wanting[row] and ran.logprobs
            own = ran.logprobs.slice_request(row, tokens[row]) if wants else None
            output = EngineCoreOutput(request_id=str(row), new_token_ids=[7] * tokens[row], new_logprobs=own)
            made.setdefault(clients[row], EngineCoreOutputs()).outputs.append(output)
        return made

    return update_from_output


def read(outputs: EngineCoreOutputs) -> dict[str, Any]:
    def plain(own: Any) -> Any:
        own = own.lists() if isinstance(own, Row) else own
        return None if own is None else [array.tolist() for array in own[:3]]

    return {output.request_id: plain(output.new_logprobs) for output in outputs.outputs}


@given(
    requests=st.lists(st.tuples(st.sampled_from([1, 1, 1, 0]), st.integers(0, 1), st.booleans()), max_size=9),
    columns=st.integers(1, 3),
    data=st.data(),
)
def test_requests_get_what_vllm_would_have_sent(
    requests: list[tuple[int, int, bool]], columns: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(requests))))
    vllms = scheduled(*([list(column) for column in zip(*requests, strict=True)] or [[], [], []]))
    expected = vllms(None, order, Ran(lists(len(requests), columns)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "update_from_output", vllms)
        step_logprobs.pack()
        ran = Ran(lists(len(requests), columns))
        made = Scheduler.update_from_output(None, order, ran)  # pyright: ignore[reportArgumentType]
    assert type(ran.logprobs) is LogprobsLists, "the model runner's own output stays as it is"
    assert made.keys() == expected.keys()
    for client, outputs in made.items():
        sent: Any = MsgpackEncoder().encode(outputs)
        got = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in sent])
        give_back(got.outputs)
        assert read(got) == read(expected[client])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("wanted", "columns"), [(0, 1), (0, 3), (2, 3), (-1, 3)])
def test_a_request_keeps_of_its_rows_what_vllm_would_have_kept(
    monkeypatch: pytest.MonkeyPatch, wanted: int, columns: int, flat: bool
) -> None:
    def processor() -> LogprobsProcessor:
        return LogprobsProcessor(None, FlatLogprobs() if flat else [], None, 0.0, wanted, None)

    step, expected, kept = lists(4, columns), processor(), processor()
    for row in (2, 0):
        expected._update_sample_logprobs(step.slice_request(row, 1))
    monkeypatch.setattr(AsyncMPClient, "get_output_async", AsyncMPClient.get_output_async)
    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", LogprobsProcessor._update_sample_logprobs)
    unpack()
    rows = Step(step)
    for row in (2, 0):
        new: Any = Row(rows, row)
        kept._update_sample_logprobs(new)
    assert (kept.logprobs, kept.cumulative_logprob) == (expected.logprobs, expected.cumulative_logprob)


@pytest.mark.parametrize(("ids", "columns"), [(1, 1), (3, 1), (FEW, FEW), (FEW + 1, FEW + 1)])
def test_rows_with_further_ids_or_of_a_vocabulary_are_vllms(ids: int, columns: int) -> None:
    own = lists(2, columns)._replace(logprob_token_ids=np.zeros((2, ids), np.int32), cu_num_generated_tokens=[0, 1])
    outputs = [EngineCoreOutput("0", [7], new_logprobs=own), EngineCoreOutput("1", [7])]
    give_back(outputs)
    expected = Row if ids == columns <= FEW else LogprobsLists
    assert [type(output.new_logprobs) for output in outputs] == [expected] * 2


def test_a_step_is_three_arrays() -> None:
    step = step_logprobs.StepLogprobs(lists(512, 1))
    outputs = [EngineCoreOutput(str(row), [7], new_logprobs=step.slice_request(row, 1)) for row in range(512)]
    step.pack(outputs)
    assert [output.new_logprobs is not None for output in outputs] == [True] + [False] * 511


@pytest.mark.parametrize("more", [{"cu_num_generated_tokens": [0, 1]}, None])
def test_drafts_and_masks_stay_vllms(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any] | None) -> None:
    class Masked(LogprobsLists):
        """As `worker.sampling_masks.KeptLists`: a subclass."""

    own = Masked(*lists(2, 1)) if more is None else lists(2, 1)._replace(**more)
    seen: list[Any] = []

    def vllms(self: Any, order: Any, ran: Ran) -> dict[int, Any]:
        seen.append(ran.logprobs)
        return {}

    monkeypatch.setattr(Scheduler, "update_from_output", vllms)
    step_logprobs.pack()
    Scheduler.update_from_output(None, None, Ran(own))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert seen == [own] and type(seen[0]) is type(own)
