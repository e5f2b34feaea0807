"""`python -m tests.unit.tensor_trainers RANK SIZE PORT FOLDER`: each of several processes trains its shard of some
models for a few steps; a process alone is what they are compared with. Writes `FOLDER/rankRANKofSIZE.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_trainer.alignment.probes import logprobs_of
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.tensor_shards import cut_model
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel.strategies import TensorShards
from grpo_trainer.parallel.world import World, join
from grpo_trainer.policy import choose_trained
from grpo_trainer.trainer import Trainer
from tests.golden.models import ATTENTION, CONFIGS, SIZES
from tests.unit.factories import batch, sample
from tests.unit.two_trainers import GROUPS, ONE

STEPS = 5
PROMPTS = [[1, 5, 70, 33, 97]]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "untied, odd vocabulary": ("qwen2", {"tie_word_embeddings": False, "vocab_size": 101}, {"entropy_coef": 0.01}),
    "norms of heads": ("qwen3", {}, {"max_grad_norm": 0.01}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {"gradient_checkpointing": True}),
    "16 bits": ("mistral", {}, {"served": "bfloat16"}),
    "8-bit states": ("llama", {}, {"optimizer": "adamw_8bit"}),
    "one layer": ("qwen2", {}, {"train_layer_indices": "1"}),
}
"""Name -> architecture, changes of its configuration, options of the trainer."""


def main(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    values: dict[str, Any] = {"model": "x", "weight_bridge_mode": "shared_vllm", "device": "cpu", "batch_size": 2}
    values |= {"lr": 1e-3, "adam_epsilon": 1e-3, "seq_len": 64, "save_path": str(folder)}
    values |= {"trainer_rank": rank, "world_size": size, "init_method": f"tcp://127.0.0.1:{port}"}
    world = join(build(TrainConfig, values), on_gpu=False)
    torch.save({name: trained(name, values, world) for name in CASES}, folder / f"rank{rank}of{size}.pt")


def random_model(name: str) -> PreTrainedModel:
    architecture, changes, options = CASES[name]
    kind, fields = CONFIGS[architecture]
    torch.manual_seed(0)
    attention = ATTENTION.get(architecture, "sdpa")
    config = kind(**SIZES | fields | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(getattr(torch, options.get("served", "float32"))).train()


def trained(name: str, values: dict[str, Any], world: World) -> dict[str, Any]:
    """What a process came to."""
    model = random_model(name)
    config = build(TrainConfig, values | {key: value for key, value in CASES[name][2].items() if key != "served"})
    shard = cut_model(model, world.rank, world.size) if not world.alone else None
    assert config.weight_bridge_mode == "shared_vllm"
    choose_trained(model, config)
    trainer = Trainer(model, config, world=world)
    torch.manual_seed(world.rank)  # so that ranks which round by themselves would differ
    losses, norms = [], []
    prepared: dict[str, torch.Tensor] = {}
    write = trainer.optimizer.step

    def look_and_write() -> None:
        if isinstance(trainer.shards, TensorShards):
            prepared.update(trainer.shards.tensors())
        write()

    trainer.optimizer.step = look_and_write  # type: ignore[method-assign]
    for step in range(STEPS):
        groups = GROUPS if step % 2 == 0 else [*ONE, [sample([5], [6, 7], 1.0), sample([5], [70], 0.0)]]
        row = reduce(trainer.step(batch(*groups), step).metrics)
        losses.append(row["train/loss"])
        norms.append(row["train/grad_norm"])
    found: dict[str, Any] = {"losses": losses, "norms": norms, "size": sum(p.numel() for p in model.parameters())}
    found["logprobs"] = logprobs_of(model, PROMPTS)
    if shard is None:
        found["weights"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
        found["states"] = trainer.optimizer.state_dict()
    else:
        assert isinstance(trainer.shards, TensorShards)
        found["weights"], found["states"] = trainer.shards.tensors(), trainer.shards.states(trainer.optimizer)
        found["prepared"] = prepared
        found["everywhere"] = [p.detach() for n, p in model.named_parameters() if n not in shard.cuts]
        own = trainer.shards.own_states(found["states"]["state"]) if world.leads else {}
        found["own"], found["kept"] = own, trainer.optimizer.state_dict()["state"]
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
