"""All weights sent to a server: on the trainer's GPU from the trainer's own memory, on another one by NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainer.doctor.trials import tried
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.weights.broadcast import PresentWeights
from grpo_trainer.weights.layout import ModelLayout
from tests.gpu.devices import only_gpus
from tests.integration.serving import Serving
from tests.integration.test_broadcast import Sending, assert_equal_bits, receiving
from vllm_server.protocol.channels import MainMemorySpec, MappedTensor
from vllm_server.protocol.flat import encode_header, lay_out
from vllm_server.worker.channels import MainMemory
from vllm_server.worker.packed import layout_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLAGS = ["--dtype", "bfloat16"]


def assert_versions_arrive(server: Serving, made: Sending, transport: str) -> None:
    """Three versions, trained in fp32 and served in bfloat16: by vLLM's own loading, then by its recorded copies."""
    with made.bridge:
        first = made.bridge.connect(0)
        assert made.channel.name == transport
        assert made.bridge.prove() is not None
        for version in (first + 1, first + 2):
            made.step()
            metrics = reduce(made.bridge.publish(version).metrics)
            assert metrics["publish/version"] == version
            assert_equal_bits(server, made.policy.model, torch.bfloat16)


@pytest.mark.parametrize(
    ("transport", "staging"),
    [("auto", "on"), ("auto", "off"), ("gloo", "on"), ("disk", "on"), ("disk", "off")],
)
def test_each_version_is_served_bit_for_bit(tmp_path: Path, transport: str, staging: str) -> None:
    with receiving(tmp_path, *FLAGS) as server:
        made = Sending(server, tmp_path, broadcast_transport=transport, broadcast_staging=staging, dtype="bfloat16")
        assert_versions_arrive(server, made, "cuda_ipc" if transport == "auto" else transport)


def test_gathered_weights_are_page_locked_and_rounded_as_a_gpu_rounds() -> None:
    on_gpu = torch.randn(1000, device="cuda")
    weights = PresentWeights(lambda: {"w": on_gpu}, lambda keep: {"w": keep(on_gpu)})
    gathered = weights.of(0, torch.bfloat16)["w"]
    assert gathered.is_pinned() and torch.equal(gathered, on_gpu.to(torch.bfloat16).cpu())


def test_a_worker_maps_gathered_weights_and_copies_them_to_its_gpu() -> None:
    on_gpu = torch.randn(1 << 22, device="cuda")
    weights = PresentWeights(lambda: {"w": on_gpu}, lambda keep: {"w": keep(on_gpu)})
    place = weights.gathered(torch.bfloat16)
    assert place is not None
    tensor = MappedTensor(storage=0, offset=0, shape=[1 << 22], stride=[1], dtype="bfloat16")
    memory = place.memory
    spec = MainMemorySpec(name=memory.name, path=memory.path, nbytes=len(memory), tensors={"w": tensor})
    layout = layout_of(encode_header(lay_out([("w", (1 << 22,))], "BF16"), {}), "")
    mapped = MainMemory(spec, [layout], torch.device("cuda"))
    assert mapped.is_locked
    buffer_E = torch.empty(1 << 22, dtype=torch.bfloat16, device="cuda")
    for version in (1, 2):
        on_gpu.mul_(-0.5)
        weights.of(version, torch.bfloat16)
        mapped.fill(version, 0, buffer_E)
        assert torch.equal(buffer_E, on_gpu.to(torch.bfloat16))


def test_the_doctor_tries_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert tried("nccl") is None


def test_nccl_on_one_gpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    with receiving(tmp_path, *FLAGS) as server:
        made = Sending(server, tmp_path, broadcast_transport="nccl", dtype="bfloat16")
        with made.bridge, pytest.raises(BridgeError) as refused:
            made.bridge.connect(0)
        assert str(torch.cuda.get_device_properties(0).uuid) in str(refused.value)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes one rank a GPU")
    with receiving(tmp_path_factory.mktemp("apart"), *FLAGS, env=only_gpus(1)) as server:
        yield server


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
