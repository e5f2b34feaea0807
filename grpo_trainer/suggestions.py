"""What was meant by a name that nothing knows, and names that other programs have for options of ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType

from grpo_common.errors import Problem
from grpo_common.sampling import CUTS, WHOLE_VOCABULARY
from grpo_common.suggest import nearest

SAME = MappingProxyType(
    {
        **{"model_path": "model_name", "max_steps": "training_steps", "steps": "training_steps"},
        **{"num_steps": "training_steps", "micro_batch_size": "batch_size", "max_length": "seq_len"},
        **{"per_device_train_batch_size": "batch_size", "max_seq_len": "seq_len"},
        **{"kl_coef": "kl_beta", "num_iterations": "updates_per_batch"},
        **{"epsilon": "clip_eps", "epsilon_high": "clip_eps_high", "loss_type": "loss", "output_dir": "run_dir"},
        **{"environment": "env", "warmup": "warmup_steps", "lr_scheduler_type": "lr_schedule", "optim": "optimizer"},
        **{"save_steps": "checkpoint_interval", "save_total_limit": "keep_checkpoints", "report_to": "log_to"},
        **{"resume_from_checkpoint": "resume", "log_completions": "log_samples", "torch_dtype": "dtype"},
    }
)
"""What others call options of ours: suggested."""
OF_ENVIRONMENT = MappingProxyType(
    {
        **{"group_size": "group_size", "num_generations": "group_size", "temperature": "temperature"},
        **{"max_completion_length": "max_tokens", "max_new_tokens": "max_tokens", "max_tokens": "max_tokens"},
        **{"mask_truncated_completions": "mask_truncated", "chat_template_kwargs": "chat_template_kwargs"},
        **{"system_prompt": "system_prompt"},
    }
)
"""What others, and ourselves, call options that every environment has. `grpo run` accepts these names."""
OF_RUN = MappingProxyType({"dataset": "data", "dataset_name": "data", "reward_funcs": "reward"})
"""What others call flags of `grpo run` that are not options of a table. It accepts these names."""
GONE = MappingProxyType(
    {
        "activation_offload": "use --gradient-checkpointing, which keeps the inputs of layers on the GPU",
        "benchmark": "leave it out: `grpo report` shows where the time went",
        "checkpoint_url": "copy RUN_DIR/checkpoints by a program such as rclone",
        "vllm_standby": "leave it out: vLLM is imported at each restart",
    }
)
"""Options of earlier versions, and what to do instead."""
FEW = 15
"""A message lists at most this many names."""


def unknown_key(key: str, known: Collection[str]) -> Problem:
    """Return the problem of an unknown flag or key; it suggests a near one, if there is any, that is written alike."""
    dashes, plain = "--" if key.startswith("--") else "", key.removeprefix("--").replace("-", "_")
    if (instead := GONE.get(plain.removeprefix("no_"))) is not None:
        return Problem(key, fix=instead, summary="this option has been removed")
    fix = WHOLE_VOCABULARY if plain.rpartition(".")[2] in CUTS else ""
    names = [name.removeprefix("--").replace("-", "_") for name in known]
    near = [name for name in names if name.rpartition(".")[2] == plain]  # the same in a table
    if not near and not fix:
        same = {other: ours for other, ours in SAME.items() if ours in names and other not in names}
        found = nearest(plain, [*names, *same, *({} if "." in plain else OF_ENVIRONMENT)])
        if found is not None and (found in names or found in same):
            near = [same.get(found, found)]
        elif found is not None:
            own = OF_ENVIRONMENT[found]
            fix = f"it is an option of the environment: --env.{own}, in TOML env = {{ {own} = … }} of [[environments]]"
    if near:
        fix = f"did you mean {' or '.join(dashes + (name.replace('_', '-') if dashes else name) for name in near)}?"
    few = f"known: {', '.join(sorted({*known}))}" if len({*known}) <= FEW else "--help lists them"
    return Problem(key, fix=fix or few, summary="unknown option")


def unknown_word(word: str, known: Collection[str]) -> Problem:
    """Return the problem of a word of the command line that is no flag of the command, nor belongs to one."""
    if word.startswith("--"):
        return unknown_key(word, known)
    return Problem(word, "a word without a flag", "--NAME VALUE", "--help lists the flags")


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag with its value, if it has one, and each word that belongs to no flag by itself."""
    rest = list(words)
    while rest:
        word, equals, joined = rest.pop(0).partition("=")
        takes_next = word.startswith("--") and not equals and rest and not rest[0].startswith("--")
        yield word, joined if equals else rest.pop(0) if takes_next else None
