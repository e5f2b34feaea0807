"""Options that nobody gave: `grpo run` chooses them by the model's size and the machine's memory, and says so.

Among them is the server's share of a GPU: the default leaves a trainer of all weights too little room on some GPUs, so
it is lowered where that helps. Another is the size of the server's key-value cache: without it, vLLM measures how much
of a GPU is free while it starts. No other process may use that GPU then: vLLM would count memory that is taken as the
server's, and memory that is freed ends the server.

docs/options.md has the table of these defaults, which `scripts/options_table.py` makes from this module's constants.
"""

from __future__ import annotations

import math

from grpo_common.models import find_folder
from grpo_trainer.config.options import key_of
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import PASS_TOKENS
from grpo_trainer.config.server import arguments
from grpo_trainer.config.train import usual_rates
from grpo_trainer.errors import ModelError
from grpo_trainer.launch.plan import CACHE_FLAG
from grpo_trainer.machine import Machine
from grpo_trainer.memory import CACHE, GB, Devices, Setup, device_name, other_share
from grpo_trainer.model.shape import ModelShape, read_model, read_shape

SMALLEST_PASS = 2048
"""Tokens of a forward pass below which GPUs are mostly idle."""
PLANNED_WITHIN = 0.02
"""By this share the numbers in a model's files may differ from those that the plan counts."""
SHARE = "gpu_memory_utilization"
SIZES = frozenset(map(key_of, (CACHE_FLAG, "--enable-sleep-mode")))
"""Arguments with which a server uses other memory than the plan counts."""


def chosen(config: RunConfig, machine: Machine, shape: ModelShape | None) -> RunConfig:
    """Return the run with a learning rate, a sequence length, microbatches and a server's share that nobody gave.

    The defaults for a large model stay where the model is not on this machine yet, so that it has no shape.
    """
    if shape is None:
        return config
    trainer = config.trainer
    if "lr" in config.unset:
        rate = usual_rates(trainer.weight_bridge_mode, shape.parameters).default
        trainer = trainer.model_copy(update={"lr": rate})
    if "seq_len" in config.unset and shape.positions and shape.positions < trainer.seq_len:
        trainer = trainer.model_copy(update={"seq_len": shape.positions})
    config = config.model_copy(update={"trainer": trainer})
    if "microbatch" in config.unset:
        config = _with_microbatch(config, machine, shape)
    return with_room(config, machine, shape)


def _with_microbatch(config: RunConfig, machine: Machine, shape: ModelShape) -> RunConfig:
    """Return the run with the largest forward passes, up to `PASS_TOKENS`, with which the memory plan fits.

    Without a plan the passes are small: what does not fit would end the run in its first step.
    """
    longest = config.trainer.seq_len
    tokens = max(PASS_TOKENS if _has_plan(config, machine) else SMALLEST_PASS, longest)
    while True:
        trainer = config.trainer.model_copy(update={"max_tokens_per_microbatch": tokens})
        tried = config.model_copy(update={"trainer": trainer})
        smaller = max(tokens // 2, longest, SMALLEST_PASS)
        if smaller == tokens or not _has_plan(config, machine) or Setup.of(tried, shape, machine).plan().fits:
            return tried
        tokens = smaller


def _has_plan(config: RunConfig, machine: Machine) -> bool:
    """Return whether the memory plan knows what the run computes on: this machine's GPUs, or its CPU without any."""
    if machine.on_gpu:
        return is_planned(config, machine)
    # A GPU on which vLLM runs all the same is one that NVIDIA's library does not list, such as a part of one (MIG).
    return not (config.options.cluster or machine.serves_on_gpu)


def with_room(config: RunConfig, machine: Machine, shape: ModelShape | None) -> RunConfig:
    """Return the run with a share of the GPU's memory for its server that leaves the trainer enough.

    It is the default, or the largest smaller share with which the memory plan fits. A share that the user has chosen
    stays; so does the default where no share is enough, and where the plan does not know the GPUs (`is_planned`).
    """
    if shape is None or not is_planned(config, machine) or SHARE in config.server.model_fields_set:
        return config
    setup = Setup.of(config, shape, machine)
    if setup.plan().fits or (changed := other_share(setup, smaller=True)) is None:
        return config
    update = {SHARE: changed.share}
    vllm = config.trainer.server.model_copy(update=update)
    if not config.trainer.owns_server:  # the trainer's file says what the user has set
        vllm.model_fields_set.discard(SHARE)
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"server": vllm})})


def is_planned(config: RunConfig, machine: Machine) -> bool:
    """Return whether the memory plan knows the run's GPUs, and what its server uses of them.

    It does not know those of a cluster, and those that `--server.gpus` names by anything but numbers.
    """
    unnumbered = Devices.of(machine).of_servers(config.server) is None
    return _knows_server(config, machine) and not (config.options.cluster or unnumbered)


def _knows_server(config: RunConfig, machine: Machine) -> bool:
    """Return whether the memory plan knows how much of a GPU the server uses. It does unless `SIZES` are given."""
    given = {key_of(flag) for flag, _ in arguments(config.trainer.server.extra_args)}
    return machine.on_gpu and not given & SIZES


def planned_cache(config: RunConfig, machine: Machine) -> int | None:
    """Return the bytes of the cache on each of the server's GPUs.

    None where nobody needs the GPU during the server's start, where the user has fixed the size, and where the plan
    does not know the model: vLLM measures then.
    """
    trainer = config.trainer
    if trainer.owns_server or not _knows_server(config, machine):
        return None
    if trainer.server.in_8_bits:  # the plan's weights and tokens have 16
        return None
    if (folder := find_folder(trainer.model_name)) is None:
        return None
    try:
        files = read_model(folder)
        shape = read_shape(folder, files.config)
    except (ModelError, ValueError):
        return None
    is_coarse = files.config.get("quantization_config") or files.config.get("compression_config")
    stored = sum(math.prod(tensor) for tensor in files.shapes.values())
    if is_coarse or abs(stored - shape.parameters) > PLANNED_WITHIN * stored:
        return None
    plan = Setup.of(config, shape, machine).plan()
    sizes = [row.nbytes for row in plan.rows if (row.owner, row.what) == ("server", CACHE)]
    return min(sizes) if sizes and not plan.problems else None


def described(given: RunConfig, config: RunConfig, machine: Machine, shape: ModelShape | None) -> list[str]:
    """Return what a start says: model and vLLM; what was chosen otherwise than given; and one paragraph on what is
    trained, how, on what, and how much memory is planned for it."""
    vllm = f"vLLM {machine.version(machine.vllm)}" if machine.vllm else "vLLM"
    lines = [f"model {config.trainer.model_name}, {vllm} on {'cuda' if machine.serves_on_gpu else 'cpu'}"]
    before, share = given.server.gpu_memory_utilization, config.server.gpu_memory_utilization
    if share != before:
        lines.append(f"server: {share:g} of each GPU's memory, not {before:g}, so that the trainer has room")
    return [*lines, _paragraph(config, machine, shape)]


def _paragraph(config: RunConfig, machine: Machine, shape: ModelShape | None) -> str:
    trainer, sequences, prompts = config.trainer, config.trainer.sequences_per_step, config.options.prompts_per_step
    adapter = f"a LoRA adapter of rank {trainer.lora_r}, alpha {trainer.lora_alpha:g}"
    what = adapter if trainer.trains_adapter else "all weights"
    batch = f"{prompts} prompts x {sequences // prompts} answers" if prompts else f"{sequences} answers"
    loss = f"loss {trainer.loss}" + (f" with KL {trainer.kl_beta:g}" if trainer.kl_beta else "")
    evaluated = f"evaluated every {trainer.eval_every} steps; " if trainer.eval_every else ""
    names = []
    for each in config.environments:
        rewards = [str(one.get("function", one)) if isinstance(one, dict) else str(one) for one in each.rewards]
        parts = [f"data {each.data['path']}"] if each.data.get("path") else []
        parts += [f"rewards {' and '.join(rewards)}"] if rewards else []
        parts += [f"answers of at most {each.env['max_tokens']} tokens"] if each.env.get("max_tokens") else []
        names.append(f"{each.name} ({', '.join(parts)})" if parts else each.name)
    text = (
        f"trains {what} ({trainer.weight_bridge_mode}): {trainer.training_steps} steps of {batch}, each at most "
        f"{trainer.seq_len} tokens with its prompt; learning rate {trainer.lr:g}, {loss}; "
        f"{evaluated}environment {', '.join(names)}"
    )
    if shape is None or not _has_plan(config, machine):
        return text
    plan = Setup.of(config, shape, machine).plan()
    rows = [row for row in plan.rows if row.device == plan.fullest]
    held = (
        f"{owner} {sum(row.nbytes for row in rows if row.owner == owner) / GB:.1f} GB"
        for owner in dict.fromkeys(row.owner for row in rows)
    )
    where = f"{plan.devices.total / GB:.1f} GB on {device_name(plan.devices, plan.fullest)}"
    return f"{text}; memory planned: {', '.join(held)} of {where}"
