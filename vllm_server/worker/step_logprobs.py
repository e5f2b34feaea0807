"""Send the logprobs of a step's tokens to the server's process as three arrays. vLLM sends three for each request.

Many small arrays are slow to encode and to decode. With 512 requests they take 9 ms of each step in the engine's
process and 12 ms in the server's; in one piece 1.3 and 2.5 ms (two slow CPU cores). So the first output of a step has
the rows of all its requests, and says to which outputs they belong; `vllm_server.step_logprobs` gives each output its
own again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_server import seams


def pack() -> None:
    """Call this in the engine's process, before it takes requests.

    Raises:
        FatalError: this vLLM makes its outputs elsewhere.
    """
    scheduler = seams.found("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output")
    lists = seams.found("vllm.v1.outputs", "LogprobsLists")
    vllms: Callable[..., dict[int, Any]] = scheduler.update_from_output

    def update_from_output(self: Any, scheduled: Any, ran: Any) -> dict[int, Any]:
        if type(ran.logprobs) is not lists or ran.logprobs.cu_num_generated_tokens is not None:
            return vllms(self, scheduled, ran)  # without logprobs, with sampling masks, or with drafts
        ran = copy.copy(ran)
        ran.logprobs = StepLogprobs(ran.logprobs)
        made = vllms(self, scheduled, ran)
        for outputs in made.values():
            ran.logprobs.pack(outputs.outputs)
        return made

    scheduler.update_from_output = update_from_output


class StepLogprobs:
    """A step's `LogprobsLists`, one row for each request, from which requests take the number of their row."""

    def __init__(self, lists: Any) -> None:
        self._lists = lists

    def slice_request(self, row: int, positions: int) -> Any:
        """Return what vLLM keeps as an output's `new_logprobs`."""
        return row if positions == 1 else self._lists.slice_request(row, positions)

    def pack(self, outputs: Sequence[Any]) -> None:
        """Replace the numbers by one `LogprobsLists` of all rows, in the first output that has a number.

        Its `cu_num_generated_tokens`, which vLLM leaves empty in an output, are the places of the rows' outputs.
        """
        owners = [(place, output) for place, output in enumerate(outputs) if type(output.new_logprobs) is int]
        if not owners:
            return
        rows = np.array([output.new_logprobs for _, output in owners])
        for _, output in owners:
            output.new_logprobs = None
        arrays: Sequence[NDArray[Any]] = self._lists[:3]
        owners[0][1].new_logprobs = type(self._lists)(
            *(array[rows] for array in arrays), [place for place, _ in owners]
        )
