"""Logprobs in the server's process: the rows of a step (`worker/step_logprobs.py`) given to their requests.

vLLM converts each row of a request by itself, and decodes its tokens to text. `POST /generate` returns no such text. So
the rows of its requests are converted together, once a step, and are never decoded: with 270 requests a token takes 17
instead of 30 µs of this process's time (two slow CPU cores).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any

from vllm_server import seams

FEW = 64
"""Up to this many logprobs in a row, all rows of a step are converted together. A request for those of the whole
vocabulary gives each row of its step as many."""


class Step:
    """The logprobs of a step's requests, a row for each.

    Attributes:
        lists: vLLM's LogprobsLists of all rows.
    """

    def __init__(self, lists: Any) -> None:
        self.lists = lists

    @cached_property
    def ids(self) -> list[list[int]]:
        """Token ids by row, the sampled one first."""
        return self.lists.logprob_token_ids.tolist()

    @cached_property
    def logprobs(self) -> list[list[float]]:
        """Their logprobs."""
        return self.lists.logprobs.tolist()

    @cached_property
    def ranks(self) -> list[int]:
        """The sampled tokens' ranks."""
        return self.lists.sampled_token_ranks.tolist()


class Row:
    """What a request gets of a step, in the place of vLLM's LogprobsLists of one position."""

    __slots__ = ("number", "step")

    def __init__(self, step: Step, number: int) -> None:
        self.step = step
        self.number = number

    def lists(self) -> Any:
        """Return vLLM's LogprobsLists of one position."""
        return self.step.lists.slice_request(self.number, 1)

    def slice_request(self, first: int, positions: int) -> Any:
        """Return vLLM's LogprobsLists of some of its positions, as `LogprobsLists.slice_request` does."""
        return self.lists().slice_request(first, positions)

    def append_to(self, processor: Any) -> None:
        """Append to the flat logprobs of a request's LogprobsProcessor, without decoded tokens."""
        count = None if processor.num_logprobs == -1 else processor.num_logprobs + 1  # another request may want more
        ids, values = self.step.ids[self.number][:count], self.step.logprobs[self.number][:count]
        flat = processor.logprobs
        flat.start_indices.append(len(flat.logprobs))
        flat.token_ids += ids
        flat.logprobs += values
        flat.ranks += (self.step.ranks[self.number], *range(1, len(ids)))
        flat.decoded_tokens += [None] * len(ids)
        flat.end_indices.append(len(flat.logprobs))
        processor.cumulative_logprob += values[0]


def unpack() -> None:
    """Call this in the server's process, before it starts an engine.

    Raises:
        FatalError: this vLLM gets or processes its outputs elsewhere.
    """
    client = seams.found("vllm.v1.engine.core_client", "AsyncMPClient", "get_output_async")
    receive: Callable[[Any], Awaitable[Any]] = client.get_output_async

    async def get_output_async(self: Any) -> Any:
        made = await receive(self)
        give_back(made.outputs)
        return made

    client.get_output_async = get_output_async
    processor = seams.found("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
    flat = seams.found("vllm.logprobs", "FlatLogprobs")
    update: Callable[[Any, Any], None] = processor._update_sample_logprobs

    def _update_sample_logprobs(self: Any, new: Any) -> None:
        if type(new) is not Row:
            update(self, new)
        elif type(self.logprobs) is flat:
            new.append_to(self)
        else:
            update(self, new.lists())

    processor._update_sample_logprobs = _update_sample_logprobs


def give_back(outputs: Sequence[Any]) -> None:
    """Give each of a step's outputs its own row: a `Row`, or `LogprobsLists` of rows that are long or have more ids."""
    for output in outputs:
        packed = output.new_logprobs
        if packed is not None and packed.cu_num_generated_tokens is not None:
            lists = packed._replace(cu_num_generated_tokens=None)
            ids, values = lists.logprob_token_ids, lists.logprobs
            step = Step(lists) if ids.shape == values.shape and values.shape[1] <= FEW else None
            for number, place in enumerate(packed.cu_num_generated_tokens):
                outputs[place].new_logprobs = lists.slice_request(number, 1) if step is None else Row(step, number)
            return


def pass_through(take: Callable[[Any, Any], Any]) -> None:
    """Have vLLM's output processor pass a request's new logprobs through a function before it keeps them.

    Call this after `unpack`. A `Row` has no further columns and is not passed.

    Args:
        take: called with vLLM's LogprobsProcessor of the request and the new LogprobsLists; returns those to keep.

    Raises:
        FatalError: this vLLM processes logprobs elsewhere.
    """
    processor = seams.found("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
    update = processor._update_sample_logprobs
    processor._update_sample_logprobs = lambda self, new: update(self, new if type(new) is Row else take(self, new))
