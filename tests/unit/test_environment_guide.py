"""The environments that README.md and pages of docs show are run as they stand there."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.arithmetic import ArithmeticConfig
from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ServerConfig
from environments.conversation import Conversation
from environments.demo_model.model import build_tokenizer
from environments.from_verifiers.config import VerifiersConfig
from environments.gsm8k import Gsm8kConfig
from environments.multi_turn import MultiTurnConfig
from environments.peers.http import PeerError
from environments.peers.inference import Completion
from environments.running import cli
from environments.scoring import settled
from tests.stand_ins import Scripted

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/environments.md", "docs/migration.md")
GUIDE = "\n".join((ROOT / name).read_text() for name in PAGES)


def shown(name: str) -> type[BaseEnv[Any]]:
    """The class of that name, of the code block that has it and imports what it needs."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    (code,) = [block for block in blocks if f"class {name}(" in block and "import" in block]
    namespace: dict[str, Any] = {"__name__": "guide"}
    exec(code, namespace)
    return namespace[name]


@pytest.fixture
def tens() -> type[BaseEnv[Any]]:
    return shown("Tens")


def build(env_cls: type[BaseEnv[Any]], says: Sequence[str] = ("40", "46"), **changes: Any) -> BaseEnv[Any]:
    """The environment before a server that says this, in turns."""
    tokenizer = build_tokenizer()
    server = Scripted(tokenizer, lambda _: [f"{text}<|endoftext|>" for text in says])
    return env_cls(BaseEnvConfig(**({"tokenizer_name": "demo", "group_size": 2} | changes)), server, tokenizer)


def test_the_guides_environment_scores_and_evaluates(
    tens: type[BaseEnv[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    env = build(tens)

    async def scene() -> tuple[Any, Any]:
        await settled(env.setup())
        groups = [await env.collect_trajectories(item) for item in ((12, 34), (10, 49))]
        assert len(env.prompt(await settled(env.get_next_item()))) == len("12+34=")
        await cli.evaluate(env)
        return groups[0], groups[1]

    forties, fifties = asyncio.run(scene())
    assert (forties.scores, fifties.scores) == ([1.0, 0.0], [0.0, 0.0])
    assert forties.messages[0] == [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "40"}]
    assert json.loads(capsys.readouterr().out) == {"env": "tens", "accuracy": 0.5}


@pytest.mark.parametrize(
    ("said", "finish_reason", "text"),
    [
        ("46<|endoftext|>", "stop", "46"),
        ("46<end_of_turn>", "stop", "46"),
        ("46<end_of_turn>", "length", "46<end_of_turn>"),
        ("4<end_of_turn>6<|endoftext|>", "stop", "4<end_of_turn>6"),
        ("46\n", "stop", "46\n"),
    ],
)
def test_the_token_that_ends_an_answer_is_not_scored(
    tens: type[BaseEnv[Any]], said: str, finish_reason: str, text: str
) -> None:
    """As in Gemma and Phi-3, the end of a turn is another token than the tokenizer's `eos_token`."""
    env = build(tens)
    env.tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    ids = env.tokenizer.encode(said)
    assert env.decode(Completion([1], ids, [-0.5] * len(ids), "", finish_reason, 1)) == text


def test_messages_go_through_the_chat_template_and_may_be_left_out(tens: type[BaseEnv[Any]]) -> None:
    env = build(tens, include_messages=False)
    chat = [{"role": "system", "content": "Say "}, {"role": "user", "content": "Paris"}]
    assert env.encode(chat) == env.encode("Say Paris")  # the demo model's template only joins
    group = asyncio.run(env.collect_trajectories((12, 34)))
    assert group is not None and group.messages is None


def test_process_stops_where_the_items_do(tens: type[BaseEnv[Any]], tmp_path: Path) -> None:
    env = build(tens, data_path_to_save_groups=tmp_path / "groups.jsonl", max_concurrent_groups=2)
    items = iter([(12, 34)] * 3)

    async def next_or_none() -> Any:
        return next(items, None)

    async def no_setup() -> None:
        return

    env.get_next_item, env.setup = next_or_none, no_setup  # type: ignore[method-assign]
    with pytest.raises(PeerError) as error:
        asyncio.run(cli.process(env, 4))
    assert (error.value.field, error.value.got, error.value.wanted) == ("tens", "3 groups", "4 groups")
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == 3


def test_the_guides_port_of_an_environment_of_atropos_works() -> None:
    env = build(shown("PortedCapitals"), says=("Paris", "Rome"))

    async def scene() -> Any:
        await settled(env.setup())
        return await env.collect_trajectories({"country": "France", "capital": "Paris"})

    assert asyncio.run(scene()).scores == [1.0, 0.0]  # it says Paris, then Rome
    assert env.sampling(room=100).max_tokens == 32


@pytest.mark.parametrize(("said", "heard"), [("20", "Higher."), ("90", "Lower."), ("50", None), ("what?", None)])
def test_the_guides_conversation_says_higher_or_lower(said: str, heard: str | None) -> None:
    env = build(shown("Guess"))
    talk = Conversation(build_tokenizer(), [{"role": "user", "content": "Guess"}])
    talk.say(Completion(talk.tokens, [1], [-1.0], said, "stop", 1), said)
    answer = asyncio.run(env.respond(50, talk))  # type: ignore[attr-defined]
    assert (answer and answer[0]["content"]) == heard
    assert talk.trajectory(1.0).score == (0.9 if heard else 1.0)


CALL = '<tool_call>{"name": "days_between", "arguments": {"start": "2024-02-28", "end": "2024-03-01"}}</tool_call>'


@pytest.mark.parametrize(("answer", "score"), [("It is 2", 1.0), ("It is 1", 0.0)])  # 2024 has a 29 February
def test_the_guides_tool_answers_the_policy(answer: str, score: float) -> None:
    tokenizer, prompts = build_tokenizer(), []
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}assistant: "
    )

    def say(prompt: list[int]) -> list[str]:
        prompts.append(str(tokenizer.decode(prompt)))
        return [f"{[CALL, answer][len(prompts) - 1]}<|endoftext|>"]

    config = MultiTurnConfig(tokenizer_name="demo", group_size=1)
    env = shown("Days")(config, Scripted(tokenizer, say), tokenizer)
    group = asyncio.run(env.collect_trajectories(("2024-02-28", "2024-03-01")))
    assert prompts[0].count("YYYY-MM-DD") == 2  # each argument's line of the docstring
    assert prompts[1].endswith("tool: 2<|endoftext|>assistant: ")
    assert group is not None and group.scores == [score]


def test_the_guide_names_every_option() -> None:
    configs = (BaseEnvConfig, ArithmeticConfig, Gsm8kConfig, MultiTurnConfig, VerifiersConfig, ServerConfig)
    names = [name for config_cls in configs for name in config_cls.model_fields]
    assert "env_id" in names
    missing = [name for name in names if f"`{name}`" not in GUIDE and f"env.{name}`" not in GUIDE]
    assert not missing
