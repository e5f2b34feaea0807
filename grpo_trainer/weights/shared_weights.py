"""Shared weights: the trainer's parameters are the server's, and the optimizer writes them where the server reads them.

Nothing is sent. A write happens within a fence: the server finishes its current forward pass and pauses. It drops what
it computed from the old weights and resumes as the next version. If a write fails midway, the weights are torn. The
trainer reports that to the server; if the trainer has died, the server detects it by a timeout. Then the server refuses
to generate until another write is complete.

With several trainer processes, each maps the memory of one server (a pair), or of one worker of the only server
(tensor parallel). All call the bridge together. Rank 0 opens and closes the fences of all servers, and all ranks write
between two barriers, so all servers get the same version, and none resumes before every rank has written:

    rank 0   open all ─┐           ┌─▶ write ─┐               ┌─▶ close all
                       ├─ all wait ┤          ├─ all have written ┤
    rank 1            ─┘           └─▶ write ─┘               └─▶

If a rank ends within the fences, rank 0 reports torn weights to all servers. If rank 0 ends, they detect it by their
timeouts. `--resume auto` writes a checkpoint's weights to all servers, which heals them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from grpo_common.errors import Problem
from grpo_trainer.alignment.proof import Proof, Proved, WeightChange
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.engine.tensor_shards import shard_of
from grpo_trainer.errors import BridgeError, ServerError, warn_once
from grpo_trainer.metrics.types import Metric
from grpo_trainer.optim.steps import sampled
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import SharedWeights
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.bridge import Published, WeightBridge, at_server, largest, problems_of, quiet
from grpo_trainer.weights.fence import ServerFence
from vllm_server.protocol import BridgeDebug, BridgeInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITE_SECONDS = 60.0
RESTORE_SECONDS = 600.0
"""Time limits of a fence, after which the weights count as torn. A restored checkpoint first crosses the PCIe bus."""


@dataclass(eq=False, repr=False)
class SharedBridge(WeightBridge):
    """The `shared_vllm` bridge."""

    config: BridgeConfig
    policy: SharedWeights
    """The policy whose model lies in this process's server, or in its worker of the only server."""
    servers: Mapping[str, ServerClient]
    """Clients of all servers by their URLs, by rank; only rank 0 uses them."""
    seq_len: int
    """Longest sequence of the training, which the servers must be able to serve."""
    world: World = field(default_factory=World)
    """The processes that call this bridge together."""
    proved: Proved | None = None
    """Result of the proof; None: no proof ran."""
    _infos: list[BridgeInfo] = field(default_factory=list)
    _version: int = 0
    _held: Sequence[int | None] = ()
    """Version of the weights in each server; None: they are torn."""
    _metrics: dict[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fences = {url: ServerFence(server, self.config.in_flight) for url, server in self.servers.items()}

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def connect(self, policy_version: int) -> int:
        """Connect to the servers, and write a resumed checkpoint into their memory.

        Raises:
            BridgeError: the model was attached to another server; a server's weights are torn or synthetic; or the
                servers hold weights of different versions.
            WeightsError: weights that must be the same on all ranks differ.
        """
        boots = self.world.gather(self.policy.source.boot_id)
        # No two ranks may be in the memory of one server, as when their lists of servers differ.
        if len(self.servers) > 1 and len(set(boots)) < len(boots):
            raise BridgeError(
                "several trainer processes are in the memory of one server",
                field="boot_id",
                got=", ".join(boots),
                wanted="another server for each process",
                fix="give all processes the same --server.port and --server.also",
            )
        states = self.world.lead(lambda: self._each(self._settled))
        self._infos = [state.info for state in states]
        self._held = [state.info.policy_version if state.fault is None else None for state in states]
        self._check(boots)
        version = self.world.lead(lambda: self._first_version(policy_version, states))
        if self.policy.loaded is not None:
            with self._fence(version, RESTORE_SECONDS):
                self.policy.write_loaded()
            log.info("wrote the checkpoint's weights into the server's memory, as version %d", version)
        self._version = version
        self._check_agreement("in its server's memory")
        return version

    @staticmethod
    def _settled(url: str, server: ServerClient) -> BridgeDebug:
        server.wait_until_there()
        state = server.wait_until_settled()
        info = state.info
        log.info(
            "bridge shared_vllm: server %s, vLLM %s on %s, %s, boot %s",
            *(info.served_model_name, info.vllm_version, info.device, info.dtype, info.boot_id),
        )
        return state

    def _check(self, boots: list[str]) -> None:
        """Raise a `BridgeError` for settings of a server that training would fail on or learn wrongly from."""
        of_ranks = self._infos if len(self.servers) > 1 else self._infos * len(boots)
        for boot, info in zip(boots, of_ranks, strict=True):
            if info.boot_id != boot:
                raise BridgeError(
                    "the inference server was restarted after its weights were attached",
                    field="boot_id",
                    got=info.boot_id,
                    wanted=boot,
                    fix="start the trainer again",
                )
        found = [problems_of(info, self.seq_len, model=self.policy.model) for info in self._infos]
        if problems := self._named(dict(zip(self.servers, found, strict=True))):
            raise BridgeError.of(problems)

    def _first_version(self, policy_version: int, states: list[BridgeDebug]) -> int:
        """Return the version to begin with: `policy_version` or a higher one.

        Raises:
            BridgeError: no checkpoint is restored, and the servers do not hold weights of one policy.
        """
        infos = [state.info for state in states]
        if self.policy.loaded is not None:
            return max(
                policy_version if policy_version > info.policy_version else info.policy_version + 1 for info in infos
            )
        faults: dict[str, list[Problem]] = {}
        for url, state in zip(self.servers, states, strict=True):
            fault = state.fault
            if fault is None and state.info.policy_version < 0:
                fault = "an earlier trainer ended while it was proving the bridge, and left a synthetic change"
            if fault is not None:
                fix = "write a checkpoint's weights into it with --resume auto, or restart the server"
                faults[url] = [Problem("the inference server", fault, "", fix, "holds no policy's weights")]
        if problems := self._named(faults):
            raise BridgeError.of(problems)
        wanted = [max(policy_version, info.policy_version) for info in infos]
        if len(set(wanted)) > 1:
            served = [f"{version} at {url}" for url, version in zip(self.servers, wanted, strict=True)]
            raise BridgeError(
                "the servers hold weights of different versions",
                field="version",
                got=", ".join(served),
                wanted="one version",
                fix="write a checkpoint's weights into them with --resume auto, or restart the servers",
            )
        if any(info.update_count for info in infos):
            log.warning(
                "an earlier trainer has written the server's weights: training continues from its version %d, not from "
                "the model's files",
                infos[0].policy_version,
            )
        return wanted[0]

    def _named(self, problems: Mapping[str, list[Problem]]) -> list[Problem]:
        """Return the problems of servers by URL; of several servers, with the URL in front."""
        several = len(self.servers) > 1
        return [one for url, found in problems.items() for one in (at_server(url, found) if several else found)]

    def _each(self, do: Callable[[str, ServerClient], T]) -> list[T]:
        """Return what a function of URL and client returns for all servers, which are asked at the same time.

        Raises:
            BridgeError: it failed for servers; the message names them. The only server's error is raised as it is.
        """
        if len(self.servers) == 1:
            return [do(url, server) for url, server in self.servers.items()]
        with ThreadPoolExecutor(len(self.servers), "servers") as threads:
            asked = {url: threads.submit(do, url, server) for url, server in self.servers.items()}
        failed: dict[str, list[Problem]] = {}
        for url, future in asked.items():
            if isinstance(error := future.exception(), BridgeError | ServerError):
                failed[url] = list(error.problems)
        if failed:
            raise BridgeError.of(self._named(failed))
        return [future.result() for future in asked.values()]

    def _check_agreement(self, when: str) -> None:
        """Check the parameters that all ranks have: all of them, or of shards those that every worker has whole."""
        model = self.policy.model
        shard = shard_of(model)
        cut = set() if shard is None else {*shard.cuts}
        common = [parameter for name, parameter in model.named_parameters() if name not in cut]
        self.world.check_agreement(sampled(common), when)

    def prove(self) -> float | None:
        """Prove all servers by one change, which all ranks make; each server is compared with what rank 0 computes.

        Raises:
            BridgeError: a server generates with other weights.
            WeightsError: weights that must be the same on all ranks differ afterwards.
        """
        if not self.config.proof:
            warn_once(log, "bridge proof skipped (--no-proof): nothing shows that the server uses what is written")
            return None
        assert self._infos, "connect comes first"
        model = self.policy.model
        change = WeightChange(model, self._version, self._fence, self.world)
        self.proved = Proof(model, self.servers, world=self.world).prove(self._infos[0], change)
        self._check_agreement("after the proof")
        return self.proved.noise

    def updating(self) -> AbstractContextManager[None]:
        return self._fence(self._version + 1, WRITE_SECONDS)

    def publish(self, version: int) -> Published:
        """Return the version that the last fence has published: the optimizer's write was the whole update.

        Each metric is the largest of any server.
        """
        assert self._infos, "connect comes first"
        if version != self._version:
            raise BridgeError(
                "the shared weights are of another version", field="version", got=version, wanted=str(self._version)
            )
        metrics, self._metrics = self._metrics, {}
        return Published(version, self._infos[0].served_model_name, quiet(version) | metrics)

    @contextmanager
    def _fence(self, version: int, seconds: float = WRITE_SECONDS) -> Iterator[None]:
        """Keep all servers from reading the weights within the block; then they generate with them as `version`.

        All ranks enter it, and each writes its own weights.

        Raises:
            BridgeError, ServerError: a fence could not be opened or closed.
        """
        assert self._infos, "connect comes first"
        boots = dict(zip(self.servers, (info.boot_id for info in self._infos), strict=True))
        # A fence waits for this rank's device, which never finishes an operation with a rank that has ended. NCCL does
        # not report that; this call does.
        self.world.barrier()
        self.finish_kernels()  # so that the server does not pause for kernels queued earlier
        self.world.barrier()
        try:
            self.world.lead(lambda: self._open(boots, seconds))
            yield
            self.finish_kernels()
            self.world.barrier()  # no server resumes before all ranks have written
        except BaseException:
            if self.world.leads:
                for fence in self._fences.values():
                    fence.give_up()
            raise
        self._metrics = self.world.lead(lambda: self._close(version))
        self._version, self._held = version, [version] * len(self._infos)

    def _open(self, boots: Mapping[str, str], seconds: float) -> None:
        """Pause all servers, or none. The other ranks get nothing: an update's token is rank 0's."""
        try:
            self._each(lambda url, _: self._fences[url].begin(boots[url], seconds))
        except BaseException:  # nothing is written
            for fence, version in zip(self._fences.values(), self._held, strict=True):
                fence.give_up(version)
            raise

    def _close(self, version: int) -> dict[str, Metric]:
        """Let all servers resume, and return the largest of each of their figures."""
        self._each(lambda url, _: self._fences[url].end(version))
        return largest(fence.metrics for fence in self._fences.values())

    def finish_kernels(self) -> None:
        """Wait until the trainer's device has done what was asked of it."""
        if (device := self.policy.model.device).type == "cuda":
            torch.cuda.synchronize(device)
