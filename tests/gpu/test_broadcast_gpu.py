"""All weights sent to a server on the same GPU: from the trainer's own memory, and by way of main memory."""

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
    with receiving(tmp_path, "--gpu-memory-utilization", "0.1", "--dtype", "bfloat16") as server:
        made = Sending(server, tmp_path, broadcast_transport=transport, broadcast_staging=staging, dtype="bfloat16")
        with made.bridge:
            first = made.bridge.connect(0)
            if transport == "auto":
                assert made.bridge.sent.transport == "cuda_ipc"
            assert made.bridge.prove() is not None
            for version in (first + 1, first + 2):
                made.step()
                metrics = reduce(made.bridge.publish(version).metrics)
                assert metrics["publish/version"] == version
                assert_equal_bits(server, made.policy.model, torch.bfloat16)
