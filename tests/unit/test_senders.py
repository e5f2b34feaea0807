"""Which way all weights take to a server."""

from __future__ import annotations

import pytest

from grpo_trainer.weights.gpus import TrainerPlace, obstacle
from grpo_trainer.weights.senders.choose import AUTOMATIC, SENDERS
from tests.unit.factories import OURS, bridge_info, worker
from vllm_server.protocol import BridgeInfo

OTHER = "GPU-1"
SEES_OURS = worker(uuid=OTHER, visible=[OTHER, OURS])


APART = bridge_info(worker(uuid=OTHER, visible=[OTHER]))


@pytest.mark.parametrize(
    ("trainer", "described", "possible"),
    [
        (TrainerPlace(OURS, "here"), bridge_info(), {"cuda_ipc"}),
        (TrainerPlace(OURS, "here"), bridge_info(SEES_OURS), {"cuda_ipc", "nccl"}),
        (TrainerPlace(OURS, "here", sharded=True), bridge_info(SEES_OURS), {"nccl", "main_memory"}),
        (TrainerPlace(OURS, "here", sharded=True), bridge_info(), {"main_memory"}),  # on our GPU
        (TrainerPlace(OURS, "here", sharded=True), bridge_info(worker(uuid=OTHER), machine="there"), {"nccl"}),
        (TrainerPlace("", "here", sharded=True), bridge_info(worker(uuid="")), {"main_memory"}),
        (TrainerPlace(OURS, "here"), APART, {"nccl"}),
        (TrainerPlace(OURS, "here"), bridge_info(SEES_OURS, worker(1, OTHER)), {"nccl"}),  # one does not see our GPU
        (TrainerPlace(OURS, "here"), bridge_info(worker(), worker(1, OTHER)), set()),  # and one is on it
        (TrainerPlace(OURS, "here"), bridge_info(machine="there"), set()),  # the same GPU cannot be there
        (TrainerPlace("", "here"), bridge_info(), set()),
        (TrainerPlace("", "here"), bridge_info(worker(uuid="")), set()),
    ],
)
def test_what_works_where(trainer: TrainerPlace, described: BridgeInfo, possible: set[str]) -> None:
    found = {name for name in SENDERS if obstacle(name, trainer, described) is None}
    assert found == possible | {"gloo", "disk"}


@pytest.mark.parametrize(
    ("sharded", "machine", "chosen"), [(True, "here", "main_memory"), (True, "there", "nccl"), (False, "here", "nccl")]
)
def test_only_sharded_weights_on_the_servers_machine_go_by_main_memory(
    sharded: bool, machine: str, chosen: str
) -> None:
    trainer, described = TrainerPlace(OURS, "here", sharded), bridge_info(worker(uuid=OTHER), machine=machine)
    assert next(name for name in AUTOMATIC if obstacle(name, trainer, described) is None) == chosen
