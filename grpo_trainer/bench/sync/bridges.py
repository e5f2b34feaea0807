"""How each bridge is measured: how it is opened, what its trainer changes, and which figures are its own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import httpx
import torch
from peft import PeftModel

from grpo_trainer.alignment.model_proof import ModelProof
from grpo_trainer.bench.figures import median_ms
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.subject import (
    PROMPT,
    Loaded,
    Place,
    Publish,
    Subject,
    configured,
    gb_since,
    gpu_used_mb,
    own_server,
    server_spec,
    serving,
)
from grpo_trainer.config.bridge import CheckpointRestart, LoraOnly, SharedVllm
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.launch.plan import ProcessSpec, lora_flags
from grpo_trainer.optim import build_optimizer
from grpo_trainer.policy import SharedWeights
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights import checkpoint_restart
from grpo_trainer.weights.checkpoint_restart import CheckpointModels, Launched
from grpo_trainer.weights.lora_swap import LoraSwap
from grpo_trainer.weights.shared_weights import SharedBridge
from vllm_server.protocol import InFlight
from vllm_server.protocol.bridge_config import FILE_NAME

SMALL_B = 1e-3
SHARED_WARM_UP = 3
NO_LAST_VERSION = -1


class LoraSubject(Subject[LoraSwap]):
    """Publishes an adapter. Versions start at 1, so that 0 is the base model."""

    base_routing: ClassVar[Mapping[str, Any]] = {"policy_version": 0}
    parts = (("publish/save_time",), ("publish/load_time",), ("publish/stall_time",))

    @cached_property
    def _named(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if "lora_" in name}

    @cached_property
    def _factors(self) -> list[torch.Tensor]:
        return [p.detach() for name, p in self._named.items() if "lora_B" in name]

    def prove(self) -> Mapping[str, float] | None:
        for factor in self._factors:
            factor.normal_(std=SMALL_B)  # a fresh adapter's B is 0: it would have no effect
        self.bridge.prove()
        return self.bridge.proved and asdict(self.bridge.proved)

    @property
    def served_dtype(self) -> torch.dtype:
        """The dtype in which the server holds adapters."""
        return getattr(torch, (self.info.lora_dtype or self.info.dtype).removeprefix("torch."))

    def warm_up(self) -> None:
        """Load one adapter into each free slot, since the first load into a slot is slower. Then publish as many
        versions as the server keeps, so that each later publish evicts one."""
        free = self.info.max_loras - len(self.client.lora_status().versions)
        names = [f"{self.info.lora_name}-warm-{number}" for number in range(free)]
        for name in names:
            self.bridge.send(name, self.version, activate=False)
        for name in names:
            self.client.unload_adapter(name)
        for _ in range(self.info.keep_versions + 1):
            self.publish()

    def change(self) -> None:
        step = SMALL_B / 10 * (1 if self.version % 2 else -1)
        torch._foreach_add_(self._factors, step)  # pyright: ignore[reportPrivateImportUsage]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the optimizer's step is not what is measured

    def facts(self, publishes: Sequence[Publish]) -> dict[str, Any]:
        assert self.bridge.transport is not None, "connected"
        nbytes = sum(p.numel() for p in self._named.values()) * self.served_dtype.itemsize
        own = {"transport": self.bridge.transport.name, "adapter_mb": round(nbytes / 1e6, 3)}
        return {**super().facts(publishes), **own}

    def baseline(self, repeat: int) -> dict[str, Any]:
        """Save by PEFT's `save_pretrained`, load by vLLM's own route, each time under a new name; medians.

        vLLM's unload route forgets the name but leaves the adapter in its slot, and the server does not evict adapters
        to make room. So our versions are unloaded first, and there are at most as many loads as slots. All figures are
        then of one server, with no more slots than in a run. The first load warms up.
        """
        for version in self.client.lora_status().versions:
            self.client.unload_adapter(version.name)
        repeat = min(repeat, self.info.max_loras - 1)
        saves, loads = [], []
        with httpx.Client(base_url=self.url, timeout=120.0, trust_env=False) as http:
            for number in range(repeat + 1):
                name = f"baseline-{number}"
                folder = self.written / name
                started = time.perf_counter()
                self._save_by_peft(folder)
                saves.append(time.perf_counter() - started)
                started = time.perf_counter()
                _post(http, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
                loads.append(time.perf_counter() - started)
                asked = {"model": name, "prompt": PROMPT, "max_tokens": 1, "ignore_eos": True}
                answered = _post(http, "/v1/completions", asked).json()["model"]
                if answered != name:
                    raise BridgeError("another adapter answers", field="baseline", got=answered, wanted=name)
                _post(http, "/v1/unload_lora_adapter", {"lora_name": name})
        return {
            "baseline_ms": median_ms(loads[1:]),
            "baseline_save_ms": median_ms(saves[1:]),
            "baseline_repeat": repeat,
        }

    def _save_by_peft(self, folder: Path) -> None:
        """Write the adapter in the server's dtype: the smallest file from which the server loses no precision."""
        state = {name: p.detach().to(self.served_dtype) for name, p in self._named.items()}
        self.model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)


def _post(http: httpx.Client, route: str, body: dict[str, Any]) -> httpx.Response:
    answer = http.post(route, json=body)
    if answer.status_code != 200:
        raise ServerError(
            answer.text[:500], field=f"baseline: POST {route}", got=f"status {answer.status_code}", wanted="200"
        )
    return answer


class SharedSubject(Subject[SharedBridge]):
    """Writes all weights, in the server's memory.

    It multiplies them by one, which rewrites the same bits. That reads and writes as many bytes as an optimizer's copy
    of new weights from the gradients' memory, without needing that memory.
    """

    parts = (("publish/write_time",), ("publish/pause_time",), ("publish/stall_time",))

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the server's memory."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def prove(self) -> Mapping[str, float] | None:
        self.bridge.prove()
        return self.bridge.proved and asdict(self.bridge.proved)

    def warm_up(self) -> None:
        for _ in range(SHARED_WARM_UP):
            self.publish()

    def change(self) -> None:
        torch._foreach_mul_(self.parameters, 1.0)  # pyright: ignore[reportPrivateImportUsage]

    def trained(self) -> None:
        self.version += 1
        self.bridge.publish(self.version)

    def facts(self, publishes: Sequence[Publish]) -> dict[str, Any]:
        names = {"write_ms": "write_time", "pause_ms": "pause_time", "after_write_ms": "end_time"}
        own = {ours: median_ms([each.metrics[f"publish/{its}"] for each in publishes]) for ours, its in names.items()}
        beside = [each.stall_seconds - each.pack_seconds for each in publishes]
        write = "every weight times one, in place"
        return {**super().facts(publishes), "write": write, **own, "stall_beside_write_ms": median_ms(beside)}


class RestartSubject(Subject[checkpoint_restart.CheckpointRestart]):
    """Writes a checkpoint of all weights and restarts the server on it; meanwhile the server answers no requests."""

    serves_on = False
    parts = (
        ("publish/save_time",),
        ("publish/stop_time", "publish/start_time"),
        ("publish/stop_time", "publish/start_time"),
    )


@contextmanager
def _lora_only(options: SyncOptions, place: Place) -> Iterator[LoraSubject]:
    """Model first, server after it: vLLM must not see memory come and go while it measures what is free. (A model in
    the server's memory takes none.)"""
    choice = options.choice
    root = (choice.lora_root or place.folder).absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo-adapters-", dir=root) as folder:
        config = configured(
            *(options, place, "lora_only"),
            lora_transport=choice.transport,
            lora_r=choice.lora_r,
            lora_alpha=2.0 * choice.lora_r,
            lora_keep_versions=choice.keep_versions,
            lora_root=folder,
            share_base=choice.share_base,
        )
        assert isinstance(config.bridge, LoraOnly)
        early = None if choice.share_base else Loaded.of(config, place)
        flags = lora_flags(config, config.bridge, place.folder)
        flags = (*flags, *_sharing(place)) if choice.share_base else flags
        before = gpu_used_mb(options)
        with serving(config, place, flags) as server:
            alone = gb_since(before, options)
            loaded, client = early or Loaded.of(config, place), ServerClient(config.vllm)
            assert isinstance(loaded.policy.model, PeftModel)
            with LoraSwap(config.bridge, loaded.policy.model, client, Path(folder), config.model.seq_len) as swap:
                version = swap.connect(1) - 1
                yield LoraSubject(swap, loaded, config, client, server, Path(folder), alone, version)


@contextmanager
def shared_vllm(options: SyncOptions, place: Place, in_flight: InFlight = "keep") -> Iterator[SharedSubject]:
    """Start the server first, since the trainer uses its memory."""
    config = configured(options, place, "shared_vllm", in_flight=in_flight)
    assert isinstance(config.bridge, SharedVllm)
    before = gpu_used_mb(options)
    with serving(config, place, _sharing(place)) as server:
        alone = gb_since(before, options)
        loaded, client = Loaded.of(config, place), ServerClient(config.vllm)
        assert isinstance(loaded.policy, SharedWeights)
        with SharedBridge(config.bridge, loaded.policy, client, config.model.seq_len) as bridge:
            version = bridge.connect(0)
            yield SharedSubject(bridge, loaded, config, client, server, place.folder / "written", alone, version)


def _sharing(place: Place) -> tuple[str, ...]:
    """Return the flags of a server that shares its weights."""
    return ("--shared-weights", "--bridge-config-path", str(place.folder / FILE_NAME))


@contextmanager
def _restart(options: SyncOptions, place: Place) -> Iterator[RestartSubject]:
    """The trainer's model is in fp32, as in training; its optimizer has no states yet."""
    written = place.folder / "written"
    config = configured(options, place, "none", vllm_restart_interval=1, save_path=str(written), keep_checkpoints=1)
    assert isinstance(config.bridge, CheckpointRestart)
    loaded, client = Loaded.of(config, place), ServerClient(config.vllm)
    model = loaded.policy.model
    optimizer = build_optimizer(list(model.parameters()), config.optimizer)
    checkpoints = Checkpoints(config.checkpoints, loaded.policy, optimizer)

    def launch(path: str, version: int) -> ProcessSpec:
        return server_spec(config, place, path, ("--policy-version", str(version)))

    server = own_server(place, launch)
    proof = ModelProof(model, client, place.dtype) if config.bridge.proof else None
    models = CheckpointModels(config.model.name, checkpoints)
    launched = [Launched(server, client, proof)]
    with checkpoint_restart.CheckpointRestart(
        config.bridge, models, launched, config.model.seq_len, NO_LAST_VERSION
    ) as bridge:
        if place.on_gpu:
            torch.cuda.empty_cache()  # a launch does: what the loading has left is none of the server's
        before = gpu_used_mb(options)
        version = bridge.connect(0)
        yield RestartSubject(bridge, loaded, config, client, server, written, gb_since(before, options), version)


OPENERS: Mapping[str, Callable[[SyncOptions, Place], AbstractContextManager[Subject[Any]]]] = {
    "lora_only": _lora_only,
    "shared_vllm": shared_vllm,
    "none": _restart,
}
