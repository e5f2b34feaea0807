"""A server in 8 bits on a GPU: it says so, and its samples are near the adapted model and far from the base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from grpo_trainer.alignment.probes import ask, gap, probe_prompts
from grpo_trainer.alignment.proof import NOISE_LIMIT_QUANTISED
from grpo_trainer.config.server import Server
from grpo_trainer.server_client import ServerClient
from tests.integration.serving import Serving, serving
from vllm_server.protocol import BridgeInfo

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "16")
WAYS = {"weights": ("--quantization", "fp8"), "cache": ("--kv-cache-dtype", "fp8", "--enforce-eager")}
NEEDED = (8, 9)
"""The first compute capability with matrix products in fp8 (Ada); vLLM only stores fp8 on older GPUs."""


@pytest.fixture(scope="module", params=WAYS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Serving]]:
    if torch.cuda.get_device_capability() < NEEDED:
        pytest.skip(f"needs a GPU of compute capability {NEEDED} or later")
    folder: Path = tmp_path_factory.mktemp(request.param)
    with serving(folder, *FLAGS, *WAYS[request.param]) as made:
        yield request.param, made


def test_the_server_says_so(server: tuple[str, Serving]) -> None:
    way, made = server
    info = msgspec.json.decode(made.get("/bridge/info").content, type=BridgeInfo)
    assert info.in_8_bits
    assert (info.quantization == "fp8") == (way == "weights")
    assert info.kv_cache_dtype.startswith("fp8") == (way == "cache")


def test_samples_are_near_the_trainers_policy(server: tuple[str, Serving]) -> None:
    """With an adapter in 16 bits on the base in 8: near the adapted model, and far from the base model."""
    way, made = server
    client = ServerClient(Server(port=int(made.url.rpartition(":")[2])))
    model, loaded = made.publish()
    model = model.to(device="cuda", dtype=torch.bfloat16)
    probes = ask(client, probe_prompts(model.config.vocab_size, 200), 48, name=loaded.adapter_name)
    own = gap(model, probes)
    with model.disable_adapter():
        base = gap(model, probes)
    print(f"fp8 {way}: {own:.3g} nats a token from the trainer, {base:.3g} from the base model")
    assert own < NOISE_LIMIT_QUANTISED
    assert base > 2 * own
