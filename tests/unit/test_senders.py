"""Which way all weights take to a server."""

from __future__ import annotations

import pytest

from grpo_trainer.weights.senders import SENDERS, Place, obstacle
from tests.unit.factories import OURS, bridge_info, worker
from vllm_server.protocol import BridgeInfo

OTHER = "GPU-1"
SEES_OURS = worker(uuid=OTHER, visible=[OTHER, OURS])


ON_GPU = Place(OURS, sharded=False, machine="here")


@pytest.mark.parametrize(
    ("ours", "told", "possible"),
    [
        (ON_GPU, bridge_info(), {"cuda_ipc"}),
        (ON_GPU, bridge_info(SEES_OURS), {"cuda_ipc", "nccl"}),
        (
            ON_GPU,
            bridge_info(SEES_OURS, worker(1, "GPU-2")),
            {"nccl"},
        ),  # the second worker does not see the trainer's GPU
        (ON_GPU, bridge_info(SEES_OURS, worker(1, OURS)), {"cuda_ipc"}),  # and here it is on the trainer's GPU
        (ON_GPU, bridge_info(worker(uuid=OTHER), machine="there"), {"nccl"}),
        (ON_GPU, bridge_info(worker(uuid="", visible=[])), set()),  # a server on CPUs
        (Place(OURS, sharded=True, machine="here"), bridge_info(SEES_OURS), {"nccl"}),
        (Place("", sharded=False, machine="here"), bridge_info(SEES_OURS), set()),
    ],
)
def test_what_works_where(ours: Place, told: BridgeInfo, possible: set[str]) -> None:
    assert {name for name in SENDERS if obstacle(name, ours, told) is None} == possible | {"gloo", "disk"}
