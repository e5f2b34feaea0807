"""The bridge's contract on a GPU: CUDA graphs on, bfloat16, the trainer on the server's GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_trainer.errors import BridgeError
from tests.bridge_contract import PROMISES, Contract, Trainer, contract
from tests.integration.serving import KEEP_VERSIONS, Serving, serving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = 0.02  # bfloat16 on both sides
FLAGS = ["--lora-keep-versions", str(KEEP_VERSIONS), "--max-num-seqs", "16"]


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server on the trainer's GPU."""
    with serving(tmp_path_factory.mktemp("on_one_gpu"), *FLAGS) as server:
        yield server


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("transport", ["cuda_ipc", "memory", "disk"])
def test_contract_on_one_gpu(on_one_gpu: Serving, transport: str, promise: str) -> None:
    with contract(on_one_gpu, transport, "cuda", TOLERANCE) as made:
        getattr(made, promise)()


def test_auto_takes_gpu_memory(on_one_gpu: Serving) -> None:
    trainer = Trainer(on_one_gpu, "cuda")
    with trainer.swap:
        first = trainer.swap.connect(1)
        made = Contract(on_one_gpu, trainer, "cuda_ipc", first, TOLERANCE)
        made.publish(first)
        made.assert_serves(first)
        (held,) = [version for version in made.status().versions if version.active]
        assert held.adapter_path.startswith("cuda_ipc://")


def test_nccl_with_one_gpu_is_refused_with_the_reason(on_one_gpu: Serving) -> None:
    trainer = Trainer(on_one_gpu, "cuda", lora_transport="nccl")
    own = f"GPU {torch.cuda.get_device_properties(0).uuid}"
    with trainer.swap, pytest.raises(BridgeError, match=rf"\bnccl\b.*\b{own}\b") as refused:
        trainer.swap.connect(1)
    assert refused.value.field == "--lora-transport"


def test_a_trainer_that_has_left_is_forgotten(on_one_gpu: Serving) -> None:
    """The next trainer on the same server opens another channel, and the server serves its adapter."""
    for seed in (1, 2):
        with contract(on_one_gpu, "cuda_ipc", "cuda", TOLERANCE) as made:
            made.publish(made.first + seed)
            made.assert_serves(made.first + seed)


@pytest.mark.alone
def test_publishes_leave_no_gpu_memory_behind(on_one_gpu: Serving) -> None:
    """What the server and the trainer hold after each slot was written is what they hold fifty publishes later."""
    with contract(on_one_gpu, "memory", "cuda", TOLERANCE) as made:
        free = []
        for version in range(made.first, made.first + 60):
            made.publish(version)
            if version >= made.first + 9:
                torch.cuda.synchronize()
                free.append(torch.cuda.mem_get_info()[0])
        assert free[0] - free[-1] < 32 << 20
