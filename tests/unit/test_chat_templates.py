"""Prompts and conversations by chat templates: the policy's tokens as sampled, the rest as the template writes it.

The templates are short ones of the same shape as those of the models that they are named after.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from environments import tokenizers
from environments.config import PromptRefused
from environments.conversation import Conversation
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.inference import Completion
from environments.tokenizers import after_thinking, opens_thinking, prompt_ids, render, turn_end
from environments.trajectory import Message
from tests.stand_ins import scripted

ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 7}, 7),
        ({"text_config": {"vocab_size": 8}}, 8),
        ({"vocab_size": "7", "text_config": ["x"]}, None),
        ([1], None),
    ],
)
def test_known_tokens_of_any_config(tmp_path: Path, config: object, size: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokenizers.known_tokens(str(tmp_path)) == size


@dataclass(frozen=True)
class Family:
    """A model's chat template, and the tokens that it uses."""

    template: str
    end: str  # of a turn
    other: str  # another token at which sampling stops
    marks: Sequence[str] = ()
    bos: str = "none"  # BOS tokens that the template writes before the user's turns

    def beginnings(self, turns: int) -> int:
        return {"none": 0, "one": 1, "each": turns}[self.bos]


FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
        "<|endoftext|>",
        ["<|im_start|>"],
    ),
    "llama2": Family(
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
        "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
        "<other>",
        bos="each",
    ),
    "llama3": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
        "<|eom_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
        "one",
    ),
    "gemma2": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + ALTERNATE
        + "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
        "<eos>",
        ["<start_of_turn>"],
        "one",
    ),
    "phi3": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        "<|end|>",
        "<|endoftext|>",
        ["<|user|>", "<|assistant|>"],
    ),
    "a line before the end": Family(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "<|end|>",
        "<|endoftext|>",
    ),
}
SYMBOLS = [*sorted(set(" \n.,:;!?<>/|[]_()+-=*'\"")), *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *"INST"]


@cache
def build(name: str, *, words: bool = False, appends_eos: bool = False) -> Any:
    """Return a tokenizer with one token a character, that puts BOS before text.

    With `words` each text begins with a space, as with SentencePiece.
    """
    family = FAMILIES[name]
    eos = family.end if name == "llama2" else family.other
    marks = list(dict.fromkeys(["<s>", eos, family.end, family.other, *family.marks]))
    symbols = sorted({each.replace(" ", "\u2581") if words else each for each in SYMBOLS})
    made = Tokenizer(
        models.BPE(vocab={each: i for i, each in enumerate(["<unk>", *symbols])}, merges=[], unk_token="<unk>")
    )
    if words:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in marks])
    made.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {eos}" if appends_eos else "<s> $A",
        special_tokens=[(each, made.token_to_id(each)) for each in ("<s>", eos)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token=eos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def say(talk: Conversation, tokenizer: Any, text: str, end: str, ids: list[int] | None = None) -> list[int]:
    """Let the policy say a text and its end token, or no end token: then the turn was cut off."""
    sampled: list[int] = ids or tokenizer.encode(text + end, add_special_tokens=False)
    talk.say(Completion(talk.tokens, sampled, [-0.5] * len(sampled), text, "stop" if end else "length", 1), text)
    return sampled


TEXT = st.text(st.sampled_from("abz 12.\n<>/"), max_size=12).map(lambda text: f"x{text}x")
"""No template strips it."""
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@given(turns=TURNS)
def test_conversation_ids_are_the_rendered_ones(name: str, words: bool, turns: list[tuple[str, str]]) -> None:
    family, tokenizer = FAMILIES[name], build(name, words=words)
    talk = Conversation(tokenizer, [user("x")])
    for answer, reply in turns:
        # The policy writes its turn exactly as the template does, up to the end token.
        prompt = render(tokenizer, talk.messages)
        whole = render(tokenizer, [*talk.messages, {"role": "assistant", "content": answer}], answered=False)
        assert whole.startswith(prompt)
        turn = prompt + whole[len(prompt) :].partition(family.end)[0] + family.end
        ids = tokenizer.encode(turn, add_special_tokens=False)[len(prompt_ids(tokenizer, talk.messages)) :]
        say(talk, tokenizer, answer, family.end, ids)
        assert talk.hear([user(reply)])
    rendered = render(tokenizer, talk.messages)
    assert talk.tokens == tokenizer.encode(rendered, add_special_tokens=False)
    if not words:
        assert tokenizer.decode(talk.tokens) == rendered
    assert talk.tokens.count(tokenizer.bos_token_id) == family.beginnings(len(turns) + 1)


@pytest.mark.parametrize("name", FAMILIES)
@given(turns=st.lists(st.tuples(TEXT, st.sampled_from(["end", "other", ""])), min_size=1, max_size=3))
def test_a_turn_has_one_end_token_and_the_tokens_that_were_sampled(name: str, turns: list[tuple[str, str]]) -> None:
    family, tokenizer = FAMILIES[name], build(name)
    ends = [tokenizer.convert_tokens_to_ids(each) for each in (family.end, family.other)]
    talk, sampled = Conversation(tokenizer, [user("x")]), []
    for text, end in turns:
        before = len(talk.tokens)
        sampled += say(talk, tokenizer, text, getattr(family, end) if end else "")
        after = len(talk.tokens)
        assert talk.hear([user("y")])
        # The turn's own one, and in some templates one after the user's message.
        of_the_user = sum(token in ends for token in prompt_ids(tokenizer, [user("y")]))
        assert sum(token in ends for token in talk.tokens[before:]) == 1 + of_the_user
        first = next(token for token in talk.tokens[before:] if token in ends)
        assert first == ends[0] or end == "other"
        heard = tokenizer.decode(talk.tokens[after:])
        assert heard.count("y") == 1 and text not in heard
    assert [token for token, trained in zip(talk.tokens, talk.trained, strict=True) if trained] == sampled


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}", ALTERNATE])
def test_turn_end_of_a_template_without_one(template: str | None) -> None:
    tokenizer = build.__wrapped__("chatml")
    tokenizer.chat_template = template
    assert turn_end(tokenizer) is None


def test_a_template_without_end_tokens_keeps_the_sampled_one_and_its_own_beginnings() -> None:
    """As GLM-4's: <|user|> begins the user's turn, and sampling stops at it."""
    tokenizer = build.__wrapped__("phi3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for end, text in (
        ("<|user|>", "<|user|>a<|assistant|>b<|user|>c<|assistant|>"),
        ("<|end|>", "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>"),
        ("", "<|user|>a<|assistant|>b<|user|>c<|assistant|>"),
    ):
        talk = Conversation(tokenizer, [user("a")])
        say(talk, tokenizer, "b", end)
        talk.hear([user("c")])
        assert tokenizer.decode(talk.tokens) == text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("appends_eos", [False, True])
def test_prompt_of_text_has_one_bos_and_no_eos(name: str, appends_eos: bool, caplog: pytest.LogCaptureFixture) -> None:
    tokenizers._say_once.cache_clear()
    tokenizer = build(name, appends_eos=appends_eos)
    ids = prompt_ids(tokenizer, "ab")
    assert tokenizer.decode(ids) == "<s>ab"
    rendered = render(tokenizer, [user("x")])
    begins = "" if rendered.startswith("<s>") else "<s>"
    for _ in range(2):
        assert tokenizer.decode(prompt_ids(tokenizer, rendered)) == begins + rendered
    assert prompt_ids(tokenizer, [user("x")]) == tokenizer.encode(rendered, add_special_tokens=False)
    assert len(caplog.records) == appends_eos + (not begins), "each is said once"
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    ended = f"ab{tokenizer.eos_token}"
    assert tokenizer.decode(prompt_ids(tokenizer, ended)) == f"<s>{ended}", "the prompt itself has this end token"


class Asks(MultiTurnEnv[str]):
    """Its opening has an instruction."""

    def opening(self, item: str) -> list[Message]:
        return [{"role": "system", "content": "be short"}, user(item)]

    async def score_conversation(self, item: str, talk: Conversation) -> float:
        return 0.0


def test_an_instruction_goes_before_the_users_message_where_the_system_role_is_refused() -> None:
    tokenizer = build("gemma2")
    talk = scripted(Asks, config=MultiTurnConfig, tokenizer=tokenizer).begin("how many?")
    assert tokenizer.decode(talk.tokens) == render(tokenizer, [user("be short\n\nhow many?")])
    say(talk, tokenizer, "two", FAMILIES["gemma2"].end)
    assert talk.hear([user("sure?")])
    said = {"role": "assistant", "content": "two"}
    assert tokenizer.decode(talk.tokens) == render(tokenizer, [user("be short\n\nhow many?"), said, user("sure?")])


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{{ 1 / 0 }}", "zero"),
        ("{{ messages[0].content.index('q') }}", "substring"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% if %}", "Expected"),
        ("{{ 1 + 'a' }}", "unsupported"),
        (None, "without"),
    ],
)
def test_every_error_of_a_template_is_an_error_of_the_prompt(template: str | None, got: str) -> None:
    tokenizer = build.__wrapped__("chatml")
    tokenizer.chat_template = template
    with pytest.raises(PromptRefused) as error:
        prompt_ids(tokenizer, [user("x")])
    assert error.value.field == "--env.tokenizer_name" and got in error.value.got and error.value.fix


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("18", "18"),
        ("<think>17</think>18", "18"),
        ("17</think>18", "18"),
        ("<think>17</think>18<think>19", "18"),
        ("<think>17", ""),
        ("<think>17<think>18</think>19", "19"),
        ("18. <think>17</think>", "18. "),
        ("1<think>2</think>3<think>4</think>5", "135"),
        ("18 <think>17", "18 "),
        ("16</think>17<think>18</think>19</think>20", "20"),
    ],
)
def test_thinking_is_not_part_of_the_answer(text: str, answer: str) -> None:
    assert after_thinking(text) == answer


def test_thinking_that_the_template_opened_is_part_of_the_turn() -> None:
    tokenizer = build.__wrapped__("chatml")
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    talk = Conversation(tokenizer, [user("x")])
    assert opens_thinking(tokenizer, talk.tokens)
    say(talk, tokenizer, "17", "<|im_end|>")
    assert talk.messages[-1]["content"] == "<think>17"
    env = scripted(Asks, config=MultiTurnConfig, tokenizer=tokenizer)
    for text, answer in (("17", ""), ("17</think>18", "18")):
        completion = Completion(prompt_ids(tokenizer, [user("x")]), tokenizer.encode(text), [], text, "length", 1)
        assert env.answer_of(completion).removeprefix("<s>") == answer


# thinking and tools of Qwen 3 and Qwen 3.5 --------------------------------------------------------------------

TURNS_OF_QWEN = (
    "{%% if tools %%}<|im_start|>system\n%s{{ tools | tojson }}<|im_end|>\n{%% endif %%}"
    "{%% for m in messages %%}{%% if m.role == 'tool' %%}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{%% elif m.role == 'assistant' and loop.last %%}<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n{%% else %%}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n"
    "{%% if enable_thinking is defined and enable_thinking is false %%}<think>\n\n</think>\n\n%s{%% endif %%}"
    "{%% endif %%}"
)
QWEN3 = TURNS_OF_QWEN % ('<tool_call>{"name": … }</tool_call>', "")
QWEN3_5 = TURNS_OF_QWEN % ("<tool_call>\n<function=name>…", "{% else %}<think>\n")
CALLS = {
    QWEN3: '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>',
    QWEN3_5: "<tool_call>\n<function=double>\n<parameter=number>\n21\n</parameter>\n</function>\n</tool_call>",
}


class Doubles(Asks):
    """It has a tool."""

    def opening(self, item: str) -> list[Message]:
        return [user(item)]

    def tools(self) -> Sequence[Any]:
        def double(number: int) -> int:
            """Double a number.

            Args:
                number: The number.
            """
            return 2 * number

        return [double]


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5])
@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_and_tools_of_qwen(template: str, thinks: bool) -> None:
    tokenizer = build.__wrapped__("chatml")
    tokenizer.chat_template = template
    variables = {} if thinks else {"enable_thinking": False}
    env = scripted(Doubles, config=MultiTurnConfig, tokenizer=tokenizer, chat_template_kwargs=variables)
    talk = env.begin("x")
    opened = {(QWEN3, True): "", (QWEN3_5, True): "<think>\n"}.get((template, thinks), "<think>\n\n</think>\n\n")
    assert tokenizer.decode(talk.tokens).endswith(f"<|im_start|>assistant\n{opened}")
    assert opens_thinking(tokenizer, talk.tokens) == (opened == "<think>\n")
    thought = "" if not thinks else ("hm</think>" if opened else "<think>hm</think>")
    before = len(talk.tokens)
    say(talk, tokenizer, thought + CALLS[template], "<|im_end|>")
    (result,) = asyncio.run(env.call_tools(thought + CALLS[template]))
    assert (result["role"], result["content"]) == ("tool", "42")
    assert talk.hear([result])
    told = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    turn = f"{thought}{CALLS[template]}<|im_end|>\n{told}<|im_start|>assistant\n{opened}"
    assert talk.tokens[before:] == tokenizer.encode(turn, add_special_tokens=False)
    assert turn_end(tokenizer, variables) == tokenizer.convert_tokens_to_ids("<|im_end|>")
