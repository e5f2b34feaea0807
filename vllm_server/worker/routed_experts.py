"""Record which experts a mixture-of-experts model chose for each token, from vLLM's routers to the server's answer.

Near-ties are broken differently by the server's kernels and the trainer's, so the trainer replays the server's choice
(docs/training.md). vLLM has a record of its own (`--enable-return-routed-experts`), with its newer model runner only,
which needs Triton. So the older one, which a CPU has as well, gets this:

    routers           write the ids of a step's tokens into one buffer, which CUDA graphs may record
    execute_model     moves them to the place of each token's KV cache: what is cached is found there by later requests
    _sample           reads the places of a request's tokens that were not sent yet, beside its new token's logprobs
    LogprobsTensors   `RoutedTensors` are those and these rows: one asynchronous copy
    LogprobsLists     `RoutedLists`; a request's slice has its rows as further columns of `logprob_token_ids`
    LogprobsProcessor in the server's process, takes them off again (`vllm_server.output_blocks`)

Without `--return-routed-experts` nothing of this is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from vllm_server import seams
from vllm_server.protocol.routed_experts import RoutedShape
from vllm_server.worker import EXPERTS_MARK, EXPERTS_VARIABLE

_RECORD = "grpo_routed"
"""Attribute of a model runner: its `Record`."""


@dataclass
class Record:
    """The choices of a worker's routers."""

    shape: RoutedShape
    step_TLK: Tensor  # for the tokens of the present step, in their order in the batch
    slots_SLK: Tensor  # for the tokens of the KV cache, by slot
    sent: dict[str, int] = field(default_factory=dict)  # request id -> number of its first tokens whose rows were sent

    def note(self, layer: int, ids_tK: Tensor) -> None:
        """Note the experts that a layer chose for the tokens of the step."""
        self.step_TLK[: len(ids_tK), layer] = ids_tK


class RoutedTensors(LogprobsTensors):
    """A batch's logprobs, with experts."""

    rows_M: Tensor  # bytes of all rows
    ends: Sequence[int]  # for each n from 0 to N how many bytes belong to the first n requests

    @classmethod
    def of(cls, logprobs: LogprobsTensors, rows_M: Tensor, ends: Sequence[int]) -> RoutedTensors:
        made = cls(*logprobs)
        made.rows_M, made.ends = rows_M, ends
        return made

    def to_cpu_nonblocking(self) -> RoutedTensors:
        rows_M = self.rows_M.to("cpu", non_blocking=self.rows_M.is_cuda)
        return RoutedTensors.of(super().to_cpu_nonblocking(), rows_M, self.ends)

    def tolists(self, *args: Any, **kwargs: Any) -> LogprobsLists:
        made = RoutedLists(*super().tolists(*args, **kwargs))
        made.rows_M, made.ends = self.rows_M.cpu().numpy(), self.ends
        return made


class RoutedLists(LogprobsLists):
    """The same on the host."""

    rows_M: NDArray[np.uint8]
    ends: Sequence[int]

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """Return the logprobs of a request's new token; further columns are `EXPERTS_MARK`, and a number of bytes."""
        own = super().slice_request(req_idx, num_positions)
        if num_positions != 1 or self.cu_num_generated_tokens is not None:  # speculative decoding: the server refuses
            return own
        rows = self.rows_M[self.ends[req_idx] : self.ends[req_idx + 1]]
        whole = np.concatenate([rows, np.zeros(-len(rows) % 4, np.uint8)]).view(np.int32)
        ids = own.logprob_token_ids
        more = np.concatenate([[EXPERTS_MARK, len(rows)], whole])[None].astype(ids.dtype)
        return own._replace(logprob_token_ids=np.concatenate([ids, more], axis=1))


def prepare_worker() -> None:
    """Have vLLM's model runner record experts, if the server was started so. Call before a model is loaded."""
    if not os.environ.get(EXPERTS_VARIABLE):
        return
    names = ("initialize_kv_cache", "execute_model", "_sample")
    runner = seams.require("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", *names)
    initialize, execute, sample = runner.initialize_kv_cache, runner.execute_model, runner._sample

    def initialize_and_bind(self: Any, *args: Any, **kwargs: Any) -> None:
        """After the model is loaded, and before CUDA graphs are recorded."""
        initialize(self, *args, **kwargs)
        groups = self.kv_cache_config.kv_cache_groups
        plain = len(groups) == 1 and _attends_to_all(groups[0].kv_cache_spec)
        slots = self.kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size if plain else 0
        vars(self)[_RECORD] = bind(self.get_model(), self.max_num_tokens, slots, self.device) if slots else None

    def execute_and_keep(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, scheduler_output, *args, **kwargs)
        if (record := vars(self).get(_RECORD)) is not None:
            _keep(self, record, scheduler_output)
        return result

    def sample_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        if (record := vars(self).get(_RECORD)) is not None and output.logprobs_tensors is not None:
            output.logprobs_tensors = _attach(self, record, output.logprobs_tensors)
        return output

    runner.initialize_kv_cache = initialize_and_bind
    runner.execute_model, runner._sample = execute_and_keep, sample_and_attach


def _attends_to_all(spec: Any) -> bool:
    """Return whether the blocks of a KV cache keep all tokens; those of a sliding window are used for others again."""
    full = seams.require("vllm.v1.kv_cache_interface", "FullAttentionSpec")
    each = getattr(spec, "kv_cache_specs", None)  # of layers that differ in size only
    return all(isinstance(one, full) for one in (each.values() if each is not None else [spec]))


def bind(model: nn.Module, tokens: int, slots: int, device: torch.device) -> Record | None:
    """Have a model's routers write their choices into a record; None: it has no router that says what it chose.

    `tokens` is the most of a step, `slots` the number of tokens of the KV cache.
    """
    found = seams.require("vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter")
    layers = [module for module in model.modules() if isinstance(getattr(module, "router", None), found)]
    routers: list[Any] = list({id(layer.router): layer.router for layer in layers}.values())
    # A monolithic kernel chooses experts itself, and asks no router.
    hidden = any(getattr(getattr(layer, "_quant_method", None), "is_monolithic", False) for layer in layers)
    kinds = {(router.top_k, router.global_num_experts) for router in routers}
    if len(kinds) != 1 or hidden:
        return None
    (top_k, experts) = kinds.pop()
    shape = RoutedShape(len(routers), int(top_k), int(experts))
    step_TLK, slots_SLK = (
        torch.zeros(size, shape.layers, shape.top_k, dtype=torch.int16, device=device) for size in (tokens, slots)
    )
    record = Record(shape, step_TLK, slots_SLK)
    for layer, router in enumerate(routers):
        router.set_capture_fn(partial(record.note, layer))
    return record


def shape_of(runner: Any) -> RoutedShape | None:
    """Return what a model runner records; None: nothing.

    Models with KV caches of several kinds, some of which drop tokens, have no record.
    """
    record = None if runner is None else vars(runner).get(_RECORD)
    return None if record is None else record.shape


def _keep(runner: Any, record: Record, scheduled: Any) -> None:
    """Move the choices of a step to the slots of its tokens."""
    for name in scheduled.finished_req_ids:
        record.sent.pop(name, None)
    if not (count := scheduled.total_num_scheduled_tokens):
        return
    slots_T = runner.input_batch.block_table[0].slot_mapping.gpu[:count]
    record.slots_SLK.index_copy_(0, slots_T.long(), record.step_TLK[:count])


def _attach(runner: Any, record: Record, tensors: LogprobsTensors) -> LogprobsTensors:
    """Return logprobs with the rows of each request's tokens that were computed and not sent yet.

    A request whose prompt is not computed to its end gets no token in this step, and so no rows.
    """
    batch, table = runner.input_batch, runner.input_batch.block_table[0]
    blocks, counts, slots = table.get_numpy_array(), [0], [np.empty(0, np.int64)]
    for row, name in enumerate(batch.req_ids):
        begin = end = record.sent.get(name, 0)
        if not runner.discard_request_mask.np[row] and name in batch.num_logprobs:
            end = record.sent[name] = max(begin, int(runner.optimistic_seq_lens_cpu[row]))
        places = np.arange(begin, end)
        slots.append(blocks[row, places // table.block_size].astype(np.int64) * table.block_size)
        slots[-1] += places % table.block_size
        counts.append(len(places))
    index_M = torch.from_numpy(np.concatenate(slots)).to(runner.device, non_blocking=True)
    rows_MLK = record.slots_SLK.index_select(0, index_M)
    data = rows_MLK.to(torch.uint8) if record.shape.id_bytes == 1 else rows_MLK
    ends = (np.cumsum(counts) * record.shape.row_bytes).tolist()
    return RoutedTensors.of(tensors, data.reshape(-1).view(torch.uint8), ends)
