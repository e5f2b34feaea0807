"""How each bridge is measured: how it is opened, what its trainer changes, and which figures are its own."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
import torch

from grpo_trainer.bench.figures import median_ms
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.subject import (
    PROMPT,
    Loaded,
    Place,
    Publish,
    Subject,
    configured,
    gpu_used_mb,
    mb_since,
    serving,
)
from grpo_trainer.config.bridge import LoraOnly
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.optim import build_optimizer
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.signals import StopSignal
from grpo_trainer.weights.broadcast import BroadcastBridge
from grpo_trainer.weights.build import build_bridge
from grpo_trainer.weights.checkpoint_restart import CheckpointRestart
from grpo_trainer.weights.lora_swap import LoraSwap
from grpo_trainer.weights.shared_weights import SharedBridge

W = TypeVar("W", SharedBridge, BroadcastBridge)

SMALL_B = 1e-3
SHARED_WARM_UP = 3


class LoraSubject(Subject[LoraSwap]):
    """Publishes an adapter. Versions start at 1, so that 0 is the base model."""

    base_routing: ClassVar[Mapping[str, Any]] = {"policy_version": 0}
    first_version = 1
    parts = (("publish/save_time",), ("publish/load_time",), ("publish/stall_time",))

    @property
    def written(self) -> Path:
        assert isinstance(self.config.bridge, LoraOnly) and self.config.bridge.lora_root is not None
        return self.config.bridge.lora_root

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


class AllWeightsSubject(Subject[W]):
    """Changes all weights, while the server runs.

    It multiplies them by one, which rewrites the same bits. That reads and writes as many bytes as an optimizer's copy
    of new weights from the gradients' memory, without needing that memory.
    """

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the trainer's model."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def prove(self) -> Mapping[str, float] | None:
        self.bridge.prove()
        return self.bridge.proved and asdict(self.bridge.proved)

    def warm_up(self) -> None:
        for _ in range(SHARED_WARM_UP):
            self.publish()

    def change(self) -> None:
        torch._foreach_mul_(self.parameters, 1.0)  # pyright: ignore[reportPrivateImportUsage]


class SharedSubject(AllWeightsSubject[SharedBridge]):
    """Writes all weights in the server's memory."""

    parts = (("publish/write_time",), ("publish/pause_time",), ("publish/stall_time",))

    def trained(self) -> None:
        self.version += 1
        self.bridge.publish(self.version)

    def facts(self, publishes: Sequence[Publish]) -> dict[str, Any]:
        names = {"write_ms": "write_time", "pause_ms": "pause_time", "after_write_ms": "end_time"}
        own = {ours: median_ms([each.metrics[f"publish/{its}"] for each in publishes]) for ours, its in names.items()}
        rest = [each.stall_seconds - each.pack_seconds for each in publishes]
        write = "every weight times one, in place"
        return {**super().facts(publishes), "write": write, **own, "stall_beside_write_ms": median_ms(rest)}


class BroadcastSubject(AllWeightsSubject[BroadcastBridge]):
    """Sends all weights to the server."""

    parts = (("publish/send_time",), ("publish/write_time",), ("publish/stall_time",))

    def facts(self, publishes: Sequence[Publish]) -> dict[str, Any]:
        sent = self.bridge.sent
        seconds = statistics.median(publish.seconds for publish in publishes)
        own = {
            "transport": sent.transport,
            "staged": sent.staged,
            "weights_gb": round(sent.nbytes / 1e9, 4),
            "gb_per_s": round(sent.nbytes / 1e9 / seconds, 2),
        }
        return {**super().facts(publishes), **own}


class RestartSubject(Subject[CheckpointRestart]):
    """Writes a checkpoint of all weights and restarts the server on it; meanwhile the server answers no requests."""

    serves_on = False
    parts = (
        ("publish/save_time",),
        ("publish/stop_time", "publish/start_time"),
        ("publish/stop_time", "publish/start_time"),
    )


SUBJECTS: Mapping[str, type[Subject[Any]]] = {
    "lora_only": LoraSubject,
    "shared_vllm": SharedSubject,
    "broadcast": BroadcastSubject,
    "none": RestartSubject,
}


@contextmanager
def opened(options: SyncOptions, place: Place, **values: Any) -> Iterator[Subject[Any]]:
    """Connect and prove a bridge with its model and its server, within the block.

    The model is loaded before the server starts: vLLM must not see memory come and go while it measures what is free. A
    model in the server's memory takes none, and is attached afterwards.

    Args:
        values: further options of the trainer.
    """
    choice, stop = options.choice, StopSignal()
    with ExitStack() as held:
        if choice.bridge == "lora_only":
            root = (choice.lora_root or place.folder).absolute()
            root.mkdir(parents=True, exist_ok=True)
            values |= {
                "lora_transport": choice.transport,
                "lora_r": choice.lora_r,
                "lora_alpha": 2.0 * choice.lora_r,
                "lora_keep_versions": choice.keep_versions,
                "lora_root": held.enter_context(tempfile.TemporaryDirectory(prefix="grpo-adapters-", dir=root)),
                "share_base": choice.share_base,
            }
        elif choice.bridge == "broadcast":
            values |= {"broadcast_transport": choice.transport, "broadcast_staging": choice.staging}
            values |= {} if choice.lora_root is None else {"broadcast_root": choice.lora_root}
        elif choice.bridge == "none":
            values |= {"vllm_restart_interval": 1}
        config = configured(options, place, **values)
        early = None if config.shares_weights else Loaded.of(config, place)
        if place.on_gpu:
            torch.cuda.empty_cache()  # what loading has left is none of the server's
        before, server_mb = gpu_used_mb(options), None
        if not config.owns_server:
            held.enter_context(serving(config, place, stop))
            server_mb = mb_since(before, options)
        policy = (loaded := early or Loaded.of(config, place)).policy
        trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        checkpoints = Checkpoints(config.checkpoints, policy, build_optimizer(trained, config.optimizer))
        bridge = held.enter_context(build_bridge(config, policy, checkpoints, Progress(), stop))
        subject = SUBJECTS[choice.bridge]
        version = bridge.connect(subject.first_version) - subject.first_version
        if config.owns_server:
            server_mb = mb_since(before, options)
        yield subject(bridge, loaded, config, stop.check, server_mb, version)
