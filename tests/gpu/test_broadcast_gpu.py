"""All weights sent to a server: on the same GPU by memory that both map or by main memory, to another one by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_trainer.metrics.types import reduce
from tests.integration.test_broadcast import Sending, assert_equal_bits, receiving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("transport", "staging"), [("auto", "on"), ("auto", "off"), ("gloo", "on"), ("disk", "off")])
def test_each_version_is_served_bit_for_bit(tmp_path: Path, transport: str, staging: str) -> None:
    """Trained in fp32, served in bfloat16."""
    check(tmp_path, transport, staging, "cuda_ipc" if transport == "auto" else transport)


@pytest.mark.parametrize("staging", ["on", "off"])
def test_between_gpus(tmp_path: Path, staging: str) -> None:
    """The server sees the second GPU alone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes one rank a GPU")
    check(tmp_path, "auto", staging, "nccl", env={"CUDA_VISIBLE_DEVICES": "1"})


def check(
    folder: Path, transport: str, staging: str, chosen: str, *flags: str, env: dict[str, str] | None = None
) -> None:
    words = ["--gpu-memory-utilization", "0.1", "--dtype", "bfloat16", *flags]
    with receiving(folder, *words, env=env) as server:
        made = Sending(server, folder, broadcast_transport=transport, broadcast_staging=staging, dtype="bfloat16")
        with made.bridge:
            first = made.bridge.connect(0)
            assert made.bridge.sent.transport == chosen
            assert made.bridge.prove() is not None
            for version in (first + 1, first + 2):
                made.step()
                metrics = reduce(made.bridge.publish(version).metrics)
                assert metrics["publish/version"] == version
                assert_equal_bits(server, made.policy.model, torch.bfloat16)
