"""All weights and adapters sent to a server on another GPU than the trainer's, by NCCL and by other transports.

CUDA graphs change nothing here, and the tests on one GPU have them. `test_paired_servers_gpu.py` has pairs and shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainer.doctor.trials import tried
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.weights.layout import ModelLayout
from tests.bridge_contract import PROMISES, Trainer, contract
from tests.gpu.devices import only_gpus
from tests.gpu.test_broadcast_gpu import FLAGS, assert_versions_arrive
from tests.gpu.test_lora_transports_gpu import FLAGS as LORA_FLAGS
from tests.gpu.test_lora_transports_gpu import TOLERANCE
from tests.integration.serving import Serving, serving
from tests.integration.test_broadcast import Sending, receiving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _needs_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes one rank a GPU")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that receives all weights on the second GPU, the only one that it sees."""
    with receiving(tmp_path_factory.mktemp("apart"), *FLAGS, "--enforce-eager", env=only_gpus(1)) as server:
        yield server


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The same, for adapters."""
    with serving(tmp_path_factory.mktemp("adapted"), *LORA_FLAGS, "--enforce-eager", env=only_gpus(1)) as server:
        yield server


def test_the_doctor_tries_nccl() -> None:
    assert tried("nccl") is None


@pytest.mark.parametrize("staging", ["on", "off"])
@pytest.mark.parametrize("transport", ["auto", "nccl", "gloo", "disk"])
def test_each_version_reaches_another_gpu_bit_for_bit(
    apart: Serving, tmp_path: Path, transport: str, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several buckets, so that nccl's buffers take turns."""
    monkeypatch.setattr("grpo_trainer.weights.layout.BUCKET_BYTES", 16384)
    made = Sending(apart, tmp_path, broadcast_transport=transport, broadcast_staging=staging, dtype="bfloat16")
    assert_versions_arrive(apart, made, "nccl" if transport == "auto" else transport)


def test_broadcast_trainer_that_dies(apart: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged weights of a version that has not arrived whole are not written."""
    monkeypatch.setattr("grpo_trainer.weights.layout.BUCKET_BYTES", 16384)
    made = Sending(apart, tmp_path, broadcast_transport="nccl", broadcast_staging="on", dtype="bfloat16")
    version = made.bridge.connect(0)
    made.step()

    class Died(Exception):
        pass

    def dying(self: ModelLayout, number: int, stored: Any, buffer_E: Tensor) -> Tensor:
        raise Died

    with monkeypatch.context() as patched, pytest.raises((Died, BridgeError, ServerError)):
        patched.setattr(ModelLayout, "pack", dying)
        made.bridge.publish(version + 1)
    assert made.ask()[1] == version
    again = Sending(apart, tmp_path, broadcast_transport="nccl", dtype="bfloat16")
    assert_versions_arrive(apart, again, "nccl")


@pytest.mark.parametrize("promise", PROMISES)
def test_contract_between_gpus(adapted: Serving, promise: str) -> None:
    with contract(adapted, "nccl", "cuda", TOLERANCE) as made:
        getattr(made, promise)()


def test_memory_that_the_server_cannot_see_is_refused_with_the_reason(adapted: Serving) -> None:
    trainer = Trainer(adapted, "cuda", lora_transport="cuda_ipc")
    with trainer.swap, pytest.raises(BridgeError, match=r"\bcuda_ipc\b.*CUDA_VISIBLE_DEVICES") as refused:
        trainer.swap.connect(1)
    assert refused.value.field == "--lora-transport"
