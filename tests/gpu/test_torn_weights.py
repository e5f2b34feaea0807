"""No answer sees half-written weights on a GPU; without the fence some do, and the judge finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer.bench.publish import SyncOptions, opened
from tests.torn_weights import find_torn_answers

pytestmark = pytest.mark.timeout(500)


@pytest.mark.parametrize("fenced", [True, False])
def test_torn_weights_only_without_a_fence(tmp_path: Path, fenced: bool) -> None:
    # With a fixed cache vLLM does not measure what is free: other tests come and go on the same GPU.
    asked = {
        "shape": "0.5b",
        "bridge": "shared_vllm",
        "gpu_memory_utilization": 0.2,
        "kv_cache_gb": 8,
        "log_dir": tmp_path,
    }
    with opened(SyncOptions.model_validate(asked)) as publisher:
        found = find_torn_answers(publisher, writes=300 if fenced else 30_000, fenced=fenced, concurrency=256)
    assert found.answers > (100 if fenced else 0) and found.misnamed == 0, found
    assert (found.torn == 0) == fenced, found
