"""No answer sees half-written weights; without the fence some do, and the judge finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer.bench.publish import SyncOptions, opened
from tests.torn_weights import LEAST_ANSWERS, find_torn_answers

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("bridge", "fenced", "writes"),
    [("shared_vllm", True, 100), ("shared_vllm", False, 30_000), ("broadcast", True, 50)],
)
def test_torn_weights_only_without_a_fence(tmp_path: Path, bridge: str, fenced: bool, writes: int) -> None:
    options = SyncOptions.model_validate({"shape": "tiny", "bridge": bridge, "log_dir": tmp_path})
    with opened(options) as publisher:
        found = find_torn_answers(publisher, writes=writes, fenced=fenced)
    assert found.answers >= (LEAST_ANSWERS if fenced else 1) and found.misnamed == 0, found
    assert (found.torn == 0) == fenced, found
    assert not fenced or found.writes >= writes
