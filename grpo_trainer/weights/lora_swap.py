"""LoRA hot swap: the running server loads each version as an adapter under a new name, which is never reused.

A channel brings the adapter (`weights/channels.py`). The base model is never written. In-flight requests finish on the
version that they began with. The server keeps the newest few versions and unloads older ones.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel

from grpo_common.errors import Problem
from grpo_trainer.alignment.adapter import AdapterChange
from grpo_trainer.alignment.proof import Proof, Proved
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import Sum
from grpo_trainer.model.quantised import other_files
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.bridge import Published, WeightBridge, problems_of, quiet
from grpo_trainer.weights.channels import Channel, Way, open_channel
from grpo_trainer.weights.layout import AdapterLayout
from vllm_server.protocol import BridgeInfo, LoraLoadRequest, LoraLoadResponse, version_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """A publish that the server has answered."""

    answer: LoraLoadResponse
    pack_seconds: float
    """Time to make the adapter ready to send: in GPU memory, in a file, …"""


def publish_by(channel: Channel, server: ServerClient, name: str, version: int, *, activate: bool = True) -> Sent:
    """Publish the adapter's present values under a name, as `version`.

    If `activate`, requests that name no version get this one from now on.

    Raises:
        ServerError: the server does not answer, or refuses the adapter.
        BridgeError: the channel has failed.
    """
    is_repeated = False
    while True:
        started = time.perf_counter()
        try:
            there = channel.send(version, {}, name)
            packed = time.perf_counter() - started
            path, body = (there, None) if isinstance(there, str) else (None, there)
            request = LoraLoadRequest(
                adapter_path=path, channel=channel.id, adapter_name=name, version=version, activate=activate
            )
            answer = server.load_adapter(request, body)
        except (FileNotFoundError, ServerError):
            if not channel.failed() or is_repeated:
                raise
            is_repeated = True
        except BaseException:
            channel.failed()
            raise
        else:
            channel.settle()
            return Sent(answer, packed)


@dataclass(eq=False, repr=False)
class LoraSwap(WeightBridge):
    """The `lora_only` bridge."""

    config: BridgeConfig
    model: PeftModel
    server: ServerClient
    root: Path
    """Folder in which the channel `disk` writes: the server's --lora-root or one below it."""
    seq_len: int
    """Longest sequence of the training, which the server must be able to serve."""
    proved: Proved | None = field(default=None, init=False)
    """Result of the proof; None: no proof ran."""
    channel: Channel | None = field(default=None, init=False)
    _way: Way | None = field(default=None, init=False)
    _published: int | None = field(default=None, init=False)

    def close(self) -> None:
        try:
            if self.channel is not None and self.channel.id is not None:
                self.server.close_channel(self.channel.id)
        except ServerError as close_error:  # the server is gone, and so are our adapters
            log.debug("closing the channel: %s", close_error)
        finally:
            if self.channel is not None:
                self.channel.close()
            self.server.close()

    def connect(self, policy_version: int) -> int:
        info = self.server.wait_until_there()  # not until healthy: publishing makes it so
        self._check(info)
        status = self.server.lora_status()
        if status.load_count:  # the server outlived an earlier trainer, whose adapter names must not be used again
            seen = max([status.policy_version, *(version.version for version in status.versions)])
            policy_version = max(policy_version, seen + 1)
            log.info("the server has served version %d before; going on with %d", seen, policy_version)
        for left in status.versions:  # by a trainer that was killed: nothing else would free its place
            if left.name.startswith(f"{info.lora_name}-proof-"):
                self.server.unload_adapter(left.name)
        log.info(
            "bridge lora_only: server %s, vLLM %s on %s, %s, boot %s",
            info.served_model_name, info.vllm_version, info.device, info.dtype, info.boot_id,
        )  # fmt: skip
        layout = AdapterLayout(self.model, getattr(torch, info.lora_dtype or info.dtype))
        keep = info.keep_versions + 1  # files outlive their version by one
        way = self._way = Way(layout, info, self.server.url, self.root, keep)
        self.channel = open_channel(self.config.lora_transport, way, self.server)
        return policy_version

    def _check(self, info: BridgeInfo) -> None:
        """Raise a `BridgeError` for settings of the server that training would fail on or learn wrongly from."""
        problems = problems_of(info, self.seq_len, model=self.model)
        rank, wanted = "--max-lora-rank", f"{self.config.lora_r} or more"
        fix = f"start it with --max-lora-rank {self.config.lora_r}"
        if info.max_lora_rank is None:
            summary = "the inference server was started without LoRA"
            problems.append(Problem(rank, wanted=wanted, fix=fix, summary=summary))
        elif info.max_lora_rank < self.config.lora_r:
            summary = "the inference server takes smaller adapters than --lora-r"
            problems.append(Problem(rank, str(info.max_lora_rank), wanted, fix, summary))
        if differ := other_files(self.model, info.quantization):
            summary = "the inference server has another base model"
            fix = "use one --model on both sides; the trainer reads files of GPTQ and AWQ as plain weights"
            problems.append(Problem("--model-name", *differ, fix, summary))
        if info.lora_name != self.config.lora_name:
            summary = "the inference server has another name for its adapters"
            fix = "name them alike on both sides"
            problems.append(Problem("--lora-name", self.config.lora_name, info.lora_name, fix, summary))
        if problems:
            raise BridgeError.of(problems)

    def prove(self) -> float | None:
        if not self.config.proof:
            log.warning("bridge proof skipped (--no-proof): nothing shows that the server uses what is published")
            return None
        assert self._way is not None, "connect comes first"
        info = self._way.info
        load = partial(self.send, version=info.policy_version, activate=False)
        change = AdapterChange(self.model, self.server, load, info)
        self.proved = Proof(self.model, self.server).prove(info, change)
        return self.proved.noise

    def publish(self, version: int) -> Published:
        name = version_name(self.config.lora_name, version)
        if version == self._published:
            return Published(version, name, quiet(version))
        started = time.perf_counter()
        sent = self.send(name, version, activate=True)
        metrics = {
            "train/sync_time": Sum(time.perf_counter() - started),
            "publish/save_time": Sum(sent.pack_seconds),
            "publish/load_time": Sum(sent.answer.load_seconds),
            "publish/stall_time": Sum(sent.answer.stall_seconds),
            "publish/version": Sum(version),
        }
        self._published = version
        return Published(version, name, metrics)

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        """Send the present adapter, and check the name and version that the server confirms.

        A channel that was lost at a refusal is opened again first.
        """
        assert self.channel is not None, "connect comes first"
        if self.channel.is_lost:
            assert self._way is not None
            self.channel = open_channel(self.channel.name, self._way, self.server)
        sent = publish_by(self.channel, self.server, name, version, activate=activate)
        answer = sent.answer
        if (answer.adapter_name, answer.policy_version) != (name, version):
            raise BridgeError(
                "the server does not serve what was published",
                field="version",
                got=f"{answer.policy_version} ({answer.adapter_name})",
                wanted=f"{version} ({name})",
                fix="end any other trainer that publishes to this server",
            )
        return sent
