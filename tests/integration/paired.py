"""`python -m tests.integration.paired RANK FOLDER MODEL MEETING_PORT SERVER_PORTS [KEY=VALUE …]`: a trainer process.

Each trainer process shares the weights of one server. Rank 0 leads them through a few steps.

Each process writes `FOLDER/rankRANK.pt`: what it saw. `fault=WHAT` plants a fault into rank 1.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from grpo_trainer.alignment.proof import probe_of, trainer_logprobs
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import GrpoError
from grpo_trainer.follower import run_worker
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel.sharded_update import ShardedUpdate
from grpo_trainer.parallel.tensor_parallel import TensorShards
from grpo_trainer.parallel.world import Restore, World, join
from grpo_trainer.policy import SharedWeights, build_policy
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.server_client import ServerClient
from grpo_trainer.shared.attach import open_handles
from grpo_trainer.shared.bridge_file import read_bridge_config
from grpo_trainer.signals import StopSignal
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights import shared_weights
from grpo_trainer.weights.build import build_bridge, build_followers_bridge
from tests.bridge_contract import PROMPT
from tests.unit.factories import batch, sample
from vllm_server.protocol.bridge_config import BridgeConfigFile

STEPS = 5
FENCE_SECONDS = 4.0
DIED = 9
MEMORY_FILE = "grpo_shared_weights"
CPU = torch.device("cpu")
BATCH = [
    [sample([4, 5], [6, 7, 9], 1.0), sample([4, 5], [8], 0.0)],
    [sample([10, 11], [12], 0.0), sample([10, 11], [13, 14], 1.0)],
]


def settings(model: Path, folder: Path, ports: list[str], **options: str) -> TrainConfig:
    """The configuration of a process, or of a single trainer that pairs are compared with."""
    values: dict[str, Any] = {"model": str(model), "weight_bridge_mode": "shared_vllm", "seq_len": 128}
    values |= {"lr": 1e-3, "adam_epsilon": 1e-3, "save_path": str(folder / "checkpoints"), "vllm_port": ports[0]}
    if len(ports) > 1:
        values["vllm_also"] = ",".join(f"127.0.0.1:{port}" for port in ports[1:])
    return build(TrainConfig, values | options)


def main(rank: int, folder: Path, model: Path, meeting: int, ports: list[str], options: dict[str, str]) -> None:
    torch.set_num_threads(1)
    shared_weights.WRITE_SECONDS = FENCE_SECONDS
    fault, on_one_gpu = options.pop("fault", ""), options.pop("gpus", "") == "1"
    workers = int(options.get("tensor_parallel_size", 1))
    address = f"tcp://127.0.0.1:{meeting}"
    own = {"trainer_rank": str(rank), "world_size": str(len(ports) * workers), "init_method": address}
    config = settings(model, folder, ports, **own, **options)
    world = meet(config, address) if on_one_gpu else join(config.distributed, on_gpu=torch.cuda.is_available())
    seen: dict[str, Any] = {}
    try:
        work(config, world, fault if rank == 1 or fault == "exchanged shards" else "", seen)
    except GrpoError as error:
        seen["error"] = (type(error).__name__, str(error))
    torch.save(seen, folder / f"rank{rank}.pt")


def meet(config: TrainConfig, address: str) -> World:
    """Connect processes that share a GPU, which NCCL refuses."""
    rank, size = config.distributed.rank, config.distributed.processes
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return World(rank, size, control)


def work(config: TrainConfig, world: World, fault: str, seen: dict[str, Any]) -> None:
    of_rank = BridgeConfigFile.of_rank
    other = mock.patch.object(BridgeConfigFile, "of_rank", lambda file, rank: of_rank(file, 1 - rank))
    with other if fault == "exchanged shards" else nullcontext(), world.working():
        policy = build_policy(config, world=world)
    assert isinstance(policy, SharedWeights)
    if fault == "another worker's matrix":
        bind_to_another(policy)
    seen["boot"] = policy.source.boot_id
    trainer = Trainer(policy.model, config, world=world)
    checkpoints = Checkpoints(config.checkpoints, policy, trainer.optimizer, trainer.norms, trainer.shards)
    if world.leads:
        with world, StopSignal() as stop:
            progress = checkpoints.resume()
            if checkpoints.safe_path is not None:
                world.give_all(Restore(checkpoints.safe_path))
            with build_bridge(config, policy, checkpoints, progress, stop, world) as bridge:
                lead(config, trainer, policy, bridge, progress, seen)
                checkpoints.save(Progress(progress.step + STEPS, seen["versions"][-1]))
    else:
        plant(fault, trainer)
        bridge = build_followers_bridge(config, policy, world)
        assert bridge is not None
        with bridge:
            run_worker(world, trainer, checkpoints, bridge)
    seen |= memory_of(trainer, policy, [*seen.get("weights", {}).values()])


def plant(fault: str, trainer: Trainer) -> None:
    holding = trainer.holding
    assert isinstance(holding, ShardedUpdate | TensorShards)
    if fault == "dies before the fence":
        holding.share_update = lambda: os._exit(DIED)  # type: ignore[method-assign]
    if fault == "dies within the fence":
        holding.finish_update = lambda: os._exit(DIED)  # type: ignore[method-assign]
    if fault == "dies after the fence":
        holding.check = lambda _: os._exit(DIED)  # type: ignore[method-assign]


def bind_to_another(policy: SharedWeights) -> None:
    """Put one matrix into the memory of the first worker."""
    source = read_bridge_config(Path(os.environ["BRIDGE_FILE"]), 0, 2)
    name = "model.layers.1.mlp.down_proj"
    policy.model.get_submodule(name).weight = torch.nn.Parameter(open_handles(source, CPU)[f"{name}.weight"])


def lead(
    config: TrainConfig, trainer: Trainer, policy: SharedWeights, bridge: Any, progress: Progress, seen: dict[str, Any]
) -> None:
    clients = [ServerClient(vllm) for vllm in config.vllm.each]
    seen["versions"] = [bridge.connect(progress.policy_version)]
    seen["noise"] = bridge.prove()
    seen["losses"], seen["gaps"], seen["answered"] = [], [], []
    for step in range(progress.step, progress.step + STEPS):
        row = reduce(trainer.step(batch(*BATCH), step, bridge.updating).metrics)
        seen["losses"].append(row["train/loss"])
        version = seen["versions"][-1] + 1
        seen["versions"].append(bridge.publish(version).version)
        for client in clients:  # all ranks have the weights of rank 0
            answer = client.generate(PROMPT, max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True, seed=step)
            probe = probe_of(answer)
            own = trainer_logprobs(policy.model, probe)
            seen["gaps"].append(float((probe.server_logprobs - own).abs().mean()))
            seen["answered"].append(answer.policy_version)
    shards = trainer.shards
    tensors = shards.tensors() if shards is not None else policy.tensors()
    seen["weights"] = {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def memory_of(trainer: Trainer, policy: SharedWeights, gathered: list[torch.Tensor]) -> dict[str, Any]:
    """Count bytes: of the weights, of those that lie in the server's memory, of states, and of all other tensors.

    `gathered` is the test's own copy. `files` is the number of files of workers' weights that this process maps.
    """
    parameters = list(policy.model.parameters())
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    counted = storages | {each.untyped_storage().data_ptr() for each in gathered}
    counted |= {state.untyped_storage().data_ptr() for state in states}
    others = [
        each
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device == parameters[0].device
        and each.untyped_storage().data_ptr() not in counted
    ]  # fmt: skip
    storages_of_others = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in others}
    return {
        "size": sum(parameter.nbytes for parameter in parameters),
        "mapped": sum(parameter.nbytes for parameter in parameters if _is_mapped(parameter)),
        "states": sum(state.nbytes for state in states),
        "others": sum(storages_of_others.values()),
        "largest": sorted({(each.untyped_storage().nbytes(), str(each.shape)) for each in others})[-5:],
        "files": len({line.split()[4] for line in _maps() if MEMORY_FILE in line}),
    }


def _is_mapped(parameter: torch.Tensor) -> bool:
    """Whether a parameter lies in a file that this process maps and may share."""
    for line in _maps():
        place, rights, *_ = line.split()
        low, high = (int(end, 16) for end in place.split("-"))
        if low <= parameter.data_ptr() < high:
            return rights.endswith("s")
    return False


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[6:])
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5].split(","), given)
