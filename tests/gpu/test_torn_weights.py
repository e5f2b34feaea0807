"""No answer sees half-written weights on a GPU; without the fence some do, and the judge finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer.bench.publish import SyncOptions, opened
from tests.torn_weights import judging

pytestmark = pytest.mark.timeout(500)


def test_torn_weights_only_without_a_fence(tmp_path: Path) -> None:
    # With a fixed cache vLLM does not measure what is free: other tests come and go on the same GPU.
    asked = {
        "shape": "0.5b",
        "bridge": "shared_vllm",
        "gpu_memory_utilization": 0.2,
        "kv_cache_gb": 8,
        "log_dir": tmp_path,
    }
    with opened(SyncOptions.model_validate(asked)) as publisher, judging(publisher, concurrency=256) as judge:
        found = judge.find(writes=300, fenced=True)
        assert found.answers > 100 and (found.torn, found.misnamed) == (0, 0), found
        found = judge.find(writes=30_000, fenced=False)
        assert found.torn, found
