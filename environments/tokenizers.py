"""Load the model's tokenizer."""

from pathlib import Path
from typing import Any

from environments.config import ConfigError


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model folder or hub name.

    Raises:
        ConfigError: There is none.
    """
    from transformers import AutoTokenizer  # imports torch if it is installed, which takes seconds

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        is_path = name.startswith((".", "/", "~"))
        reason = "no such folder" if is_path and not Path(name).is_dir() else str(error).splitlines()[0]
        raise ConfigError(
            field="--env.tokenizer_name", got=f"{name} ({reason})", wanted="a tokenizer", fix="name a model's folder"
        ) from None
