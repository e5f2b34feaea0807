"""All weights sent to a server on the trainer's GPU: from the trainer's own memory, by Gloo and by files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.weights.broadcast import PresentWeights
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


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server on the trainer's GPU, with CUDA graphs."""
    with receiving(tmp_path_factory.mktemp("on_one_gpu"), *FLAGS) as server:
        yield server


@pytest.mark.parametrize(
    ("transport", "staging"),
    [("auto", "on"), ("auto", "off"), ("gloo", "on"), ("disk", "on"), ("disk", "off")],
)
def test_each_version_is_served_bit_for_bit(on_one_gpu: Serving, tmp_path: Path, transport: str, staging: str) -> None:
    made = Sending(on_one_gpu, tmp_path, broadcast_transport=transport, broadcast_staging=staging, dtype="bfloat16")
    assert_versions_arrive(on_one_gpu, made, "cuda_ipc" if transport == "auto" else transport)


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


def test_nccl_on_one_gpu_is_refused_with_the_reason(on_one_gpu: Serving, tmp_path: Path) -> None:
    made = Sending(on_one_gpu, tmp_path, broadcast_transport="nccl", dtype="bfloat16")
    with made.bridge, pytest.raises(BridgeError) as refused:
        made.bridge.connect(0)
    assert str(torch.cuda.get_device_properties(0).uuid) in str(refused.value)
