"""Measures `lora_only`, and vLLM's own way to load an adapter for comparison."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel

from grpo_trainer.bench.sync.common import (
    PROMPT,
    OwnServer,
    check_answers,
    explained_by,
    gpu_used_gb,
    rounded,
    taken_since,
    train_values,
    weighed,
)
from grpo_trainer.bench.sync.figures import Baseline, Publish, median_ms
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.server import server_spec, serving
from grpo_trainer.bench.sync.step import Training
from grpo_trainer.bench.sync.subject import Facts, Place, WeightFigures
from grpo_trainer.config.bridge import LoraOnly
from grpo_trainer.config.options import build
from grpo_trainer.config.rules import checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.metrics.types import reduce
from grpo_trainer.policy import build_policy
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.lora_swap import LoraSwap
from vllm_server.protocol import LoraLoadRequest, LoraLoadResponse
from vllm_server.protocol.bridge_config import FILE_NAME

log = logging.getLogger(__name__)

SMALL_B = 1e-3


@contextmanager
def opened(options: SyncOptions, place: Place) -> Iterator[LoraOnlySubject]:
    """Model first, server after it: vLLM must not see memory come and go while it measures what is free. (A model in
    the server's memory takes none.)"""
    root = (options.choice.lora_root or place.folder).absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo-adapters-", dir=root) as folder:
        config = _train_config(options, place, Path(folder))
        with _serving(options, place, config, Path(folder)) as subject:
            yield subject


@contextmanager
def _serving(options: SyncOptions, place: Place, config: TrainConfig, written: Path) -> Iterator[LoraOnlySubject]:
    bridge = config.bridge
    assert isinstance(bridge, LoraOnly)

    def adapted() -> PeftModel:
        policy = build_policy(config)
        assert isinstance(policy.model, PeftModel)
        return policy.model

    early = None if bridge.share_base else weighed(adapted, place, attached=False)
    flags = ["--max-lora-rank", str(bridge.r), "--lora-name", bridge.name, "--lora-root", str(written)]
    flags += ["--lora-keep-versions", str(bridge.keep_versions)]
    if bridge.share_base:
        flags += ["--shared-weights", "--bridge-config-path", str(place.folder / FILE_NAME)]
    spec = server_spec(config, options.server, place, flags, tiny=options.model.shape == "tiny")
    before = gpu_used_gb(options)
    with serving(spec, place) as server:
        alone = taken_since(before, options)
        client = WatchedClient(config.vllm)
        model, weights = early or weighed(adapted, place, attached=True)
        with LoraSwap(bridge, model, client, written, config.model.seq_len) as swap, explained_by(server):
            training = Training(model, config, alone)
            subject = LoraOnlySubject(swap, training, client, server, written, weights, url=config.vllm.url)
            swap.prove()
            yield subject


def _train_config(options: SyncOptions, place: Place, written: Path) -> TrainConfig:
    choice = options.choice
    values: dict[str, Any] = {
        **train_values(options, place, "lora_only"),
        "lora_transport": choice.transport,
        "lora_r": choice.lora_r,
        "lora_alpha": 2.0 * choice.lora_r,
        "lora_keep_versions": choice.keep_versions,
        "lora_root": written,
        "share_base": choice.share_base,
    }
    return checked(build(TrainConfig, values))


class WatchedClient(ServerClient):
    """Stores the server's answer to the last publish, which has transport and times."""

    last: LoraLoadResponse | None = None

    def load_adapter(self, request: LoraLoadRequest, body: memoryview | None = None) -> LoraLoadResponse:
        self.last = super().load_adapter(request, body)
        return self.last


class LoraOnlySubject(OwnServer):
    """A trainer that does nothing but publish. Versions start at 1, so that 0 is the base model."""

    serves_on = True

    def __init__(
        self,
        swap: LoraSwap,
        training: Training,
        client: WatchedClient,
        server: OwnedServer,
        written: Path,
        weights: WeightFigures,
        url: str,
    ) -> None:
        self._swap = swap
        self._weights = weights
        assert isinstance(training.model, PeftModel)
        self._model = training.model
        super().__init__(server, training)
        self.url = url
        self._named = {name: p for name, p in self._model.named_parameters() if "lora_" in name}
        self._factors = [p.detach() for name, p in self._named.items() if "lora_B" in name]
        for factor in self._factors:
            factor.normal_(std=SMALL_B)  # a fresh adapter's B is 0: it would have no effect
        self.client = client
        self.written = written
        self.base_routing: dict[str, Any] = {"policy_version": 0}
        self._version = swap.connect(1) - 1
        self.info = client.wait_until_ready()
        self._nbytes = sum(p.numel() for p in self._named.values()) * self.served_dtype.itemsize

    @property
    def served_dtype(self) -> torch.dtype:
        """The dtype in which the server holds adapters."""
        dtype = getattr(torch, (self.info.lora_dtype or self.info.dtype).removeprefix("torch."))
        assert isinstance(dtype, torch.dtype)
        return dtype

    def facts(self) -> Facts:
        assert self.client_answer is not None, "publish comes first"
        return Facts(
            self.client_answer.transport, round(self._nbytes / 1e6, 3), rounded(self._swap.proved), self._weights
        )

    @property
    def client_answer(self) -> LoraLoadResponse | None:
        return self.client.last

    def warm_up(self) -> None:
        """Load one adapter into each free slot, since the first load into a slot is slower. Then publish as many
        versions as the server keeps, so that each later publish evicts one."""
        free = self.info.max_loras - len(self.client.lora_status().versions)
        names = [f"{self.info.lora_name}-warm-{number}" for number in range(free)]
        for name in names:
            self._swap.send(name, self._version, activate=False)
        for name in names:
            self.client.unload_adapter(name)
        for _ in range(self.info.keep_versions + 1):
            self.publish()

    def publish(self) -> Publish:
        self._version += 1
        step = SMALL_B / 10 * (1 if self._version % 2 else -1)
        torch._foreach_add_(self._factors, step)  # pyright: ignore[reportPrivateImportUsage]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the optimizer's step is not what is measured
        started = time.perf_counter()
        published = self._swap.publish(self._version)
        seconds = time.perf_counter() - started
        answer = self.client_answer
        assert answer is not None
        check_answers(self.client, published.version, published.name)
        pack = reduce(published.metrics)["publish/save_time"]
        return Publish(seconds, pack, answer.load_seconds, answer.stall_seconds)

    def baseline(self, repeat: int) -> Baseline:
        """Save by PEFT, load by vLLM's own route, each time under a new name.

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
        return Baseline(median_ms(loads[1:]), median_ms(saves[1:]), repeat)

    def _save_by_peft(self, folder: Path) -> None:
        """Write the adapter in the server's dtype: the smallest file from which the server loses no precision."""
        state = {name: p.detach().to(self.served_dtype) for name, p in self._named.items()}
        self._model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)


def _post(http: httpx.Client, route: str, body: dict[str, Any]) -> httpx.Response:
    answer = http.post(route, json=body)
    if answer.status_code != 200:
        raise ServerError(
            answer.text[:500], field=f"baseline: POST {route}", got=f"status {answer.status_code}", wanted="200"
        )
    return answer
