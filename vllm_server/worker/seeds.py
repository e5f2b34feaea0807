"""Seeded requests on a CPU: vLLM can discard a sample of theirs.

vLLM samples a token for every request of a step, even for one whose prompt is not complete yet, because it is computed
in chunks or computed again. It discards this token, and rewinds the request's generator so that the seed's next number
is used again. It rewinds by an offset, which a CPU generator does not have: the engine would end with "CPU Generator
does not use offset". Here the generator gets back the state that it had before the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from vllm_server import seams


def prepare_worker() -> None:
    """Let CPU generators be rewound. Call before a model is loaded, on a CPU, whose runner derives from the GPU's."""
    runner = seams.found("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_sample", "_bookkeeping_sync")
    runner._sample = _noting_states(runner._sample)
    runner._bookkeeping_sync = _rewinding_states(runner._bookkeeping_sync)


class Rewindable:
    """What vLLM uses of a generator in order to discard a sample."""

    def __init__(self, generator: torch.Generator, before: Tensor) -> None:
        self._generator, self._before = generator, before

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> None:
        """Rewind by one sample, the only rewind that vLLM asks for."""
        self._generator.set_state(self._before)


def _noting_states(vllms: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(vllms)
    def _sample(self: Any, *given: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        self._grpo_before = {row: generator.get_state() for row, generator in generators.items()}
        return vllms(self, *given, **named)

    return _sample


def _rewinding_states(vllms: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(vllms)
    def _bookkeeping_sync(self: Any, *given: Any, **named: Any) -> Any:
        batch, generators = self.input_batch, self.input_batch.generators
        batch.generators = {row: Rewindable(each, self._grpo_before[row]) for row, each in generators.items()}
        try:
            return vllms(self, *given, **named)
        finally:
            batch.generators = generators

    return _bookkeeping_sync
