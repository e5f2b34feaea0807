"""No answer sees half-written weights; without the fence some do, and the judge finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer.bench.publish import SyncOptions, opened
from tests.torn_weights import LEAST_ANSWERS, judging

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("bridge", "writes"), [("shared_vllm", 100), ("broadcast", 50)])
def test_torn_weights_only_without_a_fence(tmp_path: Path, bridge: str, writes: int) -> None:
    options = SyncOptions.model_validate({"shape": "tiny", "bridge": bridge, "log_dir": tmp_path})
    with opened(options) as publisher, judging(publisher) as judge:
        found = judge.find(writes=writes, fenced=True)
        assert found.answers >= LEAST_ANSWERS and found.writes >= writes, found
        assert (found.torn, found.misnamed) == (0, 0), found
        if bridge == "shared_vllm":  # last: the weights are of no version any more
            found = judge.find(writes=30_000, fenced=False)
            assert found.torn, found
