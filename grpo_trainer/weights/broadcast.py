"""All weights sent into running servers, on any GPU or machine, without a restart: the `broadcast` bridge.

    staged      send ─▶ begin ─▶ apply ─▶ end      the server receives while it generates, and pauses to copy
    not staged          begin ─▶ send, apply ─▶ end

The trainer has its own model, in one process or sharded over several. What the server receives under a checkpoint's
names, vLLM's own code maps to its parameters, each worker taking its shard.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_trainer.alignment.proof import Proof, Proved, WeightChange
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError, ServerError, warn_once
from grpo_trainer.locked_memory import LockedMemory, bytes_for
from grpo_trainer.metrics.types import Sum
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import AllWeights
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.bridge import Published, WeightBridge, problems_of, quiet
from grpo_trainer.weights.channels import Channel, Gathered, Name, TrainerPlace, Way, open_channel, together
from grpo_trainer.weights.fence import ServerFence
from grpo_trainer.weights.layout import ModelLayout
from vllm_server.protocol import BridgeInfo, WeightsApplyRequest, WeightsStageRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
Gather = Callable[[Callable[[Tensor], Tensor]], Mapping[str, Tensor]]

SECONDS = 600.0
"""Time limit for sending a version, and of the fence when it is sent within."""
APPLY_SECONDS = 60.0
"""Time limit of the fence for a version that is staged, or in memory that the server maps."""
MAPPED = frozenset[Name]({"cuda_ipc", "main_memory"})
"""Channels by which the server maps the trainer's memory."""


class PresentWeights:
    """The trainer's weights by the model's names; if they are sharded over processes, gathered once for all servers.

    `own` returns them where they are. Of sharded weights it is called once, here: this process must not end their
    gathering between passes of the model that the others make as well (`state_dict` does). `gather` gathers them on
    rank 0, one at a time, and returns what its argument returned of each; None: they are not sharded.
    """

    def __init__(
        self, own: Callable[[], Mapping[str, Tensor]], gather: Gather | None = None, world: World | None = None
    ) -> None:
        self.world = world or World()
        self._own = own
        self._shards = {} if gather is None else own()
        self._gather = gather
        self._lock = threading.Lock()
        self._places: dict[torch.dtype, Gathered] = {}
        self._gathered: dict[torch.dtype, int] = {}
        self.gather_seconds = 0.0
        """How long `gather` took for the present weights: a part of their publish, to whichever server."""

    def own(self) -> Mapping[str, Tensor]:
        """Return this process's weights, whole or in shards."""
        return self._shards or self._own()

    def of(self, version: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the present weights, which are those of `version`.

        Sharded weights are gathered in main memory in the server's dtype, and overwrite the version before. Servers may
        map this memory: no server may be reading that version any more.
        """
        if self._gather is None:
            return self.own()
        with self._lock:
            places = self._place(dtype).tensors
            if self._gathered.pop(dtype, None) != version:
                free = iter(places.values())
                # Cast where the tensor is: `copy_` would bring the GPU's dtype here, and cast on the CPU. The next
                # tensor is gathered while this one comes here.
                found = self._gather(lambda tensor: next(free).copy_(tensor.to(dtype), non_blocking=True))
                assert list(found) == list(places), "weights are gathered in their own order"
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            self._gathered[dtype] = version
            return places

    def gather(self, version: int) -> None:
        """Gather sharded weights for `of`, in all dtypes that servers have; all processes call this before a send."""
        if self._gather is None:
            return
        started = time.perf_counter()
        wanted = self.world.lead(lambda: [dtype for dtype in self._places if self._gathered.get(dtype) != version])
        for dtype in wanted:
            if self.world.leads:
                self.of(version, dtype)
            else:
                self._gather(Tensor.cpu)
        if wanted:
            self.gather_seconds = time.perf_counter() - started

    def gathered(self, dtype: torch.dtype) -> Gathered | None:
        """Return where weights are gathered; None: they are not sharded."""
        if self._gather is None:
            return None
        with self._lock:
            return self._place(dtype)

    def _place(self, dtype: torch.dtype) -> Gathered:
        if dtype not in self._places:
            own = self.own()
            memory = LockedMemory(bytes_for([tensor.numel() for tensor in own.values()], dtype), shared=True)
            tensors = {name: memory.take(tensor.shape, dtype) for name, tensor in own.items()}
            self._places[dtype] = Gathered(memory, tensors)
        return self._places[dtype]

    def forget(self) -> None:
        """Gather again for the next server: the weights change, or the version that they were sent as was given up."""
        with self._lock:
            self._gathered, self.gather_seconds = {}, 0.0


@dataclass(eq=False, repr=False)
class BroadcastBridge(WeightBridge):
    """The `broadcast` bridge to one server."""

    config: BridgeConfig
    policy: AllWeights
    weights: PresentWeights
    """The trainer's weights."""
    server: ServerClient
    folder: Path
    """For the files of the channel `disk`."""
    seq_len: int
    """Longest sequence of the training."""
    dtype: str
    """Of the trainer's forward pass."""
    gpus: Collection[str] = ()
    """UUIDs of the GPUs of several trainer processes."""
    world: World = field(default_factory=World)
    """The processes over which the weights are sharded; all call this bridge together."""
    channel: Channel | None = field(default=None, init=False)
    layout: ModelLayout | None = field(default=None, init=False)
    """How the weights travel in the channel."""
    proved: Proved | None = field(default=None, init=False)
    """Result of the proof; None: no proof ran."""
    _info: BridgeInfo | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._fence = ServerFence(self.server, self.config.in_flight)

    def close(self) -> None:
        try:
            if self.channel is not None and self.channel.id is not None:
                with suppress(ServerError):  # it may have ended
                    self.server.close_channel(self.channel.id)
        finally:
            self.weights.forget()
            if self.channel is not None:
                self.channel.close()
            self.server.close()

    def connect(self, policy_version: int) -> int:
        """Connect to the server, open the channel, and send the present weights.

        Raises:
            BridgeError: the server does not receive weights, or the channel could not be opened.
        """
        info = self._info = self.world.lead(self._opened)
        used = info.update_count > 0 or info.policy_version < 0
        version = max(policy_version, info.policy_version + 1 if used else info.policy_version)
        self._send(version)
        return version

    def _opened(self) -> BridgeInfo:
        """Wait for the server, check it and open the channel; return the server's description."""
        self.server.wait_until_there()
        state = self.server.wait_until_settled()
        info = state.info
        if not info.receives_weights:
            raise BridgeError(
                "does not receive weights",
                field=f"the inference server at {self.server.url}",
                got="a server without --receive-weights",
                fix="start it with --receive-weights",
            )
        model = None if isinstance(self.policy.model, FSDPModule) else self.policy.model
        if problems := problems_of(info, self.seq_len, model=model):
            raise BridgeError.of(problems)
        if state.fault is not None:
            log.warning("the server refuses to generate (%s): this trainer's weights heal it", state.fault)
        log.info(
            "bridge broadcast: server %s, vLLM %s on %s, %s, %d workers, boot %s",
            *(info.served_model_name, info.vllm_version, info.device, info.dtype, len(info.workers), info.boot_id),
        )
        self._open(info)
        return info

    def _open(self, info: BridgeInfo) -> None:
        stored = self.weights.own()
        layout = self.layout = ModelLayout(self.policy.model, stored, getattr(torch, info.dtype))
        gathered = self.weights.gathered(layout.dtype)
        way = Way(layout, info, self.server.url, self.folder, stored=stored, gathered=gathered)
        staging, own = self.config.broadcast_staging, {TrainerPlace.of(way.first).gpu, *self.gpus} - {""}
        if staging == "auto" and any(worker.gpu_uuid in own for worker in info.workers):
            staging = "off"  # a trainer process has planned to use the memory that is free on its GPU
        self.channel = open_channel(self.config.broadcast_transport, way, self.server, staging)

    def prove(self) -> float | None:
        if not self.config.proof:
            warn_once(log, "bridge proof skipped (--no-proof): nothing shows that the server uses what is sent")
            return None
        assert self._info is not None, "connect comes first"
        model = self.policy.model
        change = WeightChange(model, self._version, self._changing, self.world)
        self.proved = Proof(model, self.server, self.dtype, self.world).prove(self._info, change)
        return self.proved.noise

    @contextmanager
    def _changing(self, version: int) -> Iterator[None]:
        """Let the proof change the weights within the block, then send them."""
        yield
        self._send(version)

    def updating(self) -> AbstractContextManager[None]:
        """Only note that the weights change: they are the trainer's own until they are published."""
        self.weights.forget()
        return nullcontext()

    def publish(self, version: int) -> Published:
        assert self._info is not None, "connect comes first"
        if version != self._version:
            self._send(version)
        metrics, self._fence.metrics = self._fence.metrics, {}
        return Published(version, self._info.served_model_name, quiet(version) | metrics)

    def _send(self, version: int) -> None:
        """Make the server generate with the trainer's present weights as `version`."""
        self.weights.gather(version)  # before the server waits: all processes take part
        self.world.lead(lambda: self._deliver(version))
        self._version = version

    def _deliver(self, version: int) -> None:
        started = time.perf_counter() - self.weights.gather_seconds
        channel, layout, info = self.channel, self.layout, self._info
        assert channel is not None and channel.id is not None and layout is not None and info is not None
        sent = 0.0
        stored = self.weights.of(version, layout.dtype)

        def delivered(ask: Callable[[], T]) -> T:
            """Ask the server to take the version, and send it meanwhile if it is not there already."""
            return ask() if channel.is_ahead else together(lambda _: channel.send(version, stored), ask)

        if channel.is_ahead:
            channel.send(version, stored)
        if channel.staging_bytes:
            stage = WeightsStageRequest(channel=channel.id, version=version, timeout_s=SECONDS)
            delivered(lambda: self.server.stage_weights(stage))
            sent = time.perf_counter() - started
        seconds = APPLY_SECONDS if channel.staging_bytes or channel.name in MAPPED else SECONDS
        with self._fence.hold(info.boot_id, version, seconds) as token:
            apply = WeightsApplyRequest(channel=channel.id, version=version, token=token)
            if channel.staging_bytes:
                self.server.apply_weights(apply)
            else:
                delivered(lambda: self.server.apply_weights(apply))
        self._fence.metrics |= {"train/sync_time": Sum(time.perf_counter() - started), "publish/send_time": Sum(sent)}
