"""Install these kernels in a worker before its model is loaded, on an NVIDIA GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from vllm_server import seams
from vllm_server.lora_kernels import KERNELS_VARIABLE
from vllm_server.lora_kernels.groups import group, slots_of, write
from vllm_server.worker import is_batch_invariant

logger = logging.getLogger("vllm.grpo.lora_kernels")


def prepare_worker() -> None:
    """Group tokens on the host. With `--lora-kernels grpo`, also replace vLLM's kernels by ours."""
    seams.found("vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU").update_metadata = update_metadata
    if os.environ.get(KERNELS_VARIABLE) != "grpo":
        return
    if is_batch_invariant():
        logger.warning("VLLM_BATCH_INVARIANT: vLLM's kernels add adapters, since ours sum in no fixed order")
        return
    from vllm_server.lora_kernels import operators  # needs Triton

    operators.install()


def update_metadata(
    self: Any, mapping: Any, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int, **_: object
) -> None:
    """Replace `PunicaWrapperGPU.update_metadata`: fill its tensors without waiting for the GPU."""
    self.is_prefill = mapping.is_prefill
    self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
    tokens = group(slots_of(mapping.index_mapping, lora_index_to_id))
    same = mapping.prompt_mapping == mapping.index_mapping  # one sampled token per sequence: a decode step
    prompts = tokens if same else group(slots_of(mapping.prompt_mapping, lora_index_to_id))
    write(self.token_mapping_meta, tokens)
    write(self.prompt_mapping_meta, prompts)
