"""`python -m tests.unit.leading RANK PORT FOLDER`: each of two processes makes the calls that one of them leads."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_common.roster import MEMBERS_FILE, Member
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import DistributedConfig
from grpo_trainer.errors import DriftError, StoppedError, TrainingError
from grpo_trainer.parallel.world import World, join
from grpo_trainer.weights.bridge import Published, WeightBridge
from grpo_trainer.weights.broadcast import PresentWeights
from grpo_trainer.weights.fleet import Fleet


class UnsendableError(Exception):
    """An error that no other process can read."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("unsendable")


def main(rank: int, port: int, folder: Path) -> None:
    method = f"tcp://127.0.0.1:{port}"
    world = join(DistributedConfig(trainer_rank=rank, world_size=2, init_method=method), on_gpu=False)
    done: list[str] = []
    with world:
        assert world.lead(lambda: done.append("led") or "value") == "value"
        assert len(done) == int(world.leads), "only the first does it"
        assert world.lead(lambda: world.lead(lambda: "nested")) == "nested"
        assert world.scatter(lambda: ["a", "b"]) == "ab"[rank]
        assert world.scatter(lambda: None) is None
        check_errors(world)
        assert world.gather(rank) == [0, 1], "they are in step"
        check_fleet(world, folder)
        assert (world.only_first(lambda: "a thing") == "a thing") == world.leads
        with world.alike():
            raise TrainingError("ending")
    assert not world.leads and not dist.is_initialized()


def check_errors(world: World) -> None:
    drift = DriftError("drifted", field="samples", got="3", fix="restart")
    for error, kind in (
        (drift, DriftError),
        (StoppedError(signal.SIGTERM), StoppedError),
        (OSError(28, "full"), OSError),
    ):
        with pytest.raises(kind) as met:
            world.lead(lambda error=error: fail(error))
        assert str(met.value) == str(error) and world.is_common(met.value)
        assert getattr(met.value, "problems", None) == getattr(error, "problems", None)
        assert getattr(met.value, "exit_code", None) == getattr(error, "exit_code", None)
    with pytest.raises(UnsendableError if world.leads else TrainingError, match="unsendable"):
        world.scatter(lambda: fail(UnsendableError(1, 2)))
    assert not world.is_common(ValueError("of one alone"))


class Sending(WeightBridge):
    """A bridge that sends gathered weights."""

    def __init__(self, weights: PresentWeights, sent: list[int]) -> None:
        self.weights = weights
        self.sent = sent

    def close(self) -> None:
        pass

    def connect(self, policy_version: int) -> int:
        self.weights.world.lead(lambda: self.weights.gathered(torch.float32))
        self.publish(policy_version)
        return policy_version

    def prove(self) -> float | None:
        return self.weights.world.lead(lambda: 0.5)

    def publish(self, version: int) -> Published:
        self.weights.gather(version)
        self.weights.world.lead(partial(self.send, version))
        return Published(version, "m", {})

    def send(self, version: int) -> None:
        assert float(self.weights.of(version, torch.float32)["w"]) == 3.0
        self.sent.append(version)


def check_fleet(world: World, folder: Path) -> None:
    """Servers come and go, and all processes gather for each version that is sent, and only then."""
    own, sent = {"w": torch.tensor([float(1 + world.rank)])}, []
    gathered: list[int] = []

    def gather(keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        gathered.append(1)
        whole = sum(world.gather(own["w"]))
        assert isinstance(whole, Tensor)
        return {"w": keep(whole)} if world.leads else {}

    weights = PresentWeights(lambda: own, gather, world)
    members = [Member(name, f"http://127.0.0.1:{port}", "", "running") for name, port in (("a", 1), ("b", 2), ("c", 3))]

    def write(listed: list[Member]) -> None:
        (folder / MEMBERS_FILE).write_bytes(msgspec.json.encode(listed))

    config = Server(host="127.0.0.1", port=1, also=("127.0.0.1:2",), roster=folder)
    world.lead(lambda: write(members[:2]))
    with Fleet(config, lambda *_: Sending(weights, sent), weights) as fleet:
        assert fleet.connect(1) == 1 and fleet.prove() == 0.5
        fleet.publish(1)
        assert world.gather(len(gathered)) == [1, 1]
        fleet.publish(2)
        assert not world.lead(fleet.has_news)
        world.lead(lambda: write(members[1:]))
        assert world.lead(fleet.has_news)
        fleet.welcome()
        assert not world.lead(fleet.has_news)
        fleet.publish(3)
    assert world.gather(len(gathered)) == [3, 3]
    assert sent == ([1, 1, 1, 1, 2, 2, 2, 2, 3, 3] if world.leads else [])


def fail(error: Exception) -> list[str]:
    raise error


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
