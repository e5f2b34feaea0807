"""`python -m tests.integration.faulty WORDS`: `python -m vllm_server WORDS` with a fault planted.

What is wrong is in the file that GRPO_TEST_FAULT names, read again each time: one server has every fault, one after the
other. The engine's process has the faults because it is forked from the server's (`tests.warm`).
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils

from vllm_server.policy import PolicyRegistry
from vllm_server.publisher import Adapters
from vllm_server.worker.slots import AdapterSlots, PackedAdapter


def fault() -> str:
    return Path(os.environ["GRPO_TEST_FAULT"]).read_text().strip()


def without_lora_in_cache_keys() -> None:
    """vLLM's prefix cache takes blocks of one adapter for those of another."""
    honest = kv_cache_utils._gen_lora_extra_hash_keys
    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: (
        [] if fault() == "stale prefix cache" else honest(request)
    )


def wrong_slots() -> None:
    """What is written into the engine's slots is not what came."""
    honest = AdapterSlots.install

    def install(self: AdapterSlots, adapter_id: int, adapter: PackedAdapter, config: dict[str, Any]) -> Any:
        kind, _, part = fault().partition(" ")
        buffer_E = adapter.buffer_E.clone()
        for name, tensor in adapter.tensors(buffer_E).items():
            with torch.no_grad():
                if kind == "base" or (kind == "without" and part in name):
                    tensor.zero_()
                elif kind == "twice" and ".lora_B" in name:
                    tensor.mul_(config["lora_alpha"] / config["r"])
        return honest(self, adapter_id, PackedAdapter(adapter.layout, buffer_E), config)

    AdapterSlots.install = install


def wrong_version() -> None:
    """Requests that name an adapter get the newest version, or the adapter that was loaded first under their name."""
    resolve = PolicyRegistry.resolve

    def wrong(self: PolicyRegistry, model: str | None = None, policy_version: int | None = None) -> Any:
        return self.newest if fault() == "newest" else resolve(self, model, policy_version)

    PolicyRegistry.resolve = wrong


def wrong_adapter() -> None:
    """Requests are answered in the asked name, by the adapter of the proof that was loaded before the last."""
    request = Adapters.request
    loaded: list[tuple[str, int, str]] = []

    def wrong(self: Adapters, name: str, adapter_id: int, path: str) -> Any:
        if fault() != "other adapter" or "-proof-" not in name:
            loaded.clear()
            return request(self, name, adapter_id, path)
        if (name, adapter_id, path) not in loaded:
            loaded.append((name, adapter_id, path))
        return request(self, *loaded[max(0, len(loaded) - 2)])

    Adapters.request = wrong


if __name__ == "__main__":
    without_lora_in_cache_keys()
    wrong_slots()
    wrong_version()
    wrong_adapter()
    runpy.run_module("vllm_server", run_name="__main__", alter_sys=True)
