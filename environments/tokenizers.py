"""The model's tokenizer: loading it, and rendering prompts by its chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.config import ConfigError, PromptRefused
from environments.trajectory import Message
from grpo_common.models import CONFIG_FILE, find_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def known_tokens(name: str) -> int | None:
    """Return how many token ids the model of a tokenizer knows, by its config.json; None: it is not here."""
    folder = find_folder(name)
    try:
        config = {} if folder is None else json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def with_system_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | Sequence[Message], system: str | None
) -> str | list[Message]:
    """Return a prompt with a system prompt in place of its own.

    Text becomes a user's message if there is a system prompt and the model has a chat template. Without a chat
    template the system prompt stands before the text.

    Args:
        system: the system prompt; empty: none; None: the prompt stays as it is.
    """
    if isinstance(prompt, str):
        if not system:
            return prompt
        if not tokenizer.chat_template:
            return f"{system}\n\n{prompt}"
        prompt = [{"role": "user", "content": prompt}]
    messages = list(prompt)
    if system is None:
        return messages
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system}, *rest] if system else rest


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    tokenize: bool = True,
) -> Any:
    """Return messages as token ids, or as text, by the chat template, up to the beginning of the answer.

    Templates of some models refuse system messages (Gemma 2, Mistral 0.2). Their instruction then goes in front of the
    first user's message.

    Args:
        variables: further variables of the template.

    Raises:
        PromptRefused: the model has no chat template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    def rendered(messages: Sequence[Message]) -> Any:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
            **(variables or {}),
        )

    if not tokenizer.chat_template:
        raise PromptRefused(
            field="--env.tokenizer_name",
            got="a tokenizer without chat_template",
            wanted="a chat template, which prompts of messages need",
            fix="choose an instruct model, or return text from prompt()",
        )
    try:
        return rendered(messages)
    except (TemplateError, TypeError) as error:
        refusal = error
    if len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user":
        system, asked, *rest = messages
        try:
            return rendered([{**asked, "content": f"{system['content']}\n\n{asked['content']}"}, *rest])
        except (TemplateError, TypeError):
            pass
    roles = ", ".join(str(message.get("role")) for message in messages)
    raise PromptRefused(
        f"its chat template refuses the messages ({roles})",
        field="--env.tokenizer_name",
        got=f"{type(refusal).__name__}: {refusal}",
        wanted="messages in roles that the template knows",
        fix="change the prompt's messages or --env.chat_template_kwargs, or take another model",
    )
