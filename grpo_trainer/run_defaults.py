"""Options that nobody gave: `grpo run` chooses them by the model's size and the machine's memory, and says so.

docs/options.md has the table of these defaults, which `scripts/options_table.py` makes from this module's constants.
"""

from __future__ import annotations

from grpo_trainer.config.bridge import LoraOptions
from grpo_trainer.config.environments import EnvironmentProcess
from grpo_trainer.config.learning_rate import usual_rates
from grpo_trainer.config.run import PASS_TOKENS, RunConfig
from grpo_trainer.doctor.run_checks import planned_memory
from grpo_trainer.doctor.server_memory import is_planned, with_room
from grpo_trainer.machine import Machine
from grpo_trainer.memory import GB
from grpo_trainer.model.shape import ModelShape

SMALLEST_PASS = 2048
"""Tokens of a forward pass below which GPUs are mostly idle."""


def chosen(config: RunConfig, machine: Machine, shape: ModelShape | None) -> RunConfig:
    """Return the run with a learning rate, a sequence length, microbatches and a server's share that nobody gave.

    Args:
        shape: the model's; None: it is not on this machine yet. The defaults for a large model stay then.
    """
    if shape is None:
        return config
    trainer = config.trainer
    if "lr" in config.unset:
        rate = usual_rates(trainer.bridge.mode, shape.parameters).default
        trainer = trainer.model_copy(update={"optimizer": trainer.optimizer.model_copy(update={"lr": rate})})
    if "seq_len" in config.unset and shape.positions and shape.positions < trainer.model.seq_len:
        trainer = trainer.model_copy(update={"model": trainer.model.model_copy(update={"seq_len": shape.positions})})
    config = config.model_copy(update={"trainer": trainer})
    if "microbatch" in config.unset:
        config = _with_microbatch(config, machine, shape)
    return with_room(config, machine, shape)


def _with_microbatch(config: RunConfig, machine: Machine, shape: ModelShape) -> RunConfig:
    """Return the run with the largest forward passes, up to `PASS_TOKENS`, with which the memory plan fits.

    Without a plan the passes are small: what does not fit would end the run in its first step.
    """
    longest = config.trainer.model.seq_len
    tokens = max(PASS_TOKENS if _has_plan(config, machine) else SMALLEST_PASS, longest)
    while True:
        compute = config.trainer.compute.model_copy(update={"max_tokens_per_microbatch": tokens})
        tried = config.model_copy(update={"trainer": config.trainer.model_copy(update={"compute": compute})})
        smaller = max(tokens // 2, longest, SMALLEST_PASS)
        if smaller == tokens or not _has_plan(config, machine) or planned_memory(tried, shape, machine).fits:
            return tried
        tokens = smaller


def _has_plan(config: RunConfig, machine: Machine) -> bool:
    """Return whether the memory plan knows what the run computes on: this machine's GPUs, or its CPU without any."""
    if machine.on_gpu:
        return is_planned(config, machine)
    return not (config.options.cluster or machine.gpu_hidden)


def _environment(environment: EnvironmentProcess) -> str:
    """Return an environment's name, its data and its rewards."""
    rewards = [str(each.get("function", each)) if isinstance(each, dict) else str(each) for each in environment.rewards]
    parts = [f"data {environment.data['path']}" if environment.data.get("path") else ""]
    parts += [f"rewards {' and '.join(rewards)}" if rewards else ""]
    about = ", ".join(filter(None, parts))
    return f"{environment.name} ({about})" if about else environment.name


def described(config: RunConfig, machine: Machine, shape: ModelShape | None) -> str:
    """Return one paragraph: what is trained, how, on what, and how much memory is planned for it."""
    trainer, options = config.trainer, config.options
    bridge = trainer.bridge
    what = f"a LoRA adapter of rank {bridge.r}" if isinstance(bridge, LoraOptions) else "all weights"
    if options.prompts_per_step:
        answers = trainer.sequences_per_step // options.prompts_per_step
        batch = f"{options.prompts_per_step} prompts x {answers} answers"
    else:
        batch = f"{trainer.sequences_per_step} answers"
    loss = f"loss {trainer.loss.loss}" + (f" with KL {trainer.loss.kl_beta:g}" if trainer.loss.kl_beta else "")
    names = ", ".join(map(_environment, config.environments))
    text = (
        f"trains {what} ({bridge.mode}): {trainer.training_steps} steps of {batch}, each at most "
        f"{trainer.model.seq_len} tokens with its prompt; learning rate {trainer.optimizer.lr:g}, {loss}; "
        f"environment {names}"
    )
    if shape is None or not _has_plan(config, machine):
        return text
    plan = planned_memory(config, shape, machine).plan()
    rows = [row for row in plan.rows if row.device == plan.fullest]
    parts = (
        f"{owner} {sum(row.nbytes for row in rows if row.owner == owner) / GB:.1f} GB"
        for owner in dict.fromkeys(row.owner for row in rows)
    )
    where = f"GPU {plan.fullest}" if machine.on_gpu else "this machine"
    return f"{text}; memory planned: {', '.join(parts)} of {plan.devices.total / GB:.1f} GB on {where}"
