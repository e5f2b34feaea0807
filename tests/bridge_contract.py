"""What the `lora_only` bridge promises, whatever carries the adapter: one set of checks for every channel.

A test module that imports `Contract` gives it a real server and a channel; each method is one promise. Figures are
compared with the trainer's own forward pass, in nats.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_trainer.alignment.probes import Probe, probe_of, trainer_logprobs
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.channels import Channel, Way, open_channel
from grpo_trainer.weights.layout import AdapterLayout
from grpo_trainer.weights.lora_swap import LoraSwap, publish_by
from tests.integration.serving import KEEP_VERSIONS, RANK, Serving
from tests.integration.streaming import paused
from tests.unit.tiny_lora import fill_b
from vllm_server.protocol import GenerateChunk, LoraStatus

PROMPT = [2 + (5 * i) % 90 for i in range(300)]  # longer than two cache blocks: a stale cache would show
SHORT = [21, 14, 21, 32]  # shorter than any: nothing of it comes from the cache
LONG_ANSWER = 480


class Trainer:
    """The trainer's side: model, client, bridge. Versions start at 1: 0 stays the base model for other tests."""

    def __init__(self, server: Serving, device: str = "cpu", **options: Any) -> None:
        port = int(server.url.rpartition(":")[2])
        values: dict[str, object] = {"model": str(server.model_folder), "weight_bridge_mode": "lora_only"}
        values |= {"vllm_port": port, "lora_keep_versions": KEEP_VERSIONS, "seq_len": 256}
        values |= {"lora_root": str(server.adapter_root)} | ({} if "lora_adapter" in options else {"lora_r": RANK})
        if server.key is not None:
            values["vllm_api_key"] = server.key
        self.config = build(TrainConfig, values | options)
        assert self.config.weight_bridge_mode == "lora_only"
        if self.config.load_in_4bit:
            base = load_model(self.config)
        else:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            base = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=dtype)
            base.to(device)  # pyright: ignore[reportArgumentType]
            base.requires_grad_(False)
        self.model: PeftModel = add_adapter(base, self.config, seed=0)
        self.client = ServerClient(self.config.server)
        seq_len = self.config.seq_len
        self.swap = LoraSwap(self.config, self.model, self.client, server.adapter_root, seq_len)

    def ask(self, prompt: list[int] = PROMPT, **routing: Any) -> tuple[Probe, int]:
        """What the server samples, and by which version."""
        answer = self.client.generate(
            prompt, max_tokens=6, temperature=1.0, logprobs=0, ignore_eos=True, seed=7, **routing
        )
        return probe_of(answer), answer.policy_version

    def gap(self, probe: Probe) -> float:
        """Mean |server - trainer's own forward| of the sampled tokens."""
        return float((probe.server_logprobs - trainer_logprobs(self.model, probe)).abs().mean())

    def gap_to_base(self, probe: Probe) -> float:
        with self.model.disable_adapter():
            return self.gap(probe)


@dataclass
class Contract:
    """One bridge, open to a server.

    Attributes:
        first: the version to publish next at the start.
        tolerance: mean gap that rounding explains.
    """

    server: Serving
    trainer: Trainer
    transport: str
    first: int
    tolerance: float

    def publish(self, version: int) -> str:
        """Publish it with different weights; return its name."""
        fill_b(self.trainer.model, seed=version)
        return self.trainer.swap.publish(version).name

    def status(self) -> LoraStatus:
        return self.trainer.client.lora_status()

    def assert_serves(self, version: int, **routing: Any) -> None:
        """The answer is by `version`, whose weights the trainer must hold."""
        probe, answered = self.trainer.ask(**routing)
        assert answered == version
        assert self.trainer.gap(probe) < self.tolerance
        assert self.trainer.gap_to_base(probe) > 5 * self.tolerance, "the adapter makes no difference: nothing is shown"

    # ---------------------------------------------------------------------------------------------- promises

    def publishes(self) -> None:
        """Every new request is answered by the published weights, and says by which version."""
        slots = []
        for version in range(self.first, self.first + 2 * KEEP_VERSIONS + 3):  # each slot, then each again
            fill_b(self.trainer.model, seed=version)
            published = self.trainer.swap.publish(version)
            assert (published.version, published.name) == (version, f"policy-v{version}")
            self.assert_serves(version)
            metrics = reduce(published.metrics)
            assert metrics["publish/version"] == version
            assert metrics["publish/stall_time"] <= metrics["publish/load_time"] <= metrics["train/sync_time"]
            held = next(v for v in self.status().versions if v.version == version)
            assert held.adapter_path.startswith("/" if self.transport == "disk" else f"{self.transport}://")
            slots.append(held.slot)
        assert len(set(slots)) > 1

    def pins(self) -> None:
        """An older version answers requests that name it, by number or by name, as long as it is kept."""
        old = self.publish(self.first)
        before, _ = self.trainer.ask()
        self.publish(self.first + 1)
        newest, answered = self.trainer.ask()
        assert answered == self.first + 1 and self.trainer.gap(newest) < self.tolerance
        fill_b(self.trainer.model, seed=self.first)
        self.assert_serves(self.first, policy_version=self.first)
        self.assert_serves(self.first, model=old)
        pinned, _ = self.trainer.ask(policy_version=self.first)
        assert pinned.tokens == before.tokens
        refused = self.server.post("/generate", {"prompt": "1", "model": old, "policy_version": self.first + 1})
        assert refused.status_code == 422 and refused.json()["error"]["param"] == "policy_version"

    def keeps_requests_on_their_version(self) -> None:
        """A request that has begun ends on its version, bit for bit, while newer ones are published."""
        name = self.publish(self.first)
        alone = self.stream(threading.Event())
        newer = range(self.first + 1, self.first + KEEP_VERSIONS + 2)
        with self.under_way() as lines:
            for version in newer:
                self.publish(version)
            held = next(v for v in self.status().versions if v.version == self.first)
            late = self.server.post("/generate", {"prompt": "1", "model": name})
        assert late.status_code == 404, "no new request gets it"
        assert (held.in_flight, held.draining) == (1, True)
        for got in (alone, lines):
            assert {line.policy_version for line in got} == {self.first}
            assert sum(len(line.token_ids) for line in got) == LONG_ANSWER
        assert [token for line in lines for token in line.token_ids] == [t for line in alone for t in line.token_ids]
        assert _logprobs(lines) == _logprobs(alone)
        fill_b(self.trainer.model, seed=newer[-1])
        self.assert_serves(newer[-1])
        assert self.first not in {v.version for v in self.status().versions}, "it leaves with its last request"

    @contextmanager
    def under_way(self) -> Iterator[list[GenerateChunk]]:
        """A long answer that is under way while the block runs, and whole after it.

        On a busy machine it may be over before the pause. Then another one is begun.
        """
        for _ in range(10):
            begun, lines = threading.Event(), list[GenerateChunk]()
            reader = threading.Thread(target=lambda begun=begun, lines=lines: lines.extend(self.stream(begun)))
            reader.start()
            assert begun.wait(60)
            with paused(self.server):
                reader.join(0.5)  # what was made before the pause may still be on its way here
                requests = sum(v.in_flight for v in self.status().versions if v.version == self.first)
                is_held = requests == 1 and reader.is_alive()
                if is_held:
                    yield lines
            reader.join(120)
            if is_held:
                return
        raise AssertionError("each answer was over before the pause came")

    def stream(self, begun: threading.Event) -> list[GenerateChunk]:
        """A long answer of the newest version; `begun` is set at its first token."""
        body = {"prompt": {"prompt_token_ids": SHORT}, "stream": True, "max_tokens": LONG_ANSWER, "seed": 11}
        body |= {"logprobs": 0, "ignore_eos": True, "temperature": 1.0}
        headers = {"authorization": f"Bearer {self.server.key}"}
        lines = []
        url = f"{self.server.url}/generate"
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False, headers=headers) as answer:
            for line in answer.iter_lines():
                lines.append(msgspec.json.decode(line, type=GenerateChunk))
                begun.set()
        return lines

    def lets_old_versions_go(self) -> None:
        """Outside the window: not in the status, its slot free, unknown to requests, its files gone but for one."""
        before = len(self.status().versions)
        versions = range(self.first, self.first + KEEP_VERSIONS + 3)
        names = [self.publish(version) for version in versions]
        status = self.status()
        assert status.available_adapters == [v.name for v in status.versions] == names[-KEEP_VERSIONS:]
        assert len(status.versions) == KEEP_VERSIONS >= before
        assert len({v.slot for v in status.versions}) == KEEP_VERSIONS
        for routing in ({"model": names[0]}, {"policy_version": versions[0]}):
            gone = self.server.post("/generate", {"prompt": "1", **routing})
            assert gone.status_code == 404 and gone.json()["error"]["param"] in routing
        folders = sorted(path.name for path in self.server.adapter_root.glob("policy-v*") if path.name in names)
        assert folders == (sorted(names[-KEEP_VERSIONS - 1 :]) if self.transport == "disk" else [])

    def refuses(self) -> None:
        """What can't be served is refused with field and fix; the old version stays served."""
        served = self.publish(self.first)
        for name, version, status, field, got in (
            (served, self.first, "409", "adapter_name", served),
            (f"policy-v{self.first + 1}", self.first + 2, "422", "version", str(self.first + 2)),
        ):
            with pytest.raises(ServerError) as refused:
                self.trainer.swap.send(name, version, activate=True)
            assert status in refused.value.summary.split() and refused.value.field == field
            assert got in refused.value.got
            self.assert_serves(self.first)
        newest = self.first + 1  # nobody received the broadcast to a group, which is made again
        self.publish(newest)
        self.assert_serves(newest)
        for layout, names in self.unservable():
            with pytest.raises((ServerError, BridgeError)) as refused:  # some channels fail as they open
                publish_by(self.open_for(layout), self.trainer.client, "unservable", newest + 1)
            said = str(refused.value)
            assert all(name in said for name in ("422", *names)), said
            self.assert_serves(newest)
        assert [v.version for v in self.status().versions if v.active] == [newest]
        assert self.server.get("/health").status_code == 200
        self.trainer.swap.connect(0)  # another trainer's channel has taken the place of ours
        self.publish(newest + 1)
        self.assert_serves(newest + 1)

    def refuses_what_is_not_finite(self) -> None:
        """By the tensor's name; what was served before is served as if nothing had come."""
        self.publish(self.first)
        before, _ = self.trainer.ask()
        for version, bad in enumerate((float("nan"), float("inf")), self.first + 1):
            name = self._spoil(bad)
            with pytest.raises(ServerError) as refused:
                self.trainer.swap.send(f"policy-v{version}", version, activate=True)
            assert "422" in refused.value.summary.split() and refused.value.field == name
            after, answered = self.trainer.ask()
            assert answered == self.first
            assert after.tokens == before.tokens
            assert float((after.server_logprobs - before.server_logprobs).abs().max()) < self.tolerance
        self.publish(self.first + 3)
        self.assert_serves(self.first + 3)

    @torch.no_grad()
    def _spoil(self, value: float) -> str:
        """Put a value at the end of the last B, and return that B's name at the server."""
        found = [(name, each) for name, each in self.trainer.model.named_parameters() if ".lora_B." in name]
        found[-1][1].view(-1)[-1] = value
        return found[-1][0].replace(".default.", ".")

    def unservable(self) -> Iterator[tuple[AdapterLayout, tuple[str, ...]]]:
        """Adapters, and what their refusals name."""
        large = Trainer(self.server, self.trainer.model.device.type, lora_r=4 * RANK)
        yield AdapterLayout(large.model, self.layout().dtype), (str(4 * RANK), "--max-lora-rank")
        for old, new, named in ((b"q_proj", b"x_proj", "x_proj"), (b"data_offsets", b"data_offsetz", "data_offsets")):
            layout = self.layout()
            layout.headers[0] = layout.headers[0].replace(old, new)
            yield layout, (named,)

    def layout(self) -> AdapterLayout:
        """Return the trainer's adapter in a separate buffer."""
        info = self.trainer.client.wait_until_ready()
        return AdapterLayout(self.trainer.model, getattr(torch, info.lora_dtype or info.dtype))

    def open_for(self, layout: AdapterLayout) -> Channel:
        """The same channel for another adapter."""
        client = self.trainer.client
        name: Any = self.transport
        way = Way(layout, client.wait_until_ready(), client.url, self.server.adapter_root, KEEP_VERSIONS)
        return open_channel(name, way, client)

    def proves(self) -> None:
        """The bridge proof passes, nobody else gets an adapter of it, and it leaves nothing behind."""
        self.publish(self.first)
        names = []
        send = self.trainer.swap.send

        def watched(name: str, version: int, *, activate: bool) -> Any:
            answer = send(name, version, activate=activate)
            names.append(name)
            assert self.trainer.ask()[1] == self.first, "others got an adapter of the proof"
            return answer

        self.trainer.swap.send = watched
        try:
            self.trainer.swap.prove()
        finally:
            del self.trainer.swap.send
        assert len(names) == 3 and not set(names) & {v.name for v in self.status().versions}
        self.assert_serves(self.first)

    def restores(self) -> None:
        """The same weights again are the same policy: the server's logprobs come back exactly."""
        self.publish(self.first)
        before, _ = self.trainer.ask()
        self.publish(self.first + 1)
        between, _ = self.trainer.ask()
        fill_b(self.trainer.model, seed=self.first)
        self.trainer.swap.publish(self.first + 2)
        after, answered = self.trainer.ask()
        assert answered == self.first + 2
        assert between.server_logprobs.tolist() != before.server_logprobs.tolist()
        assert after.tokens == before.tokens
        assert after.server_logprobs.tolist() == before.server_logprobs.tolist()


def _logprobs(lines: list[GenerateChunk]) -> list[float]:
    return [next(iter(entry[0].values())) for line in lines for entry in line.logprobs or []]


@contextmanager
def contract(server: Serving, transport: str, device: str = "cpu", tolerance: float = 1e-3) -> Iterator[Contract]:
    """A bridge over one channel, open to a running server.

    from tests.bridge_contract import PROMISES, contract

    with contract(server, "memory") as made:
        made.publishes()
    """
    trainer = Trainer(server, device, lora_transport=transport)
    with trainer.swap:
        first = trainer.swap.connect(1)
        made = Contract(server, trainer, transport, first, tolerance)
        assert trainer.swap.channel is not None and trainer.swap.channel.name == transport
        yield made


PROMISES = [
    "publishes",
    "pins",
    "keeps_requests_on_their_version",
    "lets_old_versions_go",
    "refuses",
    "refuses_what_is_not_finite",
    "proves",
    "restores",
]
"""Names of the promises that every channel is held to."""
