"""The model's tokenizer: loading it, and prompts as its tokens, from text or by its chat template."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from environments.config import ConfigError, PromptRefused
from environments.trajectory import Message
from grpo_common.models import CONFIG_FILE, config_parts, find_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Tools = Sequence[dict[str, Any] | Callable[..., Any]]
"""JSON schemas of functions, in the form that chat templates take, or the functions."""
THINK: Final = "<think>"
THOUGHT: Final = "</think>"
"""Before and after the thinking of a reasoning model."""
_THINKING: Final = re.compile(rf"{THINK}.*?(?:{THOUGHT}|\Z)", re.DOTALL)
THINK_TOKENS: Final = 8
"""As many tokens at the end of a prompt are enough to see whether it ends in `<think>` and a line end."""


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model folder or hub name, or raise ConfigError."""
    from transformers import AutoTokenizer  # imports torch if it is installed, which takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:  # as of a tokenizer.json of {}
        is_path = name.startswith((".", "/", "~"))
        said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        reason = "no such folder" if is_path and not Path(name).is_dir() else said
        raise ConfigError(
            field="--env.tokenizer_name", got=f"{name} ({reason})", wanted="a tokenizer", fix="name a model's folder"
        ) from None
    tokenizer.clean_up_tokenization_spaces = False  # else "5 ." is shown to a score as "5.", and not as it was sampled
    return tokenizer


def count_texts(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number from which token ids have no text. A model may know more ids, as its vocabulary is padded."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def known_tokens(name: str) -> int | None:
    """Return how many token ids the model of a tokenizer knows, by its config.json; None: it is not here."""
    sizes = [part.get("vocab_size") for part in config_parts(_model_file(name, CONFIG_FILE))]
    return next((size for size in sizes if isinstance(size, int)), None)


def _model_file(name: str, file: str) -> dict[str, Any] | None:
    """Return a JSON file of the model of a tokenizer; None: it is not here, or can't be read."""
    folder = find_folder(name)
    try:
        found = None if folder is None else json.loads((folder / file).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def stop_tokens(name: str, tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the tokens at which vLLM ends an answer: the tokenizer's EOS token, and those that the model's
    generation_config.json names, or its config.json if it has no such file."""
    config = _model_file(name, "generation_config.json")
    if config is None:
        parts = config_parts(_model_file(name, CONFIG_FILE))
        config = {key: value for part in reversed(parts) for key, value in part.items()}
    named = config.get("eos_token_id")
    found = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return {token for token in found if isinstance(token, int)}


def turn_end(tokenizer: "PreTrainedTokenizerBase", variables: Mapping[str, Any] | None = None) -> int | None:
    """Return the special token that the chat template writes after the policy's turn; None: it writes none."""
    marker = "x7f3q9"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}]
    try:
        _, found, after = render(tokenizer, messages, variables=variables, answered=False).rpartition(marker)
    except PromptRefused:  # there is no template, or it wants a user's message at the end
        return None
    ids = cast("list[int]", tokenizer.encode(after, add_special_tokens=False)) if found else []
    return next((token for token in ids if is_special(tokenizer, token)), None)


def with_system_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | Sequence[Message], system: str | None
) -> str | list[Message]:
    """Return a prompt whose system message, if it has one, is replaced by `system`; empty: removed; None: kept.

    Text becomes a user's message if there is a system prompt and the model has a chat template. Without a chat
    template the system prompt stands before the text.
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


def prompt_ids(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Sequence[Message],
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt: text, or messages by the chat template; raise as `render`.

    A prompt begins with one BOS token at most. It does not end with an EOS token that the tokenizer appended, because
    the answer continues the prompt.
    """
    if not isinstance(prompt, str):
        text = render(tokenizer, prompt, tools, variables)
        return cast("list[int]", tokenizer.encode(text, add_special_tokens=False))
    token_ids = cast("list[int]", tokenizer.encode(prompt))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and token_ids[:2] == [bos, bos]:
        _say_once("a prompt that already begins with %s does not get a second one", str(tokenizer.bos_token))
        token_ids = token_ids[1:]
    appended = not prompt.endswith(str(tokenizer.eos_token)) or token_ids[-2:] == [eos, eos]
    if eos is not None and token_ids[1:] and token_ids[-1] == eos and appended:
        _say_once("the tokenizer appends %s to text; prompts are sent without it", str(tokenizer.eos_token))
        token_ids = token_ids[:-1]
    return token_ids


@cache
def _say_once(message: str, token: str) -> None:
    log.warning(message, token)


@lru_cache(maxsize=16)
def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the characters of the longest token: a text has at least its length divided by this number of tokens."""
    return max(map(len, tokenizer.get_vocab()), default=1)


@lru_cache(maxsize=1024)  # asked for the last token of every answer
def is_special(tokenizer: "PreTrainedTokenizerBase", token: int) -> bool:
    """Return whether a token is a special one, such as the end of a turn: text that readers do not see."""
    return bool(tokenizer.decode([token])) and not tokenizer.decode([token], skip_special_tokens=True)


def opens_thinking(tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends in `<think>`, so that the answer begins in the middle of the policy's thinking."""
    return str(tokenizer.decode(list(prompt[-THINK_TOKENS:]))).rstrip().endswith(THINK)


def after_thinking(answer: str) -> str:
    """Return the parts of an answer that are not thinking.

    Thinking that has not ended reaches to the answer's end; thinking that the prompt opened begins at its beginning.
    """
    return _THINKING.sub("", answer).rpartition(THOUGHT)[2]


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    answered: bool = True,
) -> str:
    """Return messages as text by the chat template; raise PromptRefused if there is none, or it refuses them.

    The policy answers the messages: the text ends with the beginning of its turn, unless `answered` is False.
    Templates of some models refuse system messages (Gemma 2, Mistral 0.2). Their instruction then goes in front of the
    first user's message.
    """

    def rendered(messages: Sequence[Message]) -> str:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=answered,
            tokenize=False,
            return_dict=False,
            **(variables or {}),
        )
        return cast("str", text)

    if not tokenizer.chat_template:
        raise PromptRefused(
            field="--env.tokenizer_name",
            got="a tokenizer without chat_template",
            wanted="a chat template, which prompts of messages need",
            fix="choose an instruct model, or return text from prompt()",
        )
    try:
        return rendered(messages)
    except Exception as error:  # a template is a program of the model's author: any error may come out of it
        refusal = error
    if len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user":
        system, asked, *rest = messages
        try:
            return rendered([{**asked, "content": f"{system['content']}\n\n{asked['content']}"}, *rest])
        except Exception:  # the first error is reported
            pass
    roles = ", ".join(str(message.get("role")) for message in messages)
    raise PromptRefused(
        f"its chat template refuses the messages ({roles})",
        field="--env.tokenizer_name",
        got=f"{type(refusal).__name__}: {refusal}",
        wanted="messages in roles that the template knows",
        fix="change the prompt's messages or --env.chat_template_kwargs, or take another model",
    )
