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
from grpo_trainer.follower import follow
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel.common_passes import CommonPasses
from grpo_trainer.parallel.world import Restore, World, join
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
    if world.leads:
        with world:
            lead(config, world, folder / f"led_by_{size}.pt")
    else:
        follow(config, world)


def lead(config: TrainConfig, world: World, written: Path) -> None:
    policy = build_policy(config, world=world)
    trainer = Trainer(policy.model, config, world=world)
    checkpoints = Checkpoints(config, policy, trainer.optimizer, trainer.norms, trainer.shards)
    progress = checkpoints.resume()
    if checkpoints.safe_path is not None:
        world.give_all(Restore(checkpoints.safe_path))
    rows = train(trainer, progress.step)
    checkpoints.save(Progress(progress.step + STEPS))
    weights = weights_of(trainer)
    with torch.no_grad():  # what rank 0 computes between steps: the bridge's proof, logged samples
        microbatch, *_ = trainer.ready(batch(*ONE)).microbatches
        scores = trainer.forward.scores(microbatch).logprobs_N
    if written.with_name("fail").exists():  # in the middle of what the others take part in
        first, _ = policy.model.model.layers
        first.register_forward_hook(fail)
    probe = trainer_logprobs(policy.model, Probe([5, 6, 7, 8], 2, torch.zeros(2)))
    train(trainer, progress.step + STEPS)
    later = weights_of(trainer)
    metrics = json.dumps(rows)
    torch.save({"weights": weights, "later": later, "metrics": metrics, "probe": probe, "scores": scores}, written)


def fail(*_: object) -> None:
    raise MemoryError("a layer has failed")


def train(trainer: Trainer, start: int) -> list[dict[str, float]]:
    return [
        reduce(trainer.step(trainer.ready(batch(*groups)), step).metrics)
        for step in range(start, start + STEPS)
        for groups in (GROUPS, ALIKE, ONE)
    ]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    model = trainer.model
    whole = trainer.shards.tensors() if isinstance(trainer.shards, CommonPasses) else dict(model.named_parameters())
    return {name: whole[name].detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


if __name__ == "__main__":
    own = dict(word.split("=", 1) for word in sys.argv[5:])
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), own)
