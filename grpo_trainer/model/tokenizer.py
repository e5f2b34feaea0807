"""The only place that reads a tokenizer, and that writes one beside a model's weights."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_common.model_files import copy_tokenizer, make_readable
from grpo_trainer.errors import ModelError


class NoTokenizerError(ModelError):
    """The model has no readable tokenizer. `field` is the model's name, `got` the reason."""


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder or hub name.

    Raises:
        NoTokenizerError: the model has no readable tokenizer.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:  # as of a tokenizer.json of {}
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise NoTokenizerError("no tokenizer", field=name, got=reason) from None


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer: the files that it was read from, byte for byte, where they are on this machine.

    `save_pretrained` of transformers 5 writes files that versions before it do not read; what it writes is corrected.

    Raises:
        OSError: a file could not be written.
    """
    if not copy_tokenizer(tokenizer.name_or_path, folder):
        tokenizer.save_pretrained(folder)
    make_readable(folder)
