"""What was meant by a name that nothing knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType

from grpo_common.errors import Problem

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


def unknown_key(key: str, known: Collection[str], where: str = "") -> Problem:
    """Return the problem of an unknown key; it suggests the nearest known one.

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
    return Problem(f"{dashes}{where}{key.removeprefix('--')}", fix=hint, summary="unknown option")


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
