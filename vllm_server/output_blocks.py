"""Blocks of tokens in the server's process: their logprobs (`worker/output_blocks.py`) given to their requests.

vLLM converts each row of logprobs by itself, and decodes its tokens to text. `POST /generate` returns no such text. So
its rows are converted together and are not decoded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm_server import seams


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
    flat = seams.found("vllm.logprobs", "FlatLogprobs")
    processor = seams.found("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
    update: Callable[[Any, Any], None] = processor._update_sample_logprobs

    def _update_sample_logprobs(self: Any, new: Any) -> None:
        if type(self.logprobs) is flat:  # the form that `POST /generate` asks for
            append(self, new)
        else:
            update(self, new)

    processor._update_sample_logprobs = _update_sample_logprobs


def give_back(outputs: Sequence[Any]) -> None:
    """Give each output its own LogprobsLists, with as many rows as it has tokens."""
    for output in outputs:
        packed = output.new_logprobs
        if packed is None or packed.cu_num_generated_tokens is None:
            continue
        rows, first = packed._replace(cu_num_generated_tokens=None), 0
        for place in packed.cu_num_generated_tokens:
            owner = outputs[place]
            owner.new_logprobs = rows.slice_request(first, len(owner.new_token_ids))
            first += len(owner.new_token_ids)


def append(processor: Any, lists: Any) -> None:
    """Append LogprobsLists to the flat logprobs of a LogprobsProcessor, without decoded tokens."""
    wanted = None if processor.num_logprobs == -1 else processor.num_logprobs + 1  # another request may want more
    ids, logprobs = lists.logprob_token_ids[:, :wanted], lists.logprobs[:, :wanted]
    flat, columns = processor.logprobs, logprobs.shape[1]
    begin, end = len(flat.logprobs), len(flat.logprobs) + logprobs.size
    flat.start_indices += range(begin, end, columns)
    flat.end_indices += range(begin + columns, end + 1, columns)
    flat.token_ids += ids.ravel().tolist()
    flat.logprobs += logprobs.ravel().tolist()
    flat.decoded_tokens += [None] * logprobs.size
    for rank, logprob in zip(lists.sampled_token_ranks.tolist(), logprobs[:, 0].tolist(), strict=True):
        flat.ranks += (rank, *range(1, columns))
        processor.cumulative_logprob += logprob


def pass_through(take: Callable[[Any, Any], Any]) -> None:
    """Have vLLM's output processor pass a request's new logprobs through a function before it keeps them.

    Call this after `unpack`.

    Args:
        take: called with vLLM's LogprobsProcessor of the request and the new LogprobsLists; returns those to keep.

    Raises:
        FatalError: this vLLM processes logprobs elsewhere.
    """
    processor = seams.found("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
    update = processor._update_sample_logprobs
    processor._update_sample_logprobs = lambda self, new: update(self, take(self, new))
