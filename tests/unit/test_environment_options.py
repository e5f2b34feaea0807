"""Options of every environment: the command line, sampling, system prompt, chat template, truncated answers, scores."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from environments.api import wire
from environments.api.groups import read
from environments.arithmetic import ArithmeticConfig
from environments.base import BaseEnv
from environments.config import (
    BaseEnvConfig,
    ConfigError,
    PromptRefused,
    Settings,
    parse_settings,
)
from environments.conversation import Conversation
from environments.demo_model.model import build_tokenizer
from environments.from_verifiers.config import VerifiersConfig
from environments.peers.inference import Completion, Sampling
from environments.running.groups import unfit
from environments.running.settings_check import check, check_server, group_size
from environments.tokenizers import load_tokenizer, render
from environments.trajectory import Message, Trajectory, scored_group
from grpo_trainer.rollouts.groups import to_group
from tests.stand_ins import scripted
from tests.unit.factories import refusing

TOKENIZER = ["--env.tokenizer_name", "model"]


def parse(*arguments: str) -> Settings[Any]:
    return parse_settings(Settings[ArithmeticConfig], "prog", arguments)


def test_options_of_the_predecessor() -> None:
    settings = parse(
        *TOKENIZER,
        *("--env.group_size", "16", "--env.rollout_server_url", "http://127.0.0.1:8123/", "--env.operation", "-"),
        *("--env.use_wandb", "False", "--openai.base_url", "http://127.0.0.1:9123/v1", "--openai.model_name", "X"),
        *("--openai.server_type", "vllm", "--openai.api_key", "x", "--slurm", "False", "--env.max_num_workers", "3"),
    )
    env, server = settings.env, settings.openai
    assert isinstance(env, ArithmeticConfig) and (env.operation, env.max_concurrent_groups) == ("-", 3)
    assert (env.group_size, env.rollout_server_url, env.use_wandb) == (16, "http://127.0.0.1:8123", False)
    assert (server.base_url, server.model_name, server.api_key) == ("http://127.0.0.1:9123/v1", "X", "x")
    assert not settings.slurm
    assert parse(*TOKENIZER, "--env.max_num_workers", "-1").env.max_concurrent_groups is None  # as in Atropos


def test_options_precedence(tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text('[env]\ntokenizer_name = "from-file"\ngroup_size = 4\nhigh = 19\n[openai]\nmodel_name = "M"\n')
    settings = parse("--config", str(file), "--env.group_size=32")
    assert isinstance(settings.env, ArithmeticConfig)
    assert (settings.env.tokenizer_name, settings.env.group_size, settings.env.high) == ("from-file", 32, 19)
    assert (settings.env.low, settings.openai.model_name, settings.openai.timeout) == (10, "M", 1200.0)
    file.write_text("[env]\nmax_num_workers = 3\n")
    assert own("--config", str(file), "--env.max_concurrent_groups", "5").max_concurrent_groups == 5
    assert own("--config", str(file), "--env.max_num_workers", "6").max_concurrent_groups == 6


MISTAKES: list[tuple[list[str], str, str, dict[str, str]]] = [
    (["--env.group_siz", "4"], "", "--env.group_siz", {"fix": "--env.group_size"}),
    (["--group_size=4"], "", "--group_size", {"fix": "--env.group_size"}),
    (["--env.group_size", "0"], "", "--env.group_size", {"got": "'0'", "wanted": "1"}),
    (["--env.max_num_workers", "0"], "", "--env.max_concurrent_groups", {"got": "'0'"}),
    (["--openai.server_type", "tgi"], "", "--openai.server_type", {"got": "'tgi'", "wanted": "'vllm'"}),
    (["--openai.base_url", "localhost:1"], "", "--openai.base_url", {"got": "'localhost:1'", "wanted": "http://"}),
    (["--slurm", "True"], "", "--slurm", {"got": "'True'", "wanted": "False"}),
    (["--config", "/no/such.toml"], "", "--config /no/such.toml", {"got": os.strerror(errno.ENOENT)}),
    ([], "[env]\ngroup_siz = 4\n", "env.group_siz", {"fix": "env.group_size"}),
    ([], "[enf]\ngroup_size = 4\n", "enf", {"fix": "env"}),
    ([], '[env]\ngroup_size = "many"\n', "--env.group_size", {"got": "'many'", "wanted": "integer"}),
    ([], "[env\n", "--config FILE", {"summary": "line 1, column 5"}),
]


@pytest.mark.parametrize(("arguments", "text", "field", "parts"), MISTAKES)
def test_settings_mistake_is_named(
    tmp_path: Path, arguments: list[str], text: str, field: str, parts: dict[str, str]
) -> None:
    if text:
        (file := tmp_path / "env.toml").write_text(text)
        arguments = ["--config", str(file)]
    with pytest.raises(ConfigError) as caught:
        parse(*TOKENIZER, *arguments)
    assert caught.value.field == field.replace("FILE", str(tmp_path / "env.toml"))
    assert all(part in getattr(caught.value, name) for name, part in parts.items())


SHOWS_ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if quiet %}!{% endif %}"
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + SHOWS_ROLES
"""As the templates of Gemma 2 and Mistral 0.2 do."""


class Echo(BaseEnv[Any]):
    """Its items are prompts."""

    def prompt(self, item: Any) -> str | list[Message]:
        return item

    def score(self, item: Any, answer: str) -> float:
        return float(len(answer))


def build(template: str | None = SHOWS_ROLES, **settings: Any) -> Echo:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return scripted(Echo, tokenizer=tokenizer, **settings)


def asked(env: Echo, prompt: Any) -> str:
    return str(env.tokenizer.decode(env.tokenize(prompt)))


@pytest.mark.parametrize(
    ("config", "generation", "options", "stops"),
    [
        ({"eos_token_id": 2}, None, {}, (3,)),
        ({"eos_token_id": 3}, None, {}, ()),
        ({"text_config": {"eos_token_id": 3}}, None, {}, ()),
        ({"eos_token_id": 3}, {"eos_token_id": 2}, {}, (3,)),  # vLLM reads config.json only without the other file
        ({}, {"eos_token_id": [2, 3]}, {}, ()),
        ({"eos_token_id": 2}, None, {"stop_at_turn_end": False}, ()),
    ],
)
def test_stop_at_turn_end(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    options: dict[str, Any],
    stops: tuple[int, ...],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    vocabulary = {"<unk>": 0, "a": 1, "<eos>": 2, "<turn>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        eos_token="<eos>",
        additional_special_tokens=["<turn>"],
        chat_template="{% for m in messages %}{{ m.content }}<turn>{% endfor %}",
    )
    env = scripted(Echo, tokenizer=tokenizer, tokenizer_name=str(tmp_path), **options)
    assert env.sampling(9).stop_token_ids == stops
    assert "more_stops" not in asyncio.run(env.rehearse("a", lambda _: None))
    env.sampling = Sampling  # type: ignore[method-assign, assignment]  # an environment's own, without more_stops
    assert ("more_stops" in asyncio.run(env.rehearse("a", lambda _: None))) == bool(stops)


CHAT = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "system", "prompt", "text"),
    [
        (SHOWS_ROLES, None, "hi", "hi"),
        (SHOWS_ROLES, "", "hi", "hi"),
        (SHOWS_ROLES, "Be brief.", "hi", "<system>Be brief.<user>hi"),
        (None, "Be brief.", "hi", "Be brief.\n\nhi"),
        (SHOWS_ROLES, None, CHAT, "<system>own<user>hi"),
        (SHOWS_ROLES, "Be brief.", CHAT, "<system>Be brief.<user>hi"),
        (SHOWS_ROLES, "", CHAT, "<user>hi"),
        (REFUSES_SYSTEM, None, CHAT, "<user>own\n\nhi"),
        (REFUSES_SYSTEM, "Be brief.", "hi", "<user>Be brief.\n\nhi"),
    ],
)
def test_system_prompt(template: str | None, system: str | None, prompt: Any, text: str) -> None:
    assert asked(build(template, system_prompt=system), prompt) == text


def test_template_variables() -> None:
    assert asked(build(chat_template_kwargs={"quiet": True}), CHAT).endswith("!")
    tokenizer = build().tokenizer
    talk = Conversation(tokenizer, CHAT, variables={"quiet": True})
    assert str(tokenizer.decode(talk.tokens)).endswith("!")

    with pytest.raises(PromptRefused) as error:
        render(build().tokenizer, CHAT, variables={"tokenize": True})
    assert "tokenize" in error.value.got

    settings = parse(*TOKENIZER, "--env.chat_template_kwargs", '{"enable_thinking": false}')
    assert settings.env.chat_template_kwargs == {"enable_thinking": False}
    for text in ("{enable", "[1]", "7"):
        with refusing(ConfigError, "--env.chat_template_kwargs"):
            parse(*TOKENIZER, "--env.chat_template_kwargs", text)


class Place(BaseModel):
    """A setting with settings."""

    name: str


class OwnConfig(BaseEnvConfig):
    """An environment's own settings."""

    places: tuple[int, ...] = ()
    limit: int | None = 3
    names: Sequence[str] = ()
    kinds: frozenset[str] = frozenset()
    either: str | list[int] = ""
    weights: Mapping[str, float] | None = None
    tables: list[Place] | None = None
    text: str = ""


def own(*arguments: str) -> Any:
    return parse_settings(Settings[OwnConfig], "prog", [*TOKENIZER, *arguments]).env


VALUES: list[tuple[str, Sequence[str], Any]] = [
    ("places", ["1,2"], (1, 2)),
    ("places", ["5"], (5,)),
    ("places", ["1", "--env.places", "[2,3]"], (1, 2, 3)),
    ("places", ["[]"], ()),
    ("places", ["-1,-2"], (-1, -2)),
    ("limit", ["None"], None),
    ("names", ["a,b"], ["a", "b"]),
    ("kinds", ["true"], {"true"}),
    ("either", ["1,2"], [1, 2]),
    ("either", ["word"], "word"),
    ("weights", ['{"a": 1}'], {"a": 1.0}),
    ("tables", ['[{"name": "here"}]'], [Place(name="here")]),
    *(("text", [text], text) for text in ("-5", "-x", "-1e-3", "- a list", "--- a heading", "a=b", "")),
]


@pytest.mark.parametrize(("name", "typed", "value"), VALUES)
def test_values_on_the_command_line(name: str, typed: Sequence[str], value: Any) -> None:
    """Lists, tables, None, and texts that begin with a dash."""
    env = own(f"--env.{name}", *typed, "--env.seed", "3")
    assert (getattr(env, name), env.seed) == (value, 3)
    assert getattr(own(f"--env.{name}={typed[0]}", *typed[1:]), name) == value


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        *(("weights", ["[1]"]), ("weights", ["[" * 100_000]), ("places", ["[" * 100_000]), ("places", ["null"])),
        ("text", ["--env.seed", "3"]),  # without its value a flag does not take the next one
    ],
)
def test_values_of_another_kind_are_refused(name: str, typed: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match=rf"--env\.{name}") as caught:
        own(f"--env.{name}", *typed)
    assert len(str(caught.value)) < 1000


def test_verifiers_refuses_what_its_library_would_ignore() -> None:
    for setting in ({"system_prompt": "Be brief."}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(ValueError, match="unset"):
            VerifiersConfig(tokenizer_name="m", env_id="x", **setting)  # type: ignore[arg-type]


class Cut(Echo):
    """Answers of 1, 2 and 3 characters; the second reached its limit."""

    async def complete(self, prompt: str | list[Message], n: int, **changes: Any) -> list[Completion]:
        ids = self.tokenizer.encode("123")
        ends = ["stop", self.second, "stop"]
        return [Completion([1], ids[: i + 1], [-0.5] * (i + 1), "", end, 1) for i, end in enumerate(ends)]

    second = "length"


def group_of(**settings: Any) -> tuple[wire.ScoredData, Cut]:
    env = scripted(Cut, group_size=3, **settings)
    group = asyncio.run(env.scored("hi"))
    assert group is not None
    return group, env


def test_truncated_answers() -> None:
    group, env = group_of()
    assert group.overrides == [{}, {"truncated": True}, {}] and group.generation_params == {"temperature": 1.0}
    assert [sum(entry != wire.IGNORED for entry in mask) for mask in group.masks] == [1, 2, 3]
    assert env.measures.take()["truncated"] == pytest.approx(1 / 3)

    group, _ = group_of(mask_truncated=True)
    assert [sum(entry != wire.IGNORED for entry in mask) for mask in group.masks] == [1, 0, 3]
    assert group.scores == [1.0, 2.0, 3.0]

    config = BaseEnvConfig(tokenizer_name="demo", group_size=2)
    empty = wire.ScoredData(tokens=[[1, 2]] * 2, masks=[[wire.IGNORED] * 2] * 2, scores=[1.0, 0.0])
    assert unfit(empty, config, 99) is not None
    cut = msgspec.structs.replace(empty, overrides=[{"truncated": True}, {"unscored": True}])
    assert unfit(cut, config, 99) is None


@pytest.mark.parametrize("clean", [True, False])
def test_a_score_reads_the_spaces_that_were_sampled(tmp_path: Path, clean: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = clean
    tokenizer.save_pretrained(tmp_path)
    env = build()
    env.tokenizer = load_tokenizer(str(tmp_path))
    text = "do n't . , ' ok ' !"
    tokens = env.tokenizer.encode(text)
    assert env.decode(Completion([1], tokens, [-0.5] * len(tokens), "", "length", 1)) == text


async def test_answers_with_ids_that_have_no_text_are_unscored_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    env = build(group_size=3)
    known = len(env.tokenizer)
    answers = [[known - 1, 5], [5, known], [known + 60]]
    taken = [Completion([1], ids, [-0.5] * len(ids), "", "stop", 1) for ids in answers]

    clean = [Trajectory.of(taken[0], 1.0)] * 3
    both = [[Trajectory.of(each, float(place + 1)) for place, each in enumerate(taken)]] * 2
    found = []
    for group in (clean, *both):
        env.collect_trajectories = AsyncMock(return_value=scored_group(group))
        found.append(await env.scored("hi"))
    untouched, group, _ = found
    assert untouched.overrides is None and untouched.scores == [1.0] * 3
    assert group.masks == [[wire.IGNORED, known - 1, 5], [wire.IGNORED] * 3, [wire.IGNORED] * 2]
    assert group.overrides == [{}, {"unscored": True}, {"unscored": True}]
    assert wire.counted_scores(group) == [1.0]
    assert env.measures.take()["unknown_tokens"] == pytest.approx(4 / 6)  # of the groups since the first
    assert len([record for record in caplog.records if str(known) in record.getMessage()]) == 1


def test_a_conversation_without_room_for_the_answer_is_truncated() -> None:
    env = build()
    for end, longest, truncated in (("length", 999, True), ("stop", 999, False), ("stop", 20, True)):
        talk = Conversation(env.tokenizer, CHAT[1:])
        talk.say(Completion(talk.tokens, env.tokenizer.encode("46"), [-0.5] * 2, "", end, 1), "46")
        if talk.hear([{"role": "user", "content": "a longer question"}], longest):
            talk.say(Completion(talk.tokens, [5], [-0.5], "", "stop", 1), "1")
        assert talk.trajectory(1.0).truncated is truncated


@pytest.mark.parametrize("temperatures", [(0.7, 0.7), (0.7, 1.2), (1.0,)])
def test_the_temperature_reaches_the_trainer(temperatures: tuple[float, ...]) -> None:
    made = [Completion([1], [2], [-0.5], "", "stop", 3, temperature) for temperature in temperatures]
    group = scored_group([Trajectory.of(completion, 1.0) for completion in made])
    assert [sample.temperature for sample in to_group(wire.pack(group)).samples] == [*temperatures]


@pytest.mark.parametrize("score", [True, 1, np.float32(1.0), np.float64(1.0), np.int64(1), np.bool_(True), "x"])
def test_a_score_is_any_kind_of_number(score: Any) -> None:
    """What is none raises where the environment's group is made, so that it costs this group and no other."""
    completion = Completion([1], [2], [-0.5], "", "stop", 3)
    if isinstance(score, str):
        with pytest.raises(ValueError, match="float"):
            scored_group([Trajectory.of(completion, cast("Any", score))])
        return
    made = scored_group([Trajectory.of(completion, score)])
    for content_type in (wire.MSGPACK, wire.JSON):
        assert read(wire.encode_group(made, content_type), content_type).group.scores == [1.0]


# checked before anything is started ----------------------------------------------------------------------------------


def test_settings_check_of_a_table_and_of_servers_and_group_sizes() -> None:
    check("arithmetic", {"group_size": "4", "operation": "*", "max_num_workers": 3})  # as typed; an older name
    check("verifiers", {"env_args": '{"taskset": {"num_tasks": 5}}'})  # env_id is the environment's to miss
    check("my_envs.capitals", {"whatever": 1})  # the user's own: known only when it runs
    for name, values, field in (("gsm8k", {"reward": "kind"}, "--env.reward"), ("verifiers", {"x": 1}, "env.x")):
        with refusing(ConfigError, field):
            check(name, values)
    check_server({"base_url": "http://127.0.0.1:9001/v1"})
    with refusing(ConfigError, "openai.model_nam", words=["openai.model_name"]):
        check_server({"model_nam": "m"})

    assert group_size("gsm8k", {"group_size": "16"}) == group_size("my.own", {"group_size": 16}) == 16
    assert group_size("arithmetic", {}) == 8
    assert group_size("my.own", {}) is None
