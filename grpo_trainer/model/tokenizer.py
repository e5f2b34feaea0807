"""The only place that reads a tokenizer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NoTokenizerError("no tokenizer", field=name, got=reason) from None
