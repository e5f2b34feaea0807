"""Bad adapters between good ones, under load, on a GPU: CUDA graphs on, bfloat16, our kernels and vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.serving import serving
from tests.integration.test_not_finite import KINDS, Trial

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLAGS = ["--gpu-memory-utilization", "0.1", "--max-num-seqs", "16", "--lora-keep-versions", "2"]


@pytest.mark.parametrize("kernels", ["grpo", "vllm"])
def test_bad_adapters_between_good_ones_leave_no_trace(tmp_path: Path, kernels: str) -> None:
    with serving(tmp_path, *FLAGS, "--lora-kernels", kernels) as server:
        trial = Trial(server, tolerance=0.5)  # bfloat16 against float32
        trial.publish_good()
        with trial:
            for kind in KINDS * 5:
                trial.publish_bad(kind)
                trial.publish_good()
        found = trial.check_all()
    assert set(found) == {200, 503} and found[200] > 50, found
