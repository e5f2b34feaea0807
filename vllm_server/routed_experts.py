"""Routed experts in the server's process: collected from the engine's answers (`worker/routed_experts.py`), encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_server import output_blocks, seams
from vllm_server.errors import FatalError, ServeError
from vllm_server.protocol import WorkerInfo
from vllm_server.protocol.routed_experts import RoutedShape, pack
from vllm_server.worker import EXPERTS_MARK

FLAG = "--return-routed-experts"

CONTEXT = ("decode_context", "prefill_context")
"""Kinds of parallelism that spread a sequence's tokens over workers."""

_ROWS = "grpo_experts"
"""Attribute of a completion's logprobs: bytes of rows, step by step."""


def check(config: Any, workers: Sequence[WorkerInfo]) -> None:
    """Check that the engine records experts.

    Raises:
        FatalError: it does not.
    """
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


def collect() -> None:
    """Have vLLM's output processor add rows to a request's logprobs.

    Raises:
        FatalError: this vLLM processes logprobs elsewhere.
    """

    def take(processor: Any, lists: Any) -> Any:
        ids, columns = lists.logprob_token_ids, np.shape(lists.logprobs)[-1]
        if np.shape(ids)[-1] > columns and ids[0, columns] == EXPERTS_MARK:
            count = int(ids[0, columns + 1])
            if hasattr(processor.logprobs, "start_indices"):  # the flat form, which `POST /generate` asks for
                rows = ids[0, columns + 2 :].astype(np.int32).tobytes()[:count]
                vars(processor.logprobs).setdefault(_ROWS, []).append(rows)
            lists = lists._replace(logprob_token_ids=ids[:, :columns])
        return lists

    output_blocks.pass_through(take)


def experts_of(logprobs: Any, shape: RoutedShape, length: int) -> bytes:
    """Return the experts of a completion and its prompt (the format: `protocol/routed_experts.py`).

    Args:
        logprobs: of the completion.
        length: tokens that were computed: all but the last.

    Raises:
        ServeError: 422, some token has no row.
    """
    rows = b"".join(vars(logprobs).get(_ROWS, []))[: length * shape.row_bytes]
    if len(rows) < length * shape.row_bytes:
        got, fix = f"experts of {len(rows) // shape.row_bytes} of {length} tokens", f"start the server without {FLAG}"
        raise ServeError(422, "routed_experts", got, "those of each", f"{fix}: this vLLM loses them")
    return pack(shape, rows)
