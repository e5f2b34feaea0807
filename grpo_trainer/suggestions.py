"""What was meant by a name that nothing knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from types import MappingProxyType

from grpo_trainer.errors import ConfigError

SAME = MappingProxyType(
    {
        **{"learning_rate": "lr", "model_path": "model_name", "max_steps": "training_steps", "steps": "training_steps"},
        **{"num_steps": "training_steps", "micro_batch_size": "batch_size", "max_length": "seq_len"},
        **{"max_seq_len": "seq_len", "beta": "kl_beta", "kl_coef": "kl_beta", "epsilon": "clip_eps"},
        **{"output_dir": "run_dir", "environment": "env", "port": "server.port", "warmup": "warmup_steps"},
    }
)
"""What others call options of ours."""
FEW = 15
"""A message lists at most this many names."""


def unknown_key(key: str, known: Collection[str], where: str = "") -> ConfigError:
    """Return the error for an unknown key; it suggests the nearest known one.

    Args:
        key: as it was written, a flag or a key; what is suggested is written alike.
    """
    dashes = "--" if key.startswith("--") else ""
    names = {name.removeprefix("--").replace("-", "_"): name for name in known}
    names |= {other: names[ours] for other, ours in SAME.items() if ours in names and other not in names}
    nearest = difflib.get_close_matches(key.removeprefix("--").replace("-", "_"), names, n=1, cutoff=0.6)
    if nearest:
        name = names[nearest[0]].removeprefix("--")
        hint = f"did you mean {dashes}{where}{name.replace('_', '-') if dashes else name}?"
    else:
        hint = f"known: {', '.join(sorted(set(known)))}" if len(set(known)) <= FEW else "--help lists them"
    return ConfigError("unknown option", field=f"{dashes}{where}{key.removeprefix('--')}", fix=hint)


def no_flag(word: str) -> ConfigError:
    """Return the error for a word that belongs to no flag."""
    return ConfigError(field=word, got="a word without a flag", wanted="--NAME VALUE", fix="--help lists the flags")
