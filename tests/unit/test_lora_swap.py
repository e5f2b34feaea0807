"""What the server answers to a publish, held against what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.lora_swap import LoraSwap
from grpo_trainer.weights.transports.transport import Sent
from vllm_server.protocol import LoraLoadResponse, Transport

LOADED = LoraLoadResponse(
    adapter_path="", adapter_name="policy-v3", adapter_id=1, load_count=1, adapter_config={}, policy_version=3,
    transport="disk", slot=0, replayed=False, load_seconds=0.0, stall_seconds=0.0, unloaded=[],
)  # fmt: skip


class Confirming:
    """A transport whose server confirms version 3, whatever was sent."""

    name: Transport = "disk"

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        return Sent(LOADED, 0.0)

    def close(self) -> None: ...


@pytest.fixture
def bridge() -> LoraSwap:
    nothing: Any = None
    bridge = LoraSwap(BridgeConfig(weight_bridge_mode="lora_only"), nothing, nothing, Path(), 64)
    bridge.transport = Confirming()
    return bridge


def test_a_confirmed_version_is_published(bridge: LoraSwap) -> None:
    published = bridge.publish(3)
    assert (published.version, published.name) == (3, "policy-v3")


def test_another_version_than_the_published_one_is_refused(bridge: LoraSwap) -> None:
    with pytest.raises(BridgeError) as failed:
        bridge.publish(4)
    assert (failed.value.field, failed.value.got) == ("version", "3 (policy-v3)")
    assert failed.value.wanted == "4 (policy-v4)"


def test_another_name_than_the_sent_one_is_refused(bridge: LoraSwap) -> None:
    with pytest.raises(BridgeError) as failed:
        bridge.send("policy-proof", 3, activate=False)
    assert failed.value.wanted == "3 (policy-proof)"
