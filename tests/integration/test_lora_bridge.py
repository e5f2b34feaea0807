"""The LoRA bridge against the real server: what is published is what generates, under the version that was said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_trainer.config import LoraOnly, TrainConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.options import build
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.lora_swap import LoraSwap
from grpo_trainer.weights.proof import Probe, probe_of, trainer_logprobs
from tests.integration.serving import KEEP_VERSIONS, RANK, Serving, shared_server
from tests.unit.tiny_lora import fill_b

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

PROMPT = [2 + (5 * i) % 90 for i in range(300)]  # longer than two cache blocks: a stale cache would show


class Bridge:
    """A trainer's side: model, client, bridge. Versions start at 1: 0 stays the base model for other tests."""

    def __init__(self, server: Serving, **options: object) -> None:
        port = int(server.url.rpartition(":")[2])
        values = {"model": str(server.model_folder), "weight_bridge_mode": "lora_only", "vllm_port": port}
        lora = {"lora_r": RANK, "lora_keep_versions": KEEP_VERSIONS, "lora_root": str(server.adapter_root)}
        self.config = build(TrainConfig, {**values, **lora, "seq_len": 256, **options})
        assert isinstance(self.config.bridge, LoraOnly)
        base = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32)
        base.requires_grad_(False)
        self.model: PeftModel = add_adapter(base, self.config.bridge, seed=0)
        self.client = ServerClient(self.config.vllm)
        self.swap = LoraSwap(
            self.config.bridge, self.model, self.client, server.adapter_root, self.config.model.seq_len
        )

    def ask(self, **routing: Any) -> tuple[Probe, int]:
        answer = self.client.generate(PROMPT, max_tokens=6, temperature=1.0, logprobs=0, ignore_eos=True, **routing)
        return probe_of(answer), answer.policy_version


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    made = Bridge(shared_server())
    with made.swap:
        yield made


def difference(probe: Probe, model: PeftModel) -> float:
    return float((probe.server_logprobs - trainer_logprobs(model, probe)).abs().max())


def test_after_a_publish_the_server_generates_with_the_trainers_weights_and_says_so(bridge: Bridge) -> None:
    first = bridge.swap.connect(1)
    for version in range(first, first + KEEP_VERSIONS + 2):
        fill_b(bridge.model, seed=version)
        published = bridge.swap.publish(version)
        probe, answered = bridge.ask()
        assert answered == published.version == version
        assert difference(probe, bridge.model) < 1e-3
        with bridge.model.disable_adapter():
            assert difference(probe, bridge.model) > 0.02, "the adapter made no difference: the test shows nothing"
        assert reduce(published.metrics)["publish/version"] == version
    folders = sorted(path.name for path in shared_server().adapter_root.glob("policy-v*"))
    versions = [f"policy-v{v}" for v in range(first + 1, first + KEEP_VERSIONS + 2)]
    assert folders == sorted(versions)  # those that are served, and one more
    assert bridge.client.lora_status().available_adapters == versions[-KEEP_VERSIONS:]


def test_the_bridge_proves_itself_and_leaves_the_adapter_as_it_was(bridge: Bridge) -> None:
    first = bridge.swap.connect(1)
    fill_b(bridge.model)
    bridge.swap.publish(first)
    names = []
    load = bridge.client.load_adapter

    def watched(path: Path, name: str, version: int, *, activate: bool) -> object:
        answer = load(path, name, version, activate=activate)
        names.append(name)
        assert bridge.ask()[1] == first, "others got an adapter of the proof"
        return answer

    bridge.client.load_adapter = watched  # type: ignore[method-assign]
    bridge.swap.prove()
    assert len(names) == 3 and not set(names) & set(bridge.client.lora_status().available_adapters)
    bridge.client.load_adapter = load  # type: ignore[method-assign]
    bridge.swap.publish(first + 1)
    probe, answered = bridge.ask()
    assert answered == first + 1 and difference(probe, bridge.model) < 1e-3


def test_a_trainer_that_comes_to_a_used_server_goes_on_counting(bridge: Bridge) -> None:
    first = bridge.swap.connect(1)
    bridge.swap.publish(first)
    other = Bridge(shared_server())
    with other.swap:
        assert other.swap.connect(0) == first + 1
        assert other.swap.connect(first + 50) == first + 50  # a resumed trainer that is further keeps its count
        assert other.swap.publish(first + 1).version == first + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_r": 16}, f"takes adapters up to rank {RANK}, --lora-r is 16: start it with --max-lora-rank 16"),
        ({"lora_name": "other"}, "routes policy-vN, --lora-name is other: make them the same"),
    ],
)
def test_a_server_that_cannot_take_the_bridge_is_refused_before_training(options: dict[str, object], said: str) -> None:
    bridge = Bridge(shared_server(), **options)
    with bridge.swap, pytest.raises(BridgeError) as error:
        bridge.swap.connect(0)
    assert said in str(error.value)
