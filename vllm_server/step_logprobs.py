"""Logprobs in the server's process: the rows of a step (`worker/step_logprobs.py`) taken apart, and handed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm_server import seams


def unpack() -> None:
    """Call this in the server's process, before it starts an engine.

    Raises:
        FatalError: this vLLM gets its outputs elsewhere.
    """
    client = seams.found("vllm.v1.engine.core_client", "AsyncMPClient", "get_output_async")
    vllms: Callable[[Any], Awaitable[Any]] = client.get_output_async

    async def get_output_async(self: Any) -> Any:
        made = await vllms(self)
        give_back(made.outputs)
        return made

    client.get_output_async = get_output_async


def give_back(outputs: Sequence[Any]) -> None:
    """Give each of a step's outputs its own row, as `LogprobsLists` of one position."""
    for output in outputs:
        packed = output.new_logprobs
        if packed is not None and packed.cu_num_generated_tokens is not None:
            rows = packed._replace(cu_num_generated_tokens=None)
            for row, place in enumerate(packed.cu_num_generated_tokens):
                outputs[place].new_logprobs = rows.slice_request(row, 1)
            return


def pass_through(take: Callable[[Any, Any], Any]) -> None:
    """Have vLLM's output processor pass a request's new logprobs through a function before it keeps them.

    Args:
        take: called with vLLM's LogprobsProcessor of the request and the new LogprobsLists; returns those to keep.

    Raises:
        FatalError: this vLLM processes logprobs elsewhere.
    """
    processor = seams.found("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
    update = processor._update_sample_logprobs
    processor._update_sample_logprobs = lambda self, lists: update(self, take(self, lists))
