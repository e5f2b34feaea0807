"""GSM8K: real rows, prompts, scores, evaluation; a server that answers from a script."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from environments.config import ConfigError
from environments.demo_model.model import build_tokenizer
from environments.gsm8k import Gsm8kConfig, Gsm8kEnv, Question, read_questions, too_long
from environments.running.evaluation import wilson
from environments.tokenizers import after_thinking
from tests.stand_ins import Scripted

pytest.importorskip("math_verify", reason="answers are judged by it: pip install math-verify")

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "tests" / "data" / "gsm8k_rows.jsonl"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        shutil.copy(ROWS, folder / f"{split}.jsonl")
    return folder


def environment(tokenizer: Qwen2Tokenizer, answers: Sequence[str], **changes: Any) -> Gsm8kEnv:
    config = Gsm8kConfig(**({"tokenizer_name": "demo", "group_size": len(answers), "judge_workers": 1} | changes))
    return Gsm8kEnv(config, Scripted(tokenizer, lambda _: answers), tokenizer)


def collect(env: Gsm8kEnv, item: Question) -> Any:
    async def scene() -> Any:
        try:
            await env.setup()
            return await env.collect_trajectories(item)
        finally:
            await env.close()

    return asyncio.run(scene())


def questions_of(path: Path, split: Any = "train") -> list[Question]:
    return read_questions(Gsm8kConfig(tokenizer_name="demo", dataset_path=path), split)


def test_rows_are_questions_with_the_number_after_the_hashes() -> None:
    questions = questions_of(ROWS)
    assert len(questions) == 32
    assert questions[0].text.startswith("Janet’s ducks") and questions[0].gold == "18"


@pytest.mark.parametrize(
    ("written", "gold"),
    [
        *(("18", "18"), ("$1,200", "1200"), ("18 dollars", "18"), ("18.", "18"), ("1 234", "1234"), ("-3", "-3")),
        *(("2.50", "2.50"), ("1/2", "1/2"), ("5 %", "5%"), ("€18", "18"), (" 18 \n", "18")),
    ],
)
def test_a_gold_answer_is_read_as_a_number(written: str, gold: str) -> None:
    assert Question.of("How many?", f"12 * 100\n#### {written}").gold == gold


@pytest.mark.parametrize(
    ("question", "gold"),
    [
        *(("What percentage of them left?", "60%"), ("What is the percent of red ones?", "60%")),
        *(("If 20 percent left, how many stayed?", "60"), ("What is 20% of 300?", "60")),
    ],
)
def test_where_a_percentage_is_asked_its_sign_may_be_written(question: str, gold: str) -> None:
    assert Question.of(question, "#### 60").gold == gold


@pytest.mark.parametrize(
    ("content", "split", "at", "parts"),
    [
        (None, "train", "", {"got": "rows.jsonl", "wanted": "train.jsonl"}),
        ('{"question": "q", "answer": "18"}\n', "train", " FILE, line 1", {"got": "'#### NUMBER'"}),
        ('{"question": "q"}\n', "train", " FILE, line 1", {"got": "answer"}),
        *(
            (
                '\n{"question": "q", "answer": "#### GOLD"}\n'.replace("GOLD", gold),
                "train",
                " FILE, line 2",
                {"got": "NUMBER"},
            )
            for gold in ("eighteen", "17+1", "18 or 19", "x = 18", "18 19", "")
        ),
        ('{"question": "q", "answer": "#### 1"}\n', "test", "", {"got": "rows.jsonl", "wanted": "test.jsonl"}),
    ],
)
def test_what_is_no_data_set_is_named(
    tmp_path: Path, content: str | None, split: Any, at: str, parts: dict[str, str]
) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        questions_of(file, split)
    assert caught.value.field == "--env.dataset_path" + at.replace("FILE", str(file))
    assert all(part in getattr(caught.value, name) for name, part in parts.items())


def test_strict_and_lenient_are_measured_and_one_of_them_is_paid(tokenizer: Qwen2Tokenizer, data: Path) -> None:
    answers = ["\\boxed{18}" + END, "It is 18." + END, "\\boxed{17}" + END, "\\boxed{18}"]  # the last is cut off
    item = Question("How many?", "18")
    paid = {"strict": [1.0, 0.0, 0.0, 0.0], "lenient": [1.0, 1.0, 0.0, 1.0]}
    for reward, scores in paid.items():
        env = environment(tokenizer, answers, dataset_path=data, reward=reward)
        group = collect(env, item)
        assert group.scores == scores
        assert env.measures.take() == {
            "strict": 0.25,
            "lenient": 0.75,
            "formed": 0.5,  # the first and the third
            "ended": 0.75,
            "unjudged": 0.0,
            "score": sum(scores) / 4,
        }


def test_format_and_length_change_the_score(tokenizer: Qwen2Tokenizer, data: Path) -> None:
    answers = ["\\boxed{17}" + END, "x" * 20]
    env = environment(
        tokenizer, answers, dataset_path=data, format_reward=0.2, length_penalty=0.5, length_free=0.5, max_tokens=20
    )
    group = collect(env, Question("How many?", "18"))
    # 11 tokens of 20: 0.2 - 0.5 * (11 - 10) / 10; 20 of 20: -0.5
    assert group.scores == pytest.approx([0.15, -0.5])


@pytest.mark.parametrize(("tokens", "part"), [(0, 0.0), (10, 0.0), (15, 0.5), (20, 1.0), (30, 1.0)])
def test_length_costs_from_its_free_share_on(tokens: int, part: float) -> None:
    assert too_long(tokens, room=20, free=0.5) == part


def test_what_is_thought_is_not_the_answer(tokenizer: Qwen2Tokenizer, data: Path) -> None:
    assert after_thinking("<think>18</think> 17") == " 17" and after_thinking("18") == "18"
    answers = ["<think>\\boxed{18}</think>\\boxed{17}" + END, "<think>\\boxed{17}</think>\\boxed{18}" + END]
    assert collect(environment(tokenizer, answers, dataset_path=data), Question("?", "18")).scores == [0.0, 1.0]


def test_the_prompt_is_a_chat_where_there_is_a_template_and_text_elsewhere(
    tokenizer: Qwen2Tokenizer, data: Path
) -> None:
    item = Question("How many?", "18")
    chat = environment(tokenizer, ["1"], answer_form="hashes").prompt(item)
    assert isinstance(chat, list) and [message["role"] for message in chat] == ["system", "user"]
    assert "####" in chat[0]["content"] and chat[1]["content"] == "How many?"
    silent = environment(tokenizer, ["1"], system_prompt="")
    assert silent.asked(silent.prompt(item)) == chat[1:]
    plain = build_tokenizer()
    plain.chat_template = None
    env = environment(plain, ["1"], system_prompt="Say it.")
    assert env.asked(env.prompt(item)) == "Say it.\n\nQuestion: How many?\nAnswer:"


def test_an_evaluation_asks_the_test_questions_greedily_and_says_how_sure_it_is(
    tokenizer: Qwen2Tokenizer, data: Path
) -> None:
    env = environment(tokenizer, ["\\boxed{18}" + END], dataset_path=data, eval_questions=8, max_tokens=20)

    async def scene() -> dict[str, float]:
        try:
            await env.setup()
            return await env.evaluate()
        finally:
            await env.close()

    metrics = asyncio.run(scene())
    questions = questions_of(ROWS)[:8]
    share = sum(question.gold == "18" for question in questions) / 8
    assert 0 < share < 1
    assert metrics["accuracy"] == metrics["lenient"] == share and metrics["questions"] == 8
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == wilson(share, 8)
    assert isinstance(env.server, Scripted)
    assert {(how.temperature, how.max_tokens, n) for _, n, how in env.server.asked} == {(0.0, 20, 1)}


def test_questions_that_leave_no_room_are_skipped_or_refused(tokenizer: Qwen2Tokenizer, data: Path) -> None:
    every = questions_of(ROWS)
    lengths = sorted(len(tokenizer.encode(question.text)) for question in every)
    limit = lengths[15] + 8  # sixteen of them leave eight tokens

    async def taken(limit: int) -> set[str]:
        env = environment(tokenizer, ["1"], dataset_path=data, system_prompt="", max_token_length=limit)
        await env.setup()
        return {next(env.items).text for _ in range(64)}

    fitting = {question.text for question in every if len(tokenizer.encode(question.text)) <= lengths[15]}
    assert asyncio.run(taken(limit)) == fitting
    with pytest.raises(ConfigError) as error:
        asyncio.run(taken(20))
    assert (error.value.field, error.value.got) == ("--env.max_token_length", "20")
    assert "32 train" in error.value.wanted


@pytest.mark.parametrize(
    ("share", "trials", "low", "high"),
    [
        (0.5, 100, 0.4038, 0.5962),  # textbook values
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
    ],
)
def test_wilsons_interval(share: float, trials: int, low: float, high: float) -> None:
    assert wilson(share, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("trials", [1, 3, 48, 1319])
def test_wilsons_interval_ends_exactly_at_0_and_1(trials: int) -> None:
    assert wilson(0.0, trials)[0] == 0.0 and wilson(1.0, trials)[1] == 1.0


CONFIGS = sorted((ROOT / "configs").glob("gsm8k_*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_configurations_say_what_it_understands(path: Path) -> None:
    (environment,) = tomllib.loads(path.read_text())["environments"]
    assert environment["name"] == "gsm8k"
    Gsm8kConfig(tokenizer_name="model", **environment["env"])


def test_it_runs_by_its_path_as_the_original_does(tmp_path: Path) -> None:
    command = "environments/gsm8k.py serve --env.tokenizer_name no/model --env.use_wandb False "
    command += "--openai.model_name no/model --openai.base_url http://localhost:9001/v1 --openai.server_type vllm "
    command += "--openai.api_key x --slurm False --env.batch_size 12"
    offline = {"PATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, cwd=ROOT, env=offline, check=False
    )
    # Everything was understood: it got as far as the model that there is not.
    assert done.returncode == 2 and "--env.tokenizer_name: got no/model " in done.stderr, done.stderr


@pytest.mark.usefixtures("warm_trainers")
def test_the_model_that_is_asked_has_the_tokenizer(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "environments.gsm8k",
        "serve",
        "--openai.model_name",
        str(tmp_path / "none"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and f"--env.tokenizer_name: got {tmp_path / 'none'} " in done.stderr, done.stderr
