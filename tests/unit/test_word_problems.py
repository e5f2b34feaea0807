"""Word problems: their numbers, their sentences, the levels that are drawn, the environment."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from environments.config import ConfigError
from environments.demo_model.model import build_tokenizer
from environments.peers.inference import Completion, Sampling
from environments.trajectory import Message
from environments.word_problems import (
    HELD_OUT,
    LEVELS,
    TRAIN,
    Ladder,
    Part,
    WordProblem,
    WordProblemsConfig,
    WordProblemsEnv,
    held_out_problems,
    is_right,
    levels_of,
    make_problem,
)

LEVEL = st.sampled_from(sorted(LEVELS))
TOM = WordProblem(1, "Tom has 7 apples. He buys 5 more. How many apples does Tom have now?", 12)


def solved(text: str) -> int:
    """The answer, read from the sentences alone."""
    number = None
    for sentence in re.split(r"(?<=[.?]) ", text):
        found = [int(each) for each in re.findall(r"\d+", sentence)]
        if re.search(r"years old|holidays|chairs|bus to town|lives at", sentence) or not found:
            continue
        if number is None:
            number = found[0] * found[1] if len(found) == 2 else found[0]
        elif re.search(r"gives away|loses|sells|drops|takes|break|stolen|borrows", sentence):
            number -= found[0]
        else:
            number += found[0]
    assert number is not None, text
    return number


@given(LEVEL, st.sampled_from(["train", "held_out"]), st.integers(0, 10**6))
def test_the_sentences_say_what_the_answer_is(level: int, part: Part, seed: int) -> None:
    problem = make_problem(level, part, random.Random(seed))
    assert problem.level == level and problem.answer > 0
    assert solved(problem.text) == problem.answer
    assert max(map(int, re.findall(r"\d+", problem.text))) <= LEVELS[level].largest
    assert len(re.findall(r"[.?](?: |$)", problem.text)) <= LEVELS[level].steps + LEVELS[level].distractors + 2
    assert make_problem(level, part, random.Random(seed)) == problem


def test_the_parts_share_no_sentence_name_or_thing() -> None:
    for field in ("people", "things", "starts", "packs", "gains", "losses", "distractors", "questions"):
        assert not set(getattr(TRAIN, field)) & set(getattr(HELD_OUT, field)), field


def test_held_out_problems_are_the_same_every_time_and_all_different() -> None:
    problems = held_out_problems([1, 2], 50)
    assert problems == held_out_problems([1, 2], 50)
    assert len({problem.text for problem in problems}) == 50
    assert {problem.level for problem in problems} == {1, 2}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("7 + 5 = 12", True),
        ("12.", True),
        ("He has 12 apples", True),
        ("12 or 13", False),
        ("twelve", False),
        ("", False),
    ],
)
def test_the_last_number_counts(answer: str, right: bool) -> None:
    assert is_right(TOM, answer) is right


@pytest.mark.parametrize(("said", "levels"), [("auto", [1, 2, 3, 4, 5, 6]), ("3", [3]), ("1-2", [1, 2])])
def test_levels(said: str, levels: list[int]) -> None:
    assert levels_of(said) == levels


@pytest.mark.parametrize("said", ["", "0", "7", "2-1", "1-", "-1", "1-9", "hard", "1-2-3"])
def test_levels_that_are_none(said: str) -> None:
    with pytest.raises(ValueError):
        levels_of(said)


# The ladder: 0.0625 of each new group's mean enters a level's mean


def test_a_levels_mean_follows_its_groups() -> None:
    ladder = Ladder([1, 2])
    ladder.note(1, 0.5)
    assert ladder.means == {1: 0.5}
    ladder.note(1, 1.0)
    assert ladder.means == {1: 0.53125}


@pytest.mark.parametrize(
    ("means", "drawn"),
    [
        ({}, [1]),  # nothing is known: the easiest
        ({1: 0.1}, [1]),  # too hard, and there is nothing easier
        ({1: 0.5}, [1]),
        ({1: 0.9}, [2]),
        ({1: 0.7, 2: 0.3, 3: 0.1}, [1, 2]),
        ({1: 0.9, 2: 0.1, 3: 0.1}, [2]),
        ({1: 0.9, 2: 0.9, 3: 0.9}, [3]),  # all solved: the hardest
    ],
)
def test_levels_with_mixed_groups_are_drawn(means: dict[int, float], drawn: list[int]) -> None:
    assert Ladder([1, 2, 3], means).candidates() == drawn


@given(st.dictionaries(LEVEL, st.floats(0.0, 1.0)), st.integers(0, 1000))
def test_a_draw_is_a_candidate_or_the_level_above(means: dict[int, float], seed: int) -> None:
    ladder = Ladder(list(LEVELS), means)
    found = ladder.candidates()
    assert ladder.draw(random.Random(seed)) in {*found, found[-1] + 1} & set(LEVELS)


def test_a_policy_that_becomes_better_climbs() -> None:
    ladder, rng = Ladder([1, 2, 3]), random.Random(0)
    able = {1: 1.0, 2: 1.0, 3: 0.5}
    drawn = [0]
    for _ in range(300):
        drawn.append(ladder.draw(rng))
        ladder.note(drawn[-1], able[drawn[-1]])
    assert drawn[-100:].count(3) >= 90


# The environment


class Scripted:
    """A server whose answers are these texts in turn; one without the end token was cut off."""

    def __init__(self, tokenizer: Qwen2Tokenizer, texts: list[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        return [self._completion(prompt_token_ids, self.texts[index % len(self.texts)]) for index in range(n)]

    def _completion(self, prompt: list[int], text: str) -> Completion:
        tokens = list(self.tokenizer.encode(text))
        reason = "stop" if text.endswith("<|endoftext|>") else "length"
        return Completion(prompt, tokens, [-0.1] * len(tokens), text, reason, 3)

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise NotImplementedError

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


def environment(tokenizer: Qwen2Tokenizer, texts: list[str], **changes: Any) -> WordProblemsEnv:
    config = WordProblemsConfig(**({"tokenizer_name": "demo", "group_size": len(texts)} | changes))
    env = WordProblemsEnv(config, Scripted(tokenizer, texts), tokenizer)
    asyncio.run(env.setup())
    return env


def test_an_answer_counts_if_it_is_right_and_has_ended(tokenizer: Qwen2Tokenizer) -> None:
    env = environment(tokenizer, ["12<|endoftext|>", "It is 12", "13<|endoftext|>"])
    group = asyncio.run(env.collect_trajectories(TOM))
    assert group is not None and group.scores == [1.0, 0.0, 0.0]
    assert env.ladder.means == {1: pytest.approx(1 / 3)}
    assert env.measures.take() == {"level": 1.0, "accuracy_level_1": pytest.approx(1 / 3)}


def test_a_chat_model_gets_a_chat_and_others_plain_text(tokenizer: Qwen2Tokenizer) -> None:
    question = f"{TOM.text} End with the number."
    env = environment(tokenizer, ["1"])
    assert env.prompt(TOM) == [{"role": "user", "content": question}]
    env.tokenizer = build_tokenizer()
    env.tokenizer.chat_template = None
    assert env.prompt(TOM) == f"{question}\nAnswer:"


@pytest.mark.parametrize(("level", "drawn"), [("2-3", {2, 3}), ("auto", {4, 5})])
def test_problems_are_of_the_chosen_levels_or_of_those_with_mixed_groups(
    tokenizer: Qwen2Tokenizer, level: str, drawn: set[int]
) -> None:
    env = environment(tokenizer, ["1"], level=level)
    means = {"1": 0.9, "2": 0.9, "3": 0.9, "4": 0.5, "5": 0.1}
    env.restore({"position": 0, "means": means})

    async def levels() -> set[int]:
        return {(await env.get_next_item()).level for _ in range(60)}

    assert asyncio.run(levels()) == drawn  # auto: level 4, and 1 time in 8 the one above
    kept = {each: mean for each, mean in means.items() if level == "auto" or int(each) in drawn}
    assert env.state() == {"position": 60, "means": kept}


def test_an_evaluation_asks_held_out_problems_of_every_level(tokenizer: Qwen2Tokenizer) -> None:
    right = held_out_problems([1, 2], 1)[0].answer
    env = environment(tokenizer, [f"{right}<|endoftext|>"], level="1-2", eval_questions=20)
    found = asyncio.run(env.evaluate())
    expected = sum(problem.answer == right for problem in held_out_problems([1, 2], 20)) / 20
    assert found["accuracy"] == expected > 0
    assert found["accuracy_low"] < expected < found["accuracy_high"]
    assert found["questions"] == 20 and {"accuracy_level_1", "accuracy_level_2"} <= set(found)


@pytest.mark.parametrize("error", [ZeroDivisionError("in one row"), KeyboardInterrupt(), SystemExit(0)])
def test_an_evaluation_keeps_the_other_rows_if_one_fails(
    tokenizer: Qwen2Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    problems = held_out_problems([1], 20)
    env = environment(tokenizer, [f"{problems[0].answer}<|endoftext|>"], level="1", eval_questions=20)
    encode, lost = env.encode, env.prompt(problems[3])

    def encode_but_one(prompt: str | list[Message]) -> list[int]:
        if prompt == lost:
            raise error
        return encode(prompt)

    monkeypatch.setattr(env, "encode", encode_but_one)
    found = asyncio.run(env.evaluate())
    right = sum(problem.answer == problems[0].answer for problem in problems if problem is not problems[3])
    assert (found["questions"], found["rows_failed"]) == (19, 1)
    assert found["accuracy"] == found["accuracy_level_1"] == right / 19
    assert type(error).__name__ in caplog.text


def test_a_level_that_is_none_is_refused(tokenizer: Qwen2Tokenizer) -> None:
    with pytest.raises(ConfigError) as caught:
        environment(tokenizer, ["1"], level="9")
    assert caught.value.field == "--env.level" and caught.value.got == "9"
