"""Plants a fault in a real server: with this folder in PYTHONPATH, every process of it imports this file at its start.

What is wrong is in the file that GRPO_TEST_FAULT names, read again each time: one server has every fault, one after the
other. Modules are changed when they are imported, in whichever process that is.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


def fault() -> str:
    return Path(os.environ["GRPO_TEST_FAULT"]).read_text().strip()


def without_lora_in_cache_keys(module) -> None:
    """vLLM's prefix cache takes blocks of one adapter for those of another."""
    honest = module._gen_lora_extra_hash_keys
    module._gen_lora_extra_hash_keys = lambda request: [] if fault() == "stale prefix cache" else honest(request)


def wrong_slots(module) -> None:
    """What is written into the engine's slots is not what came."""
    import torch

    honest = module.AdapterSlots.install

    def install(self, adapter_id, adapter, config):
        kind, _, part = fault().partition(" ")
        buffer_E = adapter.buffer_E.clone()
        for name, tensor in adapter.tensors(buffer_E).items():
            with torch.no_grad():
                if kind == "base" or (kind == "without" and part in name):
                    tensor.zero_()
                elif kind == "twice" and ".lora_B" in name:
                    tensor.mul_(config["lora_alpha"] / config["r"])
        return honest(self, adapter_id, module.PackedAdapter(adapter.layout, buffer_E), config)

    module.AdapterSlots.install = install


def wrong_version(module) -> None:
    """Requests that name an adapter get the newest version, or the adapter that was loaded first under their name."""
    resolve = module.PolicyRegistry.resolve

    def wrong(self, model=None, policy_version=None):
        return self.newest if fault() == "newest" else resolve(self, model, policy_version)

    module.PolicyRegistry.resolve = wrong


def wrong_adapter(module) -> None:
    """Requests are answered in the asked name, by the adapter of the proof that was loaded before the last."""
    request = module.Adapters.request
    loaded: list[tuple[str, int, str]] = []

    def wrong(self, name, adapter_id, path):
        if fault() != "other adapter" or "-proof-" not in name:
            loaded.clear()
            return request(self, name, adapter_id, path)
        if (name, adapter_id, path) not in loaded:
            loaded.append((name, adapter_id, path))
        return request(self, *loaded[max(0, len(loaded) - 2)])

    module.Adapters.request = wrong


PATCHES = {
    "vllm.v1.core.kv_cache_utils": without_lora_in_cache_keys,
    "vllm_server.worker.slots": wrong_slots,
    "vllm_server.policy": wrong_version,
    "vllm_server.publisher": wrong_adapter,
}


class Patcher(importlib.abc.MetaPathFinder):
    """Finds the modules of `PATCHES` as Python does, and has them changed once they are there."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module) -> None:
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, Patcher())
