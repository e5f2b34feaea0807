"""The tasks of the built-in environments: problems, prompts, scores and evaluations; and one of them as a program."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.__main__ import environment_class
from environments.api.service import Service
from environments.api.settings import Settings
from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem, ProblemSet, reward
from environments.base import BaseEnv
from environments.config import ConfigError, PromptTooLong
from environments.data_config import DataConfig, RewardConfig
from environments.demo_model.model import build_tokenizer
from environments.gsm8k import Gsm8kConfig, Gsm8kEnv, Question, read_questions, too_long
from environments.items import Stream
from environments.peers.inference import Completion, Sampling
from environments.running import cli
from environments.running.evaluation import wilson
from environments.running.groups import set_up
from environments.running.settings_check import BUILT_IN, BuiltIn
from environments.scoring import settled
from environments.synthetic import SyntheticConfig, SyntheticEnv
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
from tests.processes import ROOT
from tests.stand_ins import Scripted, after_setup, registration, scripted, serving, trained
from tests.unit.factories import refusing

pytest.importorskip("math_verify", reason="answers are judged by it: pip install math-verify")
pytestmark = pytest.mark.usefixtures("warm_environments")

ROWS = ROOT / "tests" / "data" / "gsm8k_rows.jsonl"
END = "<|endoftext|>"
TOKENIZER = build_tokenizer()
PLAIN = build_tokenizer()
PLAIN.chat_template = None


# ---------------------------------------------------------------- arithmetic


def arithmetic(*texts: str, **changes: Any) -> ArithmeticEnv:
    return scripted(ArithmeticEnv, *texts, config=ArithmeticConfig, **changes)


def test_arithmetic_prompt_answer_and_reward() -> None:
    for problem, prompt, answer in (
        (Problem(12, 34), "12+34=", "46"),
        (Problem(12, 34, "-"), "12-34=", "-22"),
        (Problem(7, 8, "*"), "7*8=", "56"),
    ):
        assert (problem.prompt, problem.answer) == (prompt, answer)
    worth = {text: reward(Problem(12, 34), text) for text in ("46", " 46\n", "", "45", "046", "46.", "46 46", "x46")}
    assert [text for text, value in worth.items() if value] == ["46", " 46\n"] and set(worth.values()) == {0.0, 1.0}


@given(st.integers(-50, 50), st.integers(3, 12), st.sampled_from(["+", "-", "*"]))
def test_arithmetic_every_pair_is_in_one_part(low: int, width: int, operation: Any) -> None:
    problems = ProblemSet.of(low, low + width, operation)
    every, operands = problems.train + problems.held_out, range(low, low + width + 1)
    assert sorted((each.left, each.right) for each in every) == [(a, b) for a in operands for b in operands]
    assert {each.operation for each in every} == {operation}


def test_arithmetic_splits_the_same_every_time_and_leaves_a_problem_in_each_part() -> None:
    first = ProblemSet.of(10, 49)
    assert first == ProblemSet.of(10, 49)
    assert (len(first.train), len(first.held_out)) == (1440, 160)  # 40 * 40 pairs, a tenth held out
    assert (first.train[0].prompt, first.held_out[0].prompt) == ("36+18=", "12+11=")  # as in earlier versions
    for low, high, got in ((5, 4, "5 to 4, which has 0 problems"), (5, 5, "5 to 5, which has 1 problems")):
        with refusing(ConfigError, "low, high", got=got):
            ProblemSet.of(low, high)


def test_arithmetic_a_group_has_the_servers_tokens_and_exact_scores() -> None:
    env = arithmetic("46" + END, "<|pad|>46" + END)
    group = after_setup(env, lambda: env.collect_trajectories(Problem(12, 34)))
    prompt, digits, end, pad = TOKENIZER.encode("12+34="), TOKENIZER.encode("46"), [1], [0]
    assert group.tokens == [prompt + digits + end, prompt + pad + digits + end]
    assert group.masks == [[-100] * 6 + digits + end, [-100] * 6 + pad + digits + end]
    assert group.inference_logprobs == [[1.0] * 6 + [-0.25] * 3, [1.0] * 6 + [-0.25] * 4]
    assert group.scores == [1.0, 0.0]  # padding that a reader would not see is no part of the answer
    assert group.policy_versions == [4, 4]
    assert group.messages[0] == [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]


def test_arithmetic_evaluation_is_the_share_of_right_samples() -> None:
    env = arithmetic("46" + END, "x" + END, eval_samples=4)
    metrics = after_setup(env, env.evaluate)
    right = sum(problem.answer == "46" for problem in env.problems.held_out)
    # 160 problems, four samples each, two of which say 46.
    assert right > 0 and metrics == {"accuracy": 2 * right / 640, "samples": 640, "rows_failed": 0}


def test_arithmetic_answers_are_as_long_as_the_longest_number_needs() -> None:
    for changes, tokens in (({}, 4), ({"high": 99}, 5), ({"max_tokens": 7}, 7)):  # digits, end, one more
        env = arithmetic("1", **changes)
        asyncio.run(env.setup())
        assert env.sampling(room=100).max_tokens == tokens
    with refusing(PromptTooLong, "--env.max_token_length", got="6"):
        arithmetic("1", max_token_length=6).encode("12+34=")


# ---------------------------------------------------------------- word problems

LEVEL = st.sampled_from(sorted(LEVELS))
TOM = WordProblem(1, "Tom has 7 apples. He buys 5 more. How many apples does Tom have now?", 12)


def words(*texts: str, **changes: Any) -> WordProblemsEnv:
    env = scripted(WordProblemsEnv, *texts, config=WordProblemsConfig, **changes)
    asyncio.run(env.setup())
    return env


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
def test_word_problems_sentences_say_what_the_answer_is(level: int, part: Part, seed: int) -> None:
    problem = make_problem(level, part, random.Random(seed))
    assert problem.level == level and problem.answer > 0
    assert solved(problem.text) == problem.answer
    assert max(map(int, re.findall(r"\d+", problem.text))) <= LEVELS[level].largest
    assert len(re.findall(r"[.?](?: |$)", problem.text)) <= LEVELS[level].steps + LEVELS[level].distractors + 2
    assert make_problem(level, part, random.Random(seed)) == problem


def test_word_problems_held_out_answers_and_levels() -> None:
    problems = held_out_problems([1, 2], 50)
    assert problems == held_out_problems([1, 2], 50) and len({problem.text for problem in problems}) == 50
    assert {problem.level for problem in problems} == {1, 2}
    for field in ("people", "things", "starts", "packs", "gains", "losses", "distractors", "questions"):
        assert not set(getattr(TRAIN, field)) & set(getattr(HELD_OUT, field)), field

    texts = ("7 + 5 = 12", "12.", "He has 12 apples", "12 or 13", "twelve", "")
    assert [text for text in texts if is_right(TOM, text)] == ["7 + 5 = 12", "12.", "He has 12 apples"]

    assert [levels_of(said) for said in ("auto", "3", "1-2")] == [[1, 2, 3, 4, 5, 6], [3], [1, 2]]
    for said in ("", "0", "7", "2-1", "1-", "-1", "1-9", "hard", "1-2-3"):
        with refusing(ConfigError, "--env.level", got=said):
            levels_of(said)


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
def test_word_problems_levels_with_mixed_groups_are_drawn(means: dict[int, float], drawn: list[int]) -> None:
    assert Ladder([1, 2, 3], means).candidates() == drawn


def test_word_problems_an_answer_counts_if_it_is_right_and_has_ended() -> None:
    env = words("12" + END, "It is 12", "13" + END)
    group = asyncio.run(env.collect_trajectories(TOM))
    assert group is not None and group.scores == [1.0, 0.0, 0.0]
    assert env.ladder.means == {1: pytest.approx(1 / 3)}
    assert env.measures.take() == {"level": 1.0, "accuracy_level_1": pytest.approx(1 / 3)}
    question = f"{TOM.text} End with the number."
    assert env.prompt(TOM) == [{"role": "user", "content": question}]
    assert words("1", tokenizer=PLAIN).prompt(TOM) == f"{question}\nAnswer:"


@pytest.mark.parametrize(("level", "drawn"), [("2-3", {2, 3}), ("auto", {4, 5})])
def test_word_problems_are_of_the_chosen_or_mixed_levels(level: str, drawn: set[int]) -> None:
    env, means = words("1", level=level), {"1": 0.9, "2": 0.9, "3": 0.9, "4": 0.5, "5": 0.1}
    env.restore({"position": 0, "means": means})
    levels = {asyncio.run(env.get_next_item()).level for _ in range(60)}
    assert levels == drawn  # auto: level 4, and 1 time in 8 the one above
    kept = {each: mean for each, mean in means.items() if level == "auto" or int(each) in drawn}
    assert env.state() == {"position": 60, "means": kept}


def test_word_problems_evaluation_is_the_share_of_right_answers() -> None:
    problems = held_out_problems([1, 2], 20)
    env = words(f"{problems[0].answer}{END}", level="1-2", eval_questions=20)
    found = asyncio.run(env.evaluate())
    share = sum(problem.answer == problems[0].answer for problem in problems) / 20
    assert (found["questions"], found["rows_failed"]) == (20, 0)
    assert found["accuracy"] == share > 0 and {"accuracy_level_1", "accuracy_level_2"} <= set(found)
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson(share, 20)


# ---------------------------------------------------------------- GSM8K


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        shutil.copy(ROWS, folder / f"{split}.jsonl")
    return folder


def gsm8k(*texts: str, **changes: Any) -> Gsm8kEnv:
    return scripted(Gsm8kEnv, *texts, config=Gsm8kConfig, judge_workers=1, **changes)


def questions_of(path: Path, split: Any = "train") -> list[Question]:
    return read_questions(Gsm8kConfig(tokenizer_name="demo", dataset_path=path), split)


ASKED = Question("How many?", "18")


@pytest.mark.parametrize(
    ("question", "written", "gold"),
    [
        *(("How many?", written, written) for written in ("18", "-3", "2.50", "1/2")),
        *(("How many?", written, "1200") for written in ("$1,200", "1 200", " 1200 dollars.\n")),
        ("How many?", "5 %", "5%"),
        ("What percentage of them left?", "60", "60%"),
        ("What is the percent of red ones?", "60", "60%"),
        ("If 20 percent left, how many stayed?", "60", "60"),
    ],
)
def test_gsm8k_a_gold_answer_is_read_as_a_number(question: str, written: str, gold: str) -> None:
    assert Question.of(question, f"12 * 100\n#### {written}").gold == gold


@pytest.mark.parametrize(
    ("content", "split", "at", "got"),
    [
        (None, "train", "", "rows.jsonl"),
        ('{"question": "q", "answer": "#### 1"}\n', "test", "", "rows.jsonl"),
        ('{"question": "q", "answer": "18"}\n', "train", " FILE, line 1", "'#### NUMBER'"),
        ('{"question": "q"}\n', "train", " FILE, line 1", "answer"),
        ('\n{"question": \n', "train", " FILE, line 2", '{"question":'),
        *(
            ('\n{"question": "q", "answer": "#### GOLD"}\n'.replace("GOLD", gold), "train", " FILE, line 2", "NUMBER")
            for gold in ("eighteen", "17+1", "18 or 19", "x = 18", "18 19", "")
        ),
    ],
)
def test_gsm8k_what_is_no_data_set_is_named(tmp_path: Path, content: str | None, split: Any, at: str, got: str) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with refusing(ConfigError, "--env.dataset_path" + at.replace("FILE", str(file)), words=[got]):
        questions_of(file, split)


@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ({}, [1.0, 0.0, 0.0, 0.0, 1.0]),
        ({"reward": "lenient"}, [1.0, 1.0, 0.0, 1.0, 1.0]),
        ({"format_reward": 0.25}, [1.25, 0.0, 0.25, 0.0, 1.25]),
    ],
)
def test_gsm8k_pays_strict_or_lenient(data: Path, changes: dict[str, Any], scores: list[float]) -> None:
    thinks = "<think>\\boxed{17}</think>\\boxed{18}" + END
    answers = ["\\boxed{18}" + END, "It is 18." + END, "\\boxed{17}" + END, "\\boxed{18}", thinks]  # the 4th is cut off
    env = gsm8k(*answers, dataset_path=data, **changes)
    group = after_setup(env, lambda: env.collect_trajectories(ASKED))
    assert group.scores == scores
    figures = {"strict": 0.4, "lenient": 0.8, "formed": 0.6, "ended": 0.8, "unjudged": 0.0, "score": sum(scores) / 5}
    assert env.measures.take() == pytest.approx(figures)


def test_gsm8k_length_costs_from_its_free_share_on(data: Path) -> None:
    parts = [too_long(tokens, room=20, free=0.5) for tokens in (0, 10, 15, 20, 30)]
    assert parts == [0.0, 0.0, 0.5, 1.0, 1.0]
    changes = {"format_reward": 0.2, "length_penalty": 0.5, "length_free": 0.5, "max_tokens": 20}
    env = gsm8k("\\boxed{17}" + END, "x" * 20, dataset_path=data, **changes)
    # 11 tokens of 20: 0.2 - 0.5 * (11 - 10) / 10; 20 of 20: -0.5
    assert after_setup(env, lambda: env.collect_trajectories(ASKED)).scores == pytest.approx([0.15, -0.5])


def test_gsm8k_the_prompt_is_a_chat_where_there_is_a_template() -> None:
    chat = gsm8k("1", answer_form="hashes").prompt(ASKED)
    assert isinstance(chat, list) and [message["role"] for message in chat] == ["system", "user"]
    assert "####" in chat[0]["content"] and chat[1]["content"] == "How many?"
    silent = gsm8k("1", system_prompt="")
    assert silent.asked(silent.prompt(ASKED)) == chat[1:]
    plain = gsm8k("1", system_prompt="Say it.", tokenizer=PLAIN)
    assert plain.asked(plain.prompt(ASKED)) == "Say it.\n\nQuestion: How many?\nAnswer:"


def test_gsm8k_evaluation_asks_the_test_questions_greedily(data: Path) -> None:
    env = gsm8k("\\boxed{18}" + END, dataset_path=data, eval_questions=8, max_tokens=20)
    metrics = after_setup(env, env.evaluate)
    questions = questions_of(ROWS)
    assert len(questions) == 32 and questions[0].text.startswith("Janet’s ducks")
    share = sum(question.gold == "18" for question in questions[:8]) / 8
    assert metrics["accuracy"] == metrics["lenient"] == share > 0 and metrics["questions"] == metrics["samples"] == 8
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == wilson(share, 8) and metrics["length_mean"] == 11
    assert isinstance(env.server, Scripted)
    assert {(how.temperature, how.max_tokens, n) for _, n, how in env.server.asked} == {(0.0, 20, 1)}


@pytest.mark.parametrize(
    ("share", "trials", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0)],  # textbook values
)
def test_wilsons_interval(share: float, trials: int, low: float, high: float) -> None:
    assert wilson(share, trials) == pytest.approx((low, high), abs=5e-5)
    for each in (1, 3, 48, 1319):
        assert wilson(0.0, each)[0] == 0.0 and wilson(1.0, each)[1] == 1.0


COMMAND = (
    "serve --env.tokenizer_name no/model --env.use_wandb True --openai.model_name no/model --openai.api_key x "
    "--openai.base_url http://localhost:9001/v1 --openai.server_type vllm --slurm False --env.batch_size 12"
)
"""Options of Atropos' own file."""


@pytest.mark.parametrize("file", ["gsm8k.py", "gsm8k_server.py"])
def test_gsm8k_runs_by_its_path_as_the_original_does(file: str) -> None:
    done = program(f"environments/{file}", *COMMAND.split(), "--env.none_such", "1")
    assert done.returncode == 2 and "--env.none_such" in done.stderr, done.stderr
    assert not [each for each in COMMAND.split()[1::2] if f"{each}: " in done.stderr], "all others were understood"


def test_gsm8k_says_which_option_of_the_original_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):  # there is no such model
        Gsm8kEnv.cli(COMMAND.split())
    assert "--env.use_wandb" in caplog.text


# ---------------------------------------------------------------- synthetic


class Answering(Scripted):
    """A server whose completions have the lengths that they may have."""

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt_token_ids, n, sampling))
        length = sampling.max_tokens
        return [Completion(prompt_token_ids, [5] * length, [-0.5] * length, "", "length", 3)] * n


def test_synthetic_groups() -> None:
    settings = {"prompt_tokens": 20, "completion_mean": 12, "max_token_length": 50}
    env = scripted(SyntheticEnv, *3 * [""], config=SyntheticConfig, **settings)
    env.server = server = Answering(TOKENIZER, lambda _: [])

    async def scene() -> list[Any]:
        items = [next(env.items) for _ in range(400)]
        return [await env.collect_trajectories(item) for item in items]

    groups = after_setup(env, scene)
    lengths = [sampling.max_tokens for _, _, sampling in server.asked]
    assert [[len(tokens) - 20 for tokens in group.tokens] for group in groups[:2]] == [lengths[:3], lengths[3:6]]
    assert groups[0].scores == [float(length % 2 == 0) for length in lengths[:3]]  # even lengths are paid for
    # the limit ends a token with p = (1/12 - 1/258) / (1 - 1/258) = 0.0798: mean (1 - (1 - p)^30) / p = 11.5
    assert (min(lengths), max(lengths)) == (1, 30) and 10.5 < sum(lengths) / len(lengths) < 12.5
    prompts = {tuple(prompt) for prompt, _, _ in server.asked}
    assert len(prompts) == 400 and {len(prompt) for prompt in prompts} == {20}


# ---------------------------------------------------------------- as a program


def program(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=250, env=env)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("name", "peer"), [("serve", "the rollout API"), ("evaluate", "the inference server")])
def test_program_servers_that_never_come_are_named(model: str, name: str, peer: str) -> None:
    nobody = "http://127.0.0.1:9"  # the discard port: nothing listens there
    words = ["-m", "environments.arithmetic", name, "--env.tokenizer_name", model, "--env.retry_timeout", "0.5"]
    servers = ["--env.rollout_server_url", nobody, "--openai.base_url", f"{nobody}/v1", "--openai.server_type", "vllm"]
    done = program(*words, *servers)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{peer} at {nobody}: " in done.stderr.splitlines()[-1]


def test_program_mistakes_end_with_status_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ArithmeticEnv.cli(["serve", "--openai.model_name", "/no/such"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--env.tokenizer_name: " in line and "/no/such" in line


# every built-in environment ------------------------------------------------------------------------------------------


KNOWN = {**BUILT_IN, "synthetic": BuiltIn("environments.synthetic", "SyntheticConfig")}

Options = Callable[[Path], dict[str, Any]]
OPTIONS: dict[str, Options] = {
    "arithmetic": lambda folder: {},
    "dataset": lambda folder: {"data": DataConfig(path=str(folder / "train.jsonl"), held_out=4)},
    "gsm8k": lambda folder: {"dataset_path": folder, "eval_questions": 2},
    "synthetic": lambda folder: {"prompt_tokens": 8, "completion_mean": 2.0},
    "word_problems": lambda folder: {"eval_questions": 4},
}
"""Further options; a new environment has one row. `verifiers` needs its library, and has an integration test."""


@pytest.fixture(params=OPTIONS)
def build(request: pytest.FixtureRequest, data: Path) -> Callable[..., BaseEnv[Any, Any]]:
    """Makes the environment before a policy that says 46 or 7."""
    name, found = request.param, KNOWN[request.param]

    def make(**changes: Any) -> BaseEnv[Any, Any]:
        module = import_module(found.settings_module or found.module)
        options = OPTIONS[name](data) | changes
        rows = options.pop("data", None)
        config = getattr(module, found.settings)
        env = scripted(environment_class(module), "46<|endoftext|>", "7<|endoftext|>", config=config, **options)
        if rows is not None:
            env.data, env.rewards = rows, (RewardConfig(function="exact_match"),)
        return env

    return make


async def test_environment_serves(build: Callable[..., BaseEnv[Any, Any]]) -> None:
    service, env = Service(Settings()), build(max_batches_offpolicy=1)
    await service.register(registration(8, max_token_len=2048, num_steps=2))
    task = asyncio.create_task(serving(env, service, asyncio.Event()))
    batches = await trained(service, 2, task)
    assert [sum(len(group.tokens) for group in batch) for batch in batches] == [8, 8]
    await asyncio.wait_for(task, 30)
    await env.close()


def test_environment_processes(build: Callable[..., BaseEnv[Any, Any]], tmp_path: Path) -> None:
    async def scene() -> None:
        env = build(data_path_to_save_groups=tmp_path / "groups.jsonl")
        await cli.process(env, 3)
        await env.close()

    asyncio.run(scene())
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [len(group["scores"]) for group in groups] == [2, 2, 2]
    assert "<h1>" in (tmp_path / "groups.html").read_text()
    with pytest.raises(ConfigError) as again:  # never over a file
        asyncio.run(scene())
    assert str(tmp_path / "groups.jsonl") in str(again.value)
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == 3


async def test_environment_resumes_with_the_items_that_were_next(build: Callable[..., BaseEnv[Any, Any]]) -> None:
    async def items(env: BaseEnv[Any, Any], count: int) -> list[Any]:
        return [await settled(env.get_next_item()) for _ in range(count)]

    first, second = build(), build()
    await set_up(first)
    await set_up(second)
    await items(first, 3)
    second.restore(json.loads(json.dumps(first.state())))
    assert await items(first, 4) == await items(second, 4)
    assert first.state() == second.state()
    for env in (first, second):
        await env.close()


def test_items_of_a_stream_end() -> None:
    stream = Stream([1, 2])
    stream.position = 5
    assert [*stream] == [] and stream.position == 2
