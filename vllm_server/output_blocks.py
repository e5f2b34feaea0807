"""Send a completion's tokens from the engine to the server's process in blocks of 16. vLLM sends each token by itself.

Only a complete answer needs them, so nobody waits for a block. A stream gets each token at once; so does a request with
stop strings, which vLLM finds in the server's process. The logprobs of all blocks of a step travel as three arrays:
vLLM sends three for each request, and many small arrays are slow to encode and to decode. The first output with
logprobs has the rows of all, and says to which outputs they belong; `unpack` gives each its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np

from vllm_server import seams
from vllm_server.errors import FatalError, ServeError
from vllm_server.protocol import WorkerInfo
from vllm_server.protocol.routed_experts import RoutedShape, pack
from vllm_server.worker import EXPERTS_MARK

BLOCK = 16
"""Tokens of a block."""
FEW = 64
"""Logprobs of a token that are put into a block. A request for those of the whole vocabulary gives each row of its step
as many; such a step is sent as vLLM does."""

_BLOCK = "_grpo_block"
"""Attribute of vLLM's request: its block that is not full yet."""


class Rows:
    """The logprobs of a step, in the place of vLLM's LogprobsLists. Requests take the number of their row.

    All rows follow each other in flat lists, the sampled token first in each: no work for the garbage collector.
    """

    def __init__(self, lists: Any) -> None:
        self._lists = lists
        self.columns: int = lists.logprobs.shape[1]  # logprobs of a token
        self.ids: list[int] = lists.logprob_token_ids.ravel().tolist()
        self.logprobs: list[float] = lists.logprobs.ravel().tolist()
        self.ranks: list[int] = lists.sampled_token_ranks.tolist()  # of the sampled tokens

    def slice_request(self, row: int, positions: int) -> Any:
        """Return what vLLM keeps as an output's `new_logprobs`."""
        return row if positions == 1 else self._lists.slice_request(row, positions)


class Block:
    """Tokens of a completion, and their logprobs as in `Rows`, with 0 columns if the request wants none."""

    __slots__ = ("columns", "ids", "logprobs", "ranks", "tokens", "waits")

    def __init__(self, columns: int, *, waits: bool) -> None:
        self.columns = columns
        self.waits = waits  # the request is answered when it is complete
        self.tokens: list[int] = []
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []

    def add(self, rows: Rows, row: int) -> None:
        first, last = row * self.columns, (row + 1) * self.columns
        self.ids += rows.ids[first:last]
        self.logprobs += rows.logprobs[first:last]
        self.ranks.append(rows.ranks[row])


def send_in_blocks() -> None:
    """Call this in the engine's process, before it takes requests."""
    scheduler = seams.require("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output")
    blocks = Blocks(
        output=seams.require("vllm.v1.engine", "EngineCoreOutput"),
        lists=seams.require("vllm.v1.outputs", "LogprobsLists"),
        complete=seams.require("vllm.sampling_params", "RequestOutputKind", "FINAL_ONLY").FINAL_ONLY,
    )
    engine = seams.require("vllm.v1.engine.core", "EngineCoreProc", "pause_scheduler")
    message = seams.require("vllm.v1.engine", "EngineCoreOutputs")
    vllms: Callable[..., dict[int, Any]] = scheduler.update_from_output
    pause: Callable[..., Any] = engine.pause_scheduler

    def update_from_output(self: Any, scheduled: Any, ran: Any) -> dict[int, Any]:
        requests = {name: self.requests.get(name) for name in scheduled.num_scheduled_tokens}
        if rows := blocks.rows(ran.logprobs):
            ran = copy.copy(ran)
            ran.logprobs = rows
        made = vllms(self, scheduled, ran)
        for outputs in made.values():
            outputs.outputs = blocks.pack(blocks.due(outputs.outputs, requests, rows))
        return made

    @functools.wraps(pause)  # vLLM reads its signature
    def pause_scheduler(self: Any, mode: str = "abort", *args: Any, **more: Any) -> Any:
        if mode == "abort":  # answers what the requests have so far
            for client, outputs in blocks.begun(self.scheduler.requests.values()).items():
                self.output_queue.put_nowait((client, message(outputs=blocks.pack(outputs))))
        return pause(self, mode, *args, **more)

    scheduler.update_from_output, engine.pause_scheduler = update_from_output, pause_scheduler


class Blocks:
    """What becomes of a step's outputs, made of vLLM's EngineCoreOutput and LogprobsLists.

    `complete` is vLLM's kind of a request that is answered once, when it is complete.
    """

    def __init__(self, *, output: Any, lists: Any, complete: Any) -> None:
        self._output, self._lists, self._complete = output, lists, complete
        carried = {"request_id", "new_token_ids", "new_logprobs"}
        self._rest = attrgetter(*(name for name in output.__struct_fields__ if name not in carried))
        self._nothing = self._rest(output("", []))

    def rows(self, logprobs: Any) -> Rows | None:
        """Return a step's logprobs by rows; None: there are none, or those of experts, drafts or many tokens."""
        if type(logprobs) is not self._lists or logprobs.cu_num_generated_tokens is not None:
            return None
        shape = logprobs.logprobs.shape
        return Rows(logprobs) if logprobs.logprob_token_ids.shape == shape and shape[1] <= FEW else None

    def due(self, outputs: Iterable[Any], requests: Mapping[str, Any], rows: Rows | None) -> list[Any]:
        """Return the outputs that are sent now, with the blocks of their requests."""
        sent = []
        for output in outputs:
            if (request := requests.get(output.request_id)) is None:
                sent.append(output)
                continue
            state, row = vars(request), output.new_logprobs
            joins = row is None or type(row) is int
            columns = 0 if row is None or rows is None else rows.columns
            block: Block | None = state.get(_BLOCK)
            if block and not (joins and block.columns == columns):
                sent.append(self._output(output.request_id, block.tokens, block))
                block = state[_BLOCK] = None
            if not joins:
                sent.append(output)
                continue
            if block is None:
                block = state[_BLOCK] = Block(columns, waits=self._waits(request.sampling_params))
            block.tokens += output.new_token_ids
            if row is not None and rows is not None:
                block.add(rows, row)
            if len(block.tokens) >= BLOCK or not block.waits or not all(map(is_, self._rest(output), self._nothing)):
                output.new_token_ids, output.new_logprobs, state[_BLOCK] = block.tokens, block, None
                sent.append(output)
        return sent

    def begun(self, requests: Iterable[Any]) -> dict[int, list[Any]]:
        """Return the blocks that are not full, as outputs by client."""
        outputs: dict[int, list[Any]] = {}
        for request in requests:
            if block := vars(request).pop(_BLOCK, None):
                output = self._output(request.request_id, block.tokens, block)
                outputs.setdefault(request.client_index, []).append(output)
        return outputs

    def _waits(self, params: Any) -> bool:
        return params is not None and params.output_kind is self._complete and not params.stop

    def pack(self, outputs: list[Any]) -> list[Any]:
        """Replace blocks with the same number of columns by one LogprobsLists, in the first of their outputs.

        Its `cu_num_generated_tokens`, which vLLM leaves empty in an output, are the places of the outputs. An output
        has as many rows as tokens.
        """
        owners: dict[int, dict[int, Block]] = {}
        for place, output in enumerate(outputs):
            block = output.new_logprobs
            if type(block) is Block:
                output.new_logprobs = None
                if block.columns:
                    owners.setdefault(block.columns, {})[place] = block
        for columns, blocks in owners.items():
            ids, logprobs, ranks = (
                np.array([each for block in blocks.values() for each in getattr(block, name)], dtype)
                for name, dtype in (("ids", np.int32), ("logprobs", np.float32), ("ranks", np.int32))
            )
            shape = len(ranks), columns
            packed = self._lists(ids.reshape(shape), logprobs.reshape(shape), ranks, [*blocks])
            outputs[min(blocks)].new_logprobs = packed
        return outputs


# ----------------------------------------------------------------------------------------------------------------------
# In the server's process. vLLM converts each row of logprobs by itself, and decodes its tokens to text. The route
# `POST /generate` returns no such text. So its rows are converted together and are not decoded.


def unpack() -> None:
    """Call this in the server's process, before it starts an engine."""
    client = seams.require("vllm.v1.engine.core_client", "AsyncMPClient", "get_output_async")
    receive: Callable[[Any], Awaitable[Any]] = client.get_output_async

    async def get_output_async(self: Any) -> Any:
        made = await receive(self)
        give_back(made.outputs)
        return made

    client.get_output_async = get_output_async
    flat = seams.require("vllm.logprobs", "FlatLogprobs")
    processor = seams.require("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
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


# ----------------------------------------------------------------------------------------------------------------------
# Routed experts in the server's process: collected from the engine's answers (`worker/routed_experts.py`), encoded.


FLAG = "--return-routed-experts"

CONTEXT = ("decode_context", "prefill_context")
"""Kinds of parallelism that spread a sequence's tokens over workers."""

_ROWS = "grpo_experts"
"""Attribute of a completion's logprobs: bytes of rows, step by step."""


def check_experts(config: Any, workers: Sequence[WorkerInfo]) -> None:
    """Raise a FatalError if the engine does not record experts."""
    parallel = config.parallel_config
    if config.speculative_config is not None:
        raise FatalError(field=FLAG, got="speculative decoding", wanted="one token a step", fix="leave one of them out")
    if config.kv_transfer_config is not None:
        why = "experts of tokens whose KV cache comes from elsewhere are not recorded"
        raise FatalError(why, field=FLAG, got="a KV connector", wanted="none", fix="leave one of them out")
    sizes = {name: getattr(parallel, f"{name}_parallel_size") for name in ("data", "pipeline", *CONTEXT)}
    if any(size > 1 for size in sizes.values()):
        got = ", ".join(f"{size} {name}-parallel" for name, size in sizes.items() if size > 1)
        raise FatalError(field=FLAG, got=got, wanted="1 of each", fix="use --tensor-parallel-size, or more servers")
    if workers[0].routed_experts is None:
        kind = config.model_config.hf_text_config.model_type
        raise FatalError(
            field=FLAG,
            got=f"a model of type {kind}, of which vLLM {seams.vllm_version()} shows no routing",
            wanted="a mixture of experts whose layers attend to all tokens, and a MoE backend with a separate router",
            fix=f"leave out {FLAG} for a dense model; else set VLLM_USE_V2_MODEL_RUNNER=0 and --moe-backend triton",
        )


def collect_experts() -> None:
    """Have vLLM's output processor add rows to a request's logprobs. Call this after `unpack`."""
    processor = seams.require("vllm.v1.engine.logprobs", "LogprobsProcessor", "_update_sample_logprobs")
    update: Callable[[Any, Any], None] = processor._update_sample_logprobs

    def _update_sample_logprobs(self: Any, lists: Any) -> None:
        ids, columns = lists.logprob_token_ids, np.shape(lists.logprobs)[-1]
        if np.shape(ids)[-1] > columns and ids[0, columns] == EXPERTS_MARK:
            count = int(ids[0, columns + 1])
            if hasattr(self.logprobs, "start_indices"):  # the flat form, which `POST /generate` asks for
                rows = ids[0, columns + 2 :].astype(np.int32).tobytes()[:count]
                vars(self.logprobs).setdefault(_ROWS, []).append(rows)
            lists = lists._replace(logprob_token_ids=ids[:, :columns])
        update(self, lists)

    processor._update_sample_logprobs = _update_sample_logprobs


def experts_of(logprobs: Any, shape: RoutedShape, length: int) -> bytes:
    """Return the experts of a completion and its prompt (the format: `protocol/routed_experts.py`).

    `length` counts the tokens that were computed: all but the last. Raise a ServeError, 422, if one has no row.
    """
    rows = b"".join(vars(logprobs).get(_ROWS, []))[: length * shape.row_bytes]
    if len(rows) < length * shape.row_bytes:
        got, fix = f"experts of {len(rows) // shape.row_bytes} of {length} tokens", f"start the server without {FLAG}"
        raise ServeError(422, "routed_experts", got, "those of each", f"{fix}: this vLLM loses them")
    return pack(shape, rows)
