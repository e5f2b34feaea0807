"""The one place that reads a tokenizer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_trainer.errors import ModelError


class NoTokenizerError(ModelError):
    """There is none. `field` is the model's name, `got` the reason."""


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """That of a model's folder or hub name.

    Raises:
        NoTokenizerError: it has none that can be read.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NoTokenizerError("no tokenizer", field=name, got=reason) from None
