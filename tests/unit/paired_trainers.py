"""`python -m tests.unit.paired_trainers RANK SIZE PORT FOLDER [KEY=VALUE …]`: a trainer process on the weights of its
own stand-in for a server, for a few steps. Writes what it came to into `FOLDER/rankRANKofSIZE.pt`.

`fault=WHAT` plants a fault into rank 1. `served=bfloat16` sets the dtype of the weights. `bucket_bytes=N`
sets the size of the buckets in which gradients are exchanged.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from multiprocessing.managers import BaseManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch

from grpo_trainer.config.options import build
from grpo_trainer.config.train import BUCKET_BYTES, TrainConfig
from grpo_trainer.errors import GrpoError, ServerError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel import strategies
from grpo_trainer.parallel.world import World, buckets, join
from grpo_trainer.policy import SharedWeights
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights.shared_weights import SharedBridge
from tests.unit.factories import batch, sample
from tests.unit.test_shared_weights import SharingServer
from tests.unit.two_trainers import GROUPS, ONE

STEPS = 5
POISONED = [[sample([4], [5], 1.0, logprobs=[float("nan")]), sample([4], [6], 0.0)]]
DIED = 9
"""Exit status of a rank that a fault ends."""
UNREPORTED = "dies before the fence, unreported"


def main(rank: int, size: int, port: int, folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    fault = options.pop("fault", "")
    limit = int(options.pop("bucket_bytes", BUCKET_BYTES))
    served = getattr(torch, options.pop("served", "float32"))
    values: dict[str, Any] = {"model": "x", "weight_bridge_mode": "shared_vllm", "device": "cpu", "seq_len": 64}
    values |= {"lr": 1e-3, "batch_size": 2, "adam_epsilon": 1e-3, "save_path": str(folder / "checkpoints")}
    values |= {"trainer_rank": rank, "world_size": size, "init_method": f"tcp://127.0.0.1:{port}"}
    config = build(TrainConfig, values | options)
    world = join(config, on_gpu=False)
    server = SharingServer()
    server.info = msgspec.structs.replace(server.info, boot_id=f"boot {rank}")
    server.model.to(served)
    if rank == 1 and fault == "a copy":
        server.fault_of_it = fault
    server.close = lambda: None  # type: ignore[method-assign]
    result: dict[str, Any] = {}
    try:
        with mock.patch.object(strategies, "buckets", partial(buckets, limit=limit)), world:
            work(config, world, server, fault, result)
    except GrpoError as error:
        problem = error.problems[0]
        result |= {"error": type(error).__name__, "field": problem.field, "got": problem.got}
    result |= {"told": server.told, "weights": {name: p.detach() for name, p in server.model.named_parameters()}}
    torch.save(result, folder / f"rank{rank}of{size}.pt")


class Manager(BaseManager):
    """Lets rank 0 ask the stand-in of another rank, which is in that rank's process."""


class Remote:
    """The stand-in of another rank."""

    def __init__(self, address: Any) -> None:
        manager = Manager(address, b"")
        manager.connect()
        self._server: Any = manager.server()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave it as it is: its process may be gone."""

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **more: Any) -> Any:
            try:
                return getattr(self._server, name)(*arguments, **more)
            except (EOFError, ConnectionError) as gone:
                raise ServerError("no answer") from gone

        return ask


def clients(world: World, server: SharingServer) -> dict[str, Any]:
    """The stand-ins of all ranks by their URLs, as rank 0 reaches them."""
    Manager.register("server", callable=lambda: server)
    serving = Manager(("127.0.0.1", 0), b"").get_server()
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    addresses = world.gather(serving.address)
    own: list[Any] = [server, *(Remote(address) if world.leads else server for address in addresses[1:])]
    return {f"http://server-{rank}": each for rank, each in enumerate(own)}


def work(config: TrainConfig, world: World, server: SharingServer, fault: str, result: dict[str, Any]) -> None:
    model = server.trainers_model().requires_grad_(True)
    policy = SharedWeights(model, None, SimpleNamespace(boot_id=server.info.boot_id))  # type: ignore[arg-type]
    trainer = Trainer(model, config, world=world)
    torch.manual_seed(world.rank)  # so that ranks which round by themselves would differ
    checkpoints = Checkpoints(config, policy, trainer.optimizer, trainer.norms, trainer.shards, world=world)
    assert config.weight_bridge_mode == "shared_vllm"
    with SharedBridge(config, policy, clients(world, server), 64, world) as bridge:
        if world.rank == 1:
            plant_later(fault, server, trainer)
        if world.leads and fault == UNREPORTED:
            report_nothing(bridge, trainer)
        steps(world, trainer, checkpoints, bridge, result)
    states = trainer.optimizer.state_dict()["state"].values()
    result["states"] = sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value))


def steps(
    world: World, trainer: Trainer, checkpoints: Checkpoints, bridge: SharedBridge, result: dict[str, Any]
) -> None:
    progress = checkpoints.resume()
    with world.alike():
        version = bridge.connect(progress.policy_version)
        result["noise"] = bridge.prove()
    losses = []
    for step in range(progress.step, progress.step + STEPS):
        try:
            row = reduce(trainer.step(batch(*(GROUPS if step % 2 == 0 else ONE)), step, bridge.updating).metrics)
        except GrpoError as error:
            if world.is_common(error) and not error.spoils_weights:
                checkpoints.save(Progress(step + 1, version + 1))
            raise
        losses.append(row["train/loss"])
        version += 1
        published = bridge.publish(version)
        assert published.version == version and reduce(published.metrics)["publish/stall_time"] == 0.5
        result.setdefault("first", weights_of(trainer))
    result |= {"losses": losses, "version": version}
    assert not trainer.step(batch(*POISONED), 9, bridge.updating).updated  # its gradients must not stay
    checkpoints.save(Progress(progress.step + STEPS, version), final=False)
    trainer.step(batch(*ONE), progress.step + STEPS, bridge.updating)
    result["beyond"] = weights_of(trainer)


def weights_of(trainer: Trainer) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def plant_later(fault: str, server: SharingServer, trainer: Trainer) -> None:
    """Plant a fault into the first step."""

    def die(*_: object) -> None:
        os._exit(DIED)

    def refuse(request: Any) -> Any:
        if server.told.count("end 0"):  # not within the proof
            raise ServerError("no answer")
        return SharingServer.begin_update(server, request)

    holding: Any = trainer.holding
    if fault == UNREPORTED:
        holding.share_update = die
    if fault == "no fence":
        server.begin_update = refuse  # type: ignore[method-assign]


def report_nothing(bridge: SharedBridge, trainer: Trainer) -> None:
    """Behave as NCCL does after a rank's end: an exchange returns at once, and the device never finishes it."""
    queued: list[str] = []
    holding: Any = trainer.holding
    holding.share_update = lambda: queued.append("an exchange")

    def wait() -> None:
        assert not queued, "this wait never ends"

    bridge.finish_kernels = wait  # type: ignore[method-assign]


if __name__ == "__main__":
    own_options = dict(word.split("=", 1) for word in sys.argv[5:])
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), own_options)
