"""`python -m tests.integration.paired RANK FOLDER MODEL MEETING_PORT SERVER_PORTS [KEY=VALUE …]`: a trainer process.

Each trainer process shares the weights of one server, or of one worker of a server. Rank 0 leads them through a few
steps, or is the process of a test (`tests/shared_contract.py`). With several optimizers (`optimizer=adamw,adamw_8bit`)
they train with one after the other.

Each process writes `FOLDER/rankRANK.pt`: what it saw with each optimizer. `fault=WHAT` plants a fault into a rank other
than 0.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from grpo_trainer.alignment.probes import probe_of
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import GrpoError
from grpo_trainer.parallel.strategies import ShardedUpdate, TensorShards
from grpo_trainer.parallel.world import World, join
from grpo_trainer.policy import SharedWeights
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.shared.attach import open_handles
from grpo_trainer.shared.bridge_file import read_bridge_config
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights import shared_weights
from tests.bridge_contract import PROMPT
from tests.shared_contract import BATCH, DIED, Attached, settings
from vllm_server.protocol.bridge_config import BridgeConfigFile

STEPS = 5
FENCE_SECONDS = 10.0
MEMORY_FILE = "grpo_shared_weights"
EXCHANGED = "exchanged shards"
CPU = torch.device("cpu")


def main(rank: int, folder: Path, model: Path, meeting: int, ports: list[str], options: dict[str, str]) -> None:
    torch.set_num_threads(1)
    fault, on_one_gpu = options.pop("fault", ""), options.pop("gpus", "") == "1"
    if fault:
        shared_weights.WRITE_SECONDS = FENCE_SECONDS
    workers = int(options.get("tensor_parallel_size", 1))
    address = f"tcp://127.0.0.1:{meeting}"
    own = {"trainer_rank": str(rank), "world_size": str(len(ports) * workers), "init_method": address}
    ports = ports[::-1] if fault == "another's server" else ports
    optimizers = options.pop("optimizer", "adamw").split(",")
    first, *_ = configs = [settings(model, folder, ports, optimizer=each, **own, **options) for each in optimizers]
    world = meet(first, address) if on_one_gpu else join(first, on_gpu=torch.cuda.is_available())
    seen: list[dict[str, Any]] = []
    try:
        with world:
            for config in configs:
                gc.collect()  # what the optimizer before had does not count
                seen.append({})
                lead(config, world, seen[-1]) if world.leads else follow(config, world, fault, seen[-1])
    except GrpoError as error:
        seen[-1]["error"] = (type(error).__name__, str(error))
    torch.save(seen, folder / f"rank{rank}.pt")


def meet(config: TrainConfig, address: str) -> World:
    """Connect processes that share a GPU, which NCCL refuses."""
    rank, size = config.rank, config.processes
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return World(rank, size, control)


def lead(config: TrainConfig, world: World, seen: dict[str, Any]) -> None:
    """Train a few steps, and ask every server after each; then save a checkpoint."""
    memory = Memory()
    with Attached(config, world) as made:
        memory.watch(made.trainer)
        seen["versions"] = [made.bridge.connect(made.progress.policy_version)]
        seen["noise"] = made.bridge.prove()
        seen |= {"losses": [], "gaps": [], "answered": []}
        for step in range(STEPS):
            one_step(made, step, seen)
        seen |= memory.counted(made.trainer, made.policy)
        seen["weights"] = {name: tensor.cpu() for name, tensor in made.weights().items()}
        made.checkpoints.save(Progress(seen["versions"][-1], seen["versions"][-1]))


def one_step(made: Attached, step: int, seen: dict[str, Any]) -> None:
    seen["losses"].append(made.steps.row(BATCH, step)["train/loss"])
    seen["versions"].append(made.bridge.publish(seen["versions"][-1] + 1).version)
    for client in made.clients:  # all ranks have the weights of rank 0
        answer = client.generate(PROMPT, max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True, seed=step)
        probe = probe_of(answer)
        seen["gaps"].append(float((probe.server_logprobs - made.steps.logprobs(probe)).abs().mean()))
        seen["answered"].append(answer.policy_version)


def follow(config: TrainConfig, world: World, fault: str, seen: dict[str, Any]) -> None:
    """Make the calls of rank 0 until it leaves."""
    memory = Memory()
    with ExitStack() as attaching:
        if fault == EXCHANGED:
            attaching.enter_context(exchanged_shards())
        with Attached(config, world) as made:
            attaching.close()
            seen["boot"] = made.policy.source.boot_id
            memory.watch(made.trainer)
            plant(fault, made.trainer, made.policy)
            made.follow()
            seen |= memory.counted(made.trainer, made.policy)


# ---------------------------------------------------------------- faults


def plant(fault: str, trainer: Trainer, policy: SharedWeights) -> None:
    holding: Any = trainer.holding
    assert isinstance(holding, ShardedUpdate | TensorShards)
    match fault:
        case "dies before the fence":
            holding.share_update = lambda: os._exit(DIED)
        case "dies within the fence":
            holding.finish_update = lambda: os._exit(DIED)
        case "dies after the fence":
            holding.check = lambda _: os._exit(DIED)  # type: ignore[method-assign]
        case "writes other weights":
            before(holding, "finish_update", lambda: write_another_norm(policy))
        case "another worker's matrix":
            bind_to_another(policy)
        case _:
            pass


def before(thing: Any, name: str, work: Callable[[], object]) -> None:
    """Do something before each call of a method."""
    method = getattr(thing, name)

    def both(*arguments: Any) -> Any:
        work()
        return method(*arguments)

    setattr(thing, name, both)


def exchanged_shards() -> Any:
    """Each of two ranks attaches to the other's worker."""
    of_rank = BridgeConfigFile.of_rank
    return mock.patch.object(BridgeConfigFile, "of_rank", lambda file, rank: of_rank(file, 1 - rank))


@torch.no_grad()
def write_another_norm(policy: SharedWeights) -> None:
    """Change a parameter that all ranks have whole."""
    policy.model.get_parameter("model.norm.weight").add_(0.1)


def bind_to_another(policy: SharedWeights) -> None:
    """Put one matrix into the memory of the first worker."""
    source = read_bridge_config(Path(os.environ["BRIDGE_FILE"]), 0, 2)
    name = "model.layers.1.mlp.down_proj"
    policy.model.get_submodule(name).weight = torch.nn.Parameter(open_handles(source, CPU)[f"{name}.weight"])


# ---------------------------------------------------------------- memory


M_MMAP_THRESHOLD = -3
"""Number of the option in glibc's `mallopt`."""


class Memory:
    """What a process takes from its start: bytes that belong to no file, and bytes of memory files that it touches.

    Freed tensors must not count, so larger pieces of memory are given back to the kernel as soon as they are freed.
    """

    def __init__(self) -> None:
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        self._start = resident()
        self._taken: dict[str, list[dict[str, int]]] = {"begins": [], "writes": []}

    def watch(self, trainer: Trainer) -> None:
        """Measure when a step begins, and when it writes."""
        before(trainer.holding, "in_step", lambda: self._note("begins"))
        before(trainer.holding, "finish_update", lambda: self._note("writes"))

    def _note(self, moment: str) -> None:
        self._taken[moment].append({kind: value - self._start[kind] for kind, value in resident().items()})

    def counted(self, trainer: Trainer, policy: SharedWeights) -> dict[str, Any]:
        """Return bytes of the weights, of those in the server's memory, of states, of other tensors; and those `taken`.

        `files` is the number of files of workers' weights that this process maps.
        """
        parameters = list(policy.model.parameters())
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        states = [value for value in states if torch.is_tensor(value)]
        known = {each.untyped_storage().data_ptr() for each in (*parameters, *states)}
        others = [
            each
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device == parameters[0].device
            and each.untyped_storage().data_ptr() not in known
        ]  # fmt: skip
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in others}
        return {
            "boot": policy.source.boot_id,
            "size": sum(parameter.nbytes for parameter in parameters),
            "mapped": sum(parameter.nbytes for parameter in parameters if _is_mapped(parameter)),
            "states": sum(state.nbytes for state in states),
            "others": sum(sizes.values()),
            "largest": sorted({(each.untyped_storage().nbytes(), str(each.shape)) for each in others})[-5:],
            "files": len({line.split()[4] for line in _maps() if MEMORY_FILE in line}),
            "taken": self._taken,
        }


def resident() -> dict[str, int]:
    """Return this process's bytes in main memory: `anonymous`, of no file, and `shared`, of memory files."""
    rollup = _fields(Path("/proc/self/smaps_rollup").read_text())
    return {"anonymous": rollup["Anonymous"], "shared": _fields(Path("/proc/self/status").read_text())["RssShmem"]}


def _fields(text: str) -> dict[str, int]:
    """Return the sizes that a file of /proc lists in kB, in bytes."""
    words = [line.split() for line in text.splitlines()]
    return {name.rstrip(":"): int(number) << 10 for name, number, *unit in (w for w in words if w[2:] == ["kB"])}


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
