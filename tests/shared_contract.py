"""What shared weights promise, whatever shares them: one set of checks for every number of processes and servers.

    one process    a server
    pairs          a server for each process
    shards         a worker of one server for each process

Each method of `SharedContract` is one promise. The test's process is rank 0; the others are processes of
`tests.integration.paired`. As all ranks of a trainer run the same program, each call of an `Attached` by the test is
made by the others too (`everywhere`). Figures are compared with the trainer's own forward pass, in nats.

    from tests.shared_contract import SharedContract

    SharedContract([server], folder).follows_each_step_hands_over_and_heals()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from grpo_trainer.alignment.probes import Probe, probe_of, trainer_logprobs
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, GrpoError, PeerGoneError, WeightsError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel.world import World, join
from grpo_trainer.policy import SharedWeights, build_policy
from grpo_trainer.rollouts.groups import RolloutBatch
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights.bridge import WeightBridge
from grpo_trainer.weights.build import build_bridge
from tests.bridge_contract import PROMPT
from tests.integration.serving import Serving
from tests.integration.streaming import MANY, TWO_BLOCKS, held
from tests.processes import free_port, running, tail, wait_for
from tests.unit.factories import batch, sample
from vllm_server.protocol import InFlight, UpdateBeginRequest

BATCH = batch(
    [sample([4, 5], [6, 7, 9], 1.0), sample([4, 5], [8], 0.0)],
    [sample([10, 11], [12], 0.0), sample([10, 11], [13, 14], 1.0)],
)
POISONED = batch([sample([4], [5], 1.0, logprobs=[float("nan")]), sample([4], [6], 0.0)])
TOLERANCE = 1e-4
DIED = 9
"""Exit status of a rank that a fault ends."""


def settings(model: Path, folder: Path, ports: Sequence[str], **options: Any) -> TrainConfig:
    """The configuration of a trainer process on the servers at these ports."""
    values: dict[str, Any] = {"model": str(model), "weight_bridge_mode": "shared_vllm", "seq_len": 128}
    values |= {"lr": 1e-3, "adam_epsilon": 1e-3, "save_path": str(folder / "checkpoints"), "vllm_port": ports[0]}
    if len(ports) > 1:
        values["vllm_also"] = ",".join(f"127.0.0.1:{port}" for port in ports[1:])
    return build(TrainConfig, values | options)


class Everywhere:
    """A part of an `Attached`, whose methods all ranks call when rank 0 does."""

    def __init__(self, made: Attached, part: str) -> None:
        self._made = made
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return partial(self._made.everywhere, self._part, name)


class Attached:
    """A process of a trainer on the servers' weights, resumed as the options say.

    Args:
        tolerance: by how many nats a token the logprobs of trainer and server may differ.
    """

    def __init__(self, config: TrainConfig, world: World, tolerance: float = TOLERANCE) -> None:
        self.config, self.world, self.tolerance = config, world, tolerance
        policy = build_policy(config, world=world)
        assert isinstance(policy, SharedWeights)
        self.policy = policy
        self.trainer = Trainer(policy.model, config, world=world)
        optimizer, norms, shards = self.trainer.optimizer, self.trainer.norms, self.trainer.shards
        self._checkpoints = Checkpoints(config, policy, optimizer, norms, shards, world=world)
        self.progress = self._checkpoints.resume()
        self._bridge = build_bridge(config, policy, self._checkpoints, self.progress, StopSignal(), world)
        self._steps = Steps(self.trainer, self._bridge, policy)
        self.bridge: Any = Everywhere(self, "_bridge")
        self.checkpoints: Any = Everywhere(self, "_checkpoints")
        self.steps: Any = Everywhere(self, "_steps")
        self.clients = [ServerClient(vllm) for vllm in config.server.each]

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self._bridge.close()
        if self.world.leads and error == (None, None, None):
            with suppress(PeerGoneError):
                self.world.lead(lambda: None)

    def everywhere(self, part: str, name: str, *arguments: Any) -> Any:
        """Call a method on all ranks; return what it returns here."""
        self.world.lead(lambda: (part, name, arguments))
        return self._call(part, name, arguments)

    def follow(self) -> None:
        """Make the calls of rank 0 until it leaves."""
        ask: Callable[[], Any] = lambda: None  # noqa: E731  # rank 0 answers
        while (call := self.world.lead(ask)) is not None:
            try:
                self._call(*call)
            except (GrpoError, ZeroDivisionError) as error:
                if isinstance(error, GrpoError) and not self.world.is_common(error):
                    raise

    def _call(self, part: str, name: str, arguments: tuple[Any, ...]) -> Any:
        with self.world.alike():
            return getattr(getattr(self, part), name)(*arguments)

    def step(self, batch: RolloutBatch = BATCH) -> bool:
        """Train a step; return whether it changed the weights."""
        return self.steps.step(batch)

    def go_back(self, path: Path, version: int) -> int:
        """Load a checkpoint of this trainer's, and return the version as which the servers have its weights."""
        self.checkpoints.load(path)
        return self.bridge.connect(version)

    def ask(self, client: ServerClient) -> tuple[Probe, int]:
        """What a server samples, and by which version."""
        answer = client.generate(PROMPT, max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True, seed=7)
        return probe_of(answer), answer.policy_version

    def assert_serves(self, version: int) -> list[Probe]:
        """Every server's logprobs are those of the weights that the trainer has now; return what each sampled."""
        probes = []
        for client in self.clients:
            probe, answered = self.ask(client)
            own = self.steps.logprobs(probe)
            assert answered == version
            assert float((probe.server_logprobs - own).abs().mean()) < self.tolerance
            probes.append(probe)
        return probes

    def weights(self) -> dict[str, Tensor]:
        """A copy of the whole weights."""
        return {name: tensor.clone() for name, tensor in self.checkpoints.weights_now().items()}


@dataclass
class Steps:
    """What a process does with its model."""

    trainer: Trainer
    bridge: WeightBridge
    policy: SharedWeights

    def step(self, batch: RolloutBatch) -> bool:
        return self.trainer.step(batch, 0, self.bridge.updating).updated

    def row(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        return reduce(self.trainer.step(batch, step, self.bridge.updating).metrics)

    def fail(self) -> None:
        """Take a step whose write fails midway."""
        self.trainer.step(BATCH, 0, self._failing)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        with self.bridge.updating():
            next(self.policy.model.parameters()).data.zero_()
            raise ZeroDivisionError
            yield

    def logprobs(self, probe: Probe) -> Tensor:
        return trainer_logprobs(self.policy.model, probe)


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@dataclass
class SharedContract:
    """Servers, and the processes of a trainer that shares their weights.

    Attributes:
        folder: of checkpoints and logs.
        workers: of a server, each of which has a shard of the weights.
        tolerance: see `Attached`.
        repeats: by how many nats the logprobs of one server with the same weights may differ.
        version, probes: of the checkpoint that a test has saved.
    """

    servers: Sequence[Serving]
    folder: Path
    workers: int = 1
    tolerance: float = TOLERANCE
    repeats: float = 0.0
    version: int = -1
    probes: Sequence[Probe] = ()

    @property
    def processes(self) -> int:
        return len(self.servers) * self.workers

    @contextmanager
    def attached(self, fault: str = "", **options: Any) -> Iterator[Attached]:
        """A trainer of `processes` processes, until the block is left.

        Args:
            fault: planted into rank 1, see `tests.integration.paired`.
        """
        model, ports = self.servers[0].model_folder, [server.url.rpartition(":")[2] for server in self.servers]
        options |= {"tensor_parallel_size": self.workers}
        address = {"world_size": self.processes, "init_method": f"tcp://127.0.0.1:{(meeting := free_port())}"}
        config = settings(model, self.folder, ports, **options, **(address if self.processes > 1 else {}))
        words = [str(self.folder), str(model), str(meeting), ",".join(ports), f"fault={fault}"]
        words += [f"{name}={value}" for name, value in options.items()]
        log = self.folder / "other_ranks.log"
        with ExitStack() as stack:
            others = [
                stack.enter_context(running("-m", "tests.integration.paired", str(rank), *words, log=log))
                for rank in range(1, self.processes)
            ]
            world = join(config, on_gpu=torch.cuda.is_available())
            try:
                with world, Attached(config, world, self.tolerance) as made:
                    yield made
            finally:
                leave(world)
            ended = [DIED if fault.startswith("dies") else 0] * len(others)
            assert [process.wait(60) for process in others] == ended, tail(log)

    def assert_same(self, answers: Sequence[Probe], before: Sequence[Probe]) -> None:
        """Each server's answer is the one of before."""
        for one, other in zip(answers, before, strict=True):
            assert one.tokens == other.tokens
            assert float((one.server_logprobs - other.server_logprobs).abs().max()) <= self.repeats

    def health(self) -> list[int]:
        return [server.get("/health").status_code for server in self.servers]

    # ---------------------------------------------------------------------------------------------- promises

    def follows_each_step_hands_over_and_heals(self) -> None:
        """The proof passes and leaves nothing behind; each step is served at once; old bits are the old policy.

        A gradient that is not finite touches neither weights nor version, and another trainer continues from the
        weights that are there. A trainer whose write fails reports it: no server generates until a checkpoint heals it.
        """
        with self.attached() as made:
            first = made.bridge.connect(0)
            before, weights = made.assert_serves(first), made.weights()
            if self.processes == 1:  # what several do after their proof is compared with one process, in tests of pairs
                noise = made.bridge.prove()
                assert noise is not None and noise < self.tolerance
            assert made.bridge.publish(first).version == first
            assert same_weights(weights, made.weights())
            self.assert_same(made.assert_serves(first), before)
            kept = made.checkpoints.save(Progress(1, first))
            for version in (first + 1, first + 2):
                assert made.step()
                assert made.bridge.publish(version).version == version
                for now, then in zip(made.assert_serves(version), before, strict=True):
                    assert now.server_logprobs.tolist() != then.server_logprobs.tolist()
            assert made.go_back(kept, first) == first + 3
            assert not made.step(POISONED)
            assert same_weights(weights, made.weights())
            self.assert_same(made.assert_serves(first + 3), before)
            assert made.step() and made.bridge.publish(first + 4).version == first + 4
            weights = made.weights()
        with self.attached() as made, pytest.raises(ZeroDivisionError):
            assert made.bridge.connect(0) == first + 4
            assert same_weights(weights, made.weights())
            assert made.step()
            self._save(made, first + 5)
            made.steps.fail()
        self._refuses()
        self._heals()

    def heals_after_a_trainer_that_died_writing(self) -> None:
        """The servers detect by their time limit that a trainer has died within the fence."""
        with self.attached() as made:
            self._save(made, made.bridge.connect(0))
            for client in made.clients:
                boot = client.wait_until_there().boot_id
                client.begin_update(UpdateBeginRequest(boot_id=boot, timeout_s=3.0))  # and nothing more is heard of it
        self._refuses()
        self._refuses_trainers()
        self._heals()

    # ---------------------------------------------------------------------------------------------- with several

    def survives_ranks_that_die(self, *moments: str) -> None:
        """Before or after the fence, a rank that dies leaves whole weights; within it, torn ones, which are healed."""
        version = None
        for moment in (*moments, "within"):
            with self.attached(fault=f"dies {moment} the fence") as made, pytest.raises(PeerGoneError):
                found = made.bridge.connect(0)
                assert version in (None, found)
                self._save(made, found)
                made.step()
            if moment != "within":
                assert self.health() == [200] * len(self.servers)
            version = self.version + (moment == "after")
        self._refuses()
        self._refuses_trainers()
        self._heals()

    def finds_ranks_that_differ(self) -> None:
        """A rank that writes other weights ends the run, is refused afterwards, and a checkpoint heals its weights."""
        with self.attached(fault="writes other weights") as made, pytest.raises(WeightsError):
            self._save(made, made.bridge.connect(0))
            made.step()
        with self.attached() as made, pytest.raises(WeightsError):
            made.bridge.connect(0)
        self._heals()

    # ---------------------------------------------------------------------------------------------- with options

    def writes_while_requests_run(self, in_flight: InFlight, **options: Any) -> None:
        """Requests in flight go on, are recomputed or end, on every server; new ones get the new weights."""
        large = {"lr": 0.05}  # a step that shows in the logprobs of old caches, even in 16 bits
        with self.attached(in_flight=in_flight, **large, **options) as made:
            version = made.bridge.connect(0)
            with held(self.servers) as streams:
                assert made.step()
            made.assert_serves(version + 1)
            for stream in streams:
                last = stream.chunks[-1]
                assert {chunk.policy_version for chunk in stream.chunks} == {version} and not stream.errors
                if in_flight == "abort":
                    assert last.finish_reason == "abort" and last.policy_version_end is None
                    assert len(stream.tokens) < MANY
                    continue
                assert last.finish_reason == "length" and last.policy_version_end == version + 1
                tokens, late = stream.tokens, stream.before_the_update()
                probe = Probe([*TWO_BLOCKS, *tokens], len(TWO_BLOCKS), torch.tensor(stream.logprobs))
                gaps = (probe.server_logprobs - made.steps.logprobs(probe)).abs()[late:]
                assert len(gaps) > 20 and (float(gaps.mean()) < self.tolerance) == (in_flight == "recompute")

    # ---------------------------------------------------------------------------------------------- parts

    def _save(self, made: Attached, version: int) -> None:
        """Save a checkpoint of what the servers have as `version`; note what every server samples by it."""
        self.version = version
        made.checkpoints.save(Progress(2, version))
        self.probes = made.assert_serves(version)

    def _refuses(self) -> None:
        """No server generates."""
        for server in self.servers:
            wait_for("the server refuses", lambda at=server: at.get("/health").status_code == 503, server.log, 30)

    def _refuses_trainers(self) -> None:
        """A trainer that does not resume learns of every server's torn weights."""
        with self.attached() as made, pytest.raises(BridgeError) as refused:
            made.bridge.connect(0)
        for problem in refused.value.problems:
            assert "torn" in problem.got and "--resume auto" in problem.fix
        assert len(refused.value.problems) == len(self.servers)

    def _heals(self) -> None:
        with self.attached(resume="auto") as made:
            assert (made.progress.step, made.progress.policy_version) == (2, self.version)
            healed = made.bridge.connect(self.version)
            assert healed > self.version
            self.assert_same(made.assert_serves(healed), self.probes)
        assert self.health() == [200] * len(self.servers)


def leave(world: World) -> None:
    """End the connection to the other ranks as the end of this process would: without waiting for them."""
    if dist.is_initialized():
        _abort_process_group()  # destroying an NCCL group would wait for the others to do the same
    world.control = None


WRITES: list[dict[str, Any]] = [
    {"in_flight": "keep", "optimizer": "adamw_8bit"},
    {"in_flight": "recompute", "train_layer_indices": "1", "master_weights": 1},
    {"in_flight": "abort"},
]
"""Options of `writes_while_requests_run`."""
