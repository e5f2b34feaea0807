"""scripts/server_pace.py: what it says of a trace. The trace itself needs a GPU."""

from __future__ import annotations

import pytest

from grpo_trainer.errors import ServerError
from tests.scripts import load_script

STEPS = [
    {"cat": "user_annotation", "name": f"execute_context_0(0)_generation_{n}({n})", "ts": n, "dur": 1.0} for n in (7, 8)
]
EVENTS = [
    *STEPS,
    {"cat": "kernel", "name": "gemm", "ts": 100.0, "dur": 3000.0},
    {"cat": "kernel", "name": "gemm", "ts": 9000.0, "dur": 1000.0},
    {"cat": "kernel", "name": "beside", "ts": 2100.0, "dur": 2000.0},  # 1000 of them while the first still runs
    {"cat": "gpu_memcpy", "name": "copy", "ts": 500.0, "dur": 200.0},  # wholly beside it
    {"cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": 0.0, "dur": 5000.0},
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 7000.0},
    {"cat": "kernel", "name": "a mark, without a duration", "ts": 0.0},
]


def test_time_of_the_gpu_is_counted_once_and_shared_by_the_steps() -> None:
    figures = load_script("server_pace").kernel_figures(EVENTS)
    assert figures["traced_steps"] == 2
    assert figures["kernels_ms"] == 2.5  # 100 to 4100 and 9000 to 10000
    assert figures["kernels"] == {"gemm": 2.0, "beside": 1.0, "copy": 0.1}
    assert figures["calls_ms"] == {"cudaEventSynchronize": 2.5}


def test_a_trace_without_a_gpu_has_no_kernels() -> None:
    figures = load_script("server_pace").kernel_figures(STEPS)
    assert figures["kernels_ms"] is None and figures["kernels"] == {}


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ServerError) as refused:
        load_script("server_pace").kernel_figures(EVENTS[2:])
    assert refused.value.field == "vLLM's profiler"
