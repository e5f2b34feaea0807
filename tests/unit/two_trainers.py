"""`python -m tests.unit.two_trainers RANK SIZE PORT FOLDER [KEY=VALUE …]`: a few steps, and the weights they lead to.

Each process of several runs it; without others it is the run that they are compared with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.alignment.probes import Probe, trainer_logprobs
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel.strategies import Divided
from grpo_trainer.parallel.world import World, join
from grpo_trainer.policy import build_policy
from grpo_trainer.saving.checkpoint import Checkpoints, seed_generators
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, sample

STEPS = 3

GROUPS = [
    [sample([5, 6], [7, 8, 9], 1.0, version=0, logprobs=[-1.0, -2.0, -3.0]), sample([5, 6], [9], 0.0)],
    [sample([11], [12, 13], 0.5), sample([11], [14, 15, 16, 17, 18], 1.0), sample([11], [20], 0.0)],
    [sample([21, 22, 23], [24], 1.0), sample([21, 22, 23], [25, 26], 0.0)],
]
ALIKE = [[sample([5], [6], 1.0), sample([5], [7], 1.0)]]  # nothing to learn from
ONE = [[sample([5], [6], 1.0), sample([5], [7], 0.0)]]


def main(rank: int, size: int, port: int, folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    values = {"model": str(folder / "model"), "device": "cpu", "batch_size": 2, "seq_len": 64, "lr": 1e-2}
    values |= {"adam_epsilon": 1e-3}  # else Adam makes ±1 of gradients that are nothing but rounding
    values |= {"save_path": str(folder / f"checkpoints{size}"), "background_writes": False}
    values |= {"trainer_rank": rank, "world_size": size, "init_method": f"tcp://127.0.0.1:{port}"}
    config = build(TrainConfig, values | options)
    seed_generators(config.seed)
    world = join(config, on_gpu=False)
    print("joined", flush=True)
    with world:
        work(config, world, folder)


def work(config: TrainConfig, world: World, folder: Path) -> None:
    policy = build_policy(config, world=world)
    trainer = Trainer(policy.model, config, world=world)
    checkpoints = Checkpoints(config, policy, trainer.optimizer, trainer.norms, trainer.shards, world=world)
    progress = checkpoints.resume()
    rows = train(trainer, progress.step)
    checkpoints.save(Progress(progress.step + STEPS))
    weights = weights_of(trainer)
    with torch.no_grad():  # what all compute between steps, as a bridge's proof
        microbatch, *_ = trainer.ready(batch(*ONE)).microbatches
        scores = trainer.forward.scores(microbatch).logprobs_N
    if (folder / f"fail{world.rank}").exists():  # in the middle of what the others take part in
        first, _ = policy.model.model.layers
        first.register_forward_hook(fail)
    probe = trainer_logprobs(policy.model, Probe([5, 6, 7, 8], 2, torch.zeros(2)))
    train(trainer, progress.step + STEPS)
    later = weights_of(trainer)
    metrics = json.dumps(rows)
    found = {"weights": weights, "later": later, "metrics": metrics, "probe": probe, "scores": scores}
    if world.leads:
        torch.save(found, folder / f"led_by_{world.size}.pt")


def fail(*_: object) -> None:
    raise MemoryError("a layer has failed")


def train(trainer: Trainer, start: int) -> list[dict[str, float]]:
    return [
        reduce(trainer.step(batch(*groups), step).metrics)
        for step in range(start, start + STEPS)
        for groups in (GROUPS, ALIKE, ONE)
    ]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    model = trainer.model
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    whole = trainer.shards.tensors() if isinstance(trainer.shards, Divided) else dict(model.named_parameters())
    return {name: whole[name].detach().clone() for name in trained if name in whole}  # none but on rank 0


if __name__ == "__main__":
    own = dict(word.split("=", 1) for word in sys.argv[5:])
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), own)
