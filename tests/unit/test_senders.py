"""Which way all weights take to a server."""

from __future__ import annotations

import pytest

from grpo_trainer.weights.senders import SENDERS, obstacle
from tests.unit.factories import OURS, bridge_info, worker
from vllm_server.protocol import BridgeInfo

OTHER = "GPU-1"
SEES_OURS = worker(uuid=OTHER, visible=[OTHER, OURS])


@pytest.mark.parametrize(
    ("gpu", "told", "possible"),
    [
        (OURS, bridge_info(), True),
        (OURS, bridge_info(SEES_OURS), True),
        (OURS, bridge_info(SEES_OURS, worker(1, OTHER)), False),  # a worker does not see the trainer's GPU
        (OURS, bridge_info(machine="there"), False),
        ("", bridge_info(), False),  # weights on a CPU, or sharded over processes
    ],
)
def test_memory_is_mapped_where_every_worker_sees_it(gpu: str, told: BridgeInfo, possible: bool) -> None:
    assert (obstacle("cuda_ipc", gpu, "here", told) is None) == possible
    assert all(obstacle(other, gpu, "here", told) is None for other in SENDERS if other != "cuda_ipc")
