"""The arithmetic task: problems, its environment before a scripted server, and the program among real processes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem, ProblemSet, reward
from environments.config import ConfigError, PromptTooLong
from environments.demo_model.model import build_tokenizer
from tests.stand_ins import Scripted

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("warm_trainers")


@pytest.mark.parametrize(
    ("problem", "prompt", "answer"),
    [
        (Problem(12, 34), "12+34=", "46"),
        (Problem(12, 34, "-"), "12-34=", "-22"),
        (Problem(7, 8, "*"), "7*8=", "56"),
    ],
)
def test_problem_prompt_and_answer(problem: Problem, prompt: str, answer: str) -> None:
    assert (problem.prompt, problem.answer) == (prompt, answer)


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        *(
            ("46", 1.0),
            (" 46\n", 1.0),
            ("46 ", 1.0),
            ("", 0.0),
            ("45", 0.0),
            ("046", 0.0),
            ("46.", 0.0),
            ("46 46", 0.0),
        ),
        ("<|pad|>46", 0.0),
    ],
)
def test_reward_is_for_the_exact_answer_only(completion: str, worth: float) -> None:
    assert reward(Problem(12, 34), completion) == worth


@given(st.integers(-50, 50), st.integers(3, 12), st.sampled_from(["+", "-", "*"]))
def test_problem_set_has_every_pair_in_one_part(low: int, width: int, operation: str) -> None:
    problems = ProblemSet.of(low, low + width, operation)  # type: ignore[arg-type]
    pairs = [(problem.left, problem.right) for problem in problems.train + problems.held_out]
    operands = range(low, low + width + 1)
    assert sorted(pairs) == [(left, right) for left in operands for right in operands]
    assert {problem.operation for problem in problems.train + problems.held_out} == {operation}


def test_problem_set_splits_the_same_every_time() -> None:
    first = ProblemSet.of(10, 49)
    assert first == ProblemSet.of(10, 49)
    assert (len(first.train), len(first.held_out)) == (1440, 160)  # 40 * 40 pairs, a tenth held out


@pytest.mark.parametrize(
    ("low", "high", "got"), [(5, 4, "5 to 4, which has 0 problems"), (5, 5, "5 to 5, which has 1 problems")]
)
def test_problem_set_refuses_a_range_that_leaves_nothing_to_hold_out(low: int, high: int, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        ProblemSet.of(low, high)
    assert (error.value.field, error.value.got) == ("low, high", got)


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


def environment(tokenizer: Qwen2Tokenizer, texts: list[str], **changes: Any) -> ArithmeticEnv:
    config = ArithmeticConfig(**({"tokenizer_name": "demo", "group_size": 2} | changes))
    return ArithmeticEnv(config, Scripted(tokenizer, lambda _: texts), tokenizer)


def test_a_group_has_the_servers_tokens_and_the_environments_scores(tokenizer: Qwen2Tokenizer) -> None:
    env = environment(tokenizer, ["46<|endoftext|>", "<|pad|>46<|endoftext|>"])

    async def scene() -> Any:
        await env.setup()
        item = next(p for p in env.problems.train + env.problems.held_out if p.prompt == "12+34=")
        return await env.collect_trajectories(item)

    group = asyncio.run(scene())
    prompt, digits, end, pad = tokenizer.encode("12+34="), tokenizer.encode("46"), [1], [0]
    assert group.tokens == [prompt + digits + end, prompt + pad + digits + end]
    assert group.masks == [[-100] * 6 + digits + end, [-100] * 6 + pad + digits + end]
    assert group.inference_logprobs == [[1.0] * 6 + [-0.25] * 3, [1.0] * 6 + [-0.25] * 4]
    assert group.scores == [1.0, 0.0]  # padding that a reader would not see is no part of the answer
    assert group.policy_versions == [4, 4]
    assert group.messages[0] == [
        {"role": "user", "content": "12+34="},
        {"role": "assistant", "content": "46"},
    ]


def test_environment_draws_training_problems_by_its_seed(tokenizer: Qwen2Tokenizer) -> None:
    async def drawn(seed: int) -> list[Problem]:
        env = environment(tokenizer, ["1"], low=1, high=5, seed=seed)
        await env.setup()
        found = [next(env.items) for _ in env.problems.train]
        assert {*found} == {*env.problems.train}
        return found

    one, again, other = (asyncio.run(drawn(seed)) for seed in (0, 0, 1))
    assert one == again != other


def test_accuracy_is_the_share_of_right_samples_on_held_out_problems(tokenizer: Qwen2Tokenizer) -> None:
    env = environment(tokenizer, ["46<|endoftext|>", "x<|endoftext|>"], eval_samples=4)

    async def scene() -> tuple[dict[str, float], int]:
        await env.setup()
        return await env.evaluate(), sum(problem.answer == "46" for problem in env.problems.held_out)

    metrics, with_answer_46 = asyncio.run(scene())
    assert with_answer_46 > 0
    # 160 problems, four samples each, two of which say 46.
    assert metrics == {"accuracy": 2 * with_answer_46 / 640, "samples": 640, "rows_failed": 0}


def test_answers_are_as_long_as_the_longest_number_needs(tokenizer: Qwen2Tokenizer) -> None:
    async def max_tokens(**changes: Any) -> int:
        env = environment(tokenizer, ["1"], **changes)
        await env.setup()
        return env.sampling(room=100).max_tokens

    assert asyncio.run(max_tokens()) == 4  # two digits, the end, and one that shows a longer answer
    assert asyncio.run(max_tokens(high=99)) == 5  # 99+99 has three digits
    assert asyncio.run(max_tokens(max_tokens=7)) == 7


def test_settings_that_leave_nothing_to_do_are_refused(tokenizer: Qwen2Tokenizer) -> None:
    with pytest.raises(ConfigError, match="9 to 3"):
        asyncio.run(environment(tokenizer, ["1"], low=9, high=3).setup())
    env = environment(tokenizer, ["1"], max_token_length=6)
    with pytest.raises(PromptTooLong) as too_long:
        env.encode("12+34=")
    assert (too_long.value.field, too_long.value.got) == ("--env.max_token_length", "6")
    assert "6 tokens" in too_long.value.wanted


# As a program ----------------------------------------------------------------------------------------------

FAKE_SERVER = """
import json, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def generate(request):
    body = await request.json()
    n, prompt = body["n"], body["prompt"]["prompt_token_ids"]
    ids = [[20 + i % 2, 21, 1] for i in range(n)]
    return JSONResponse({
        "text": [""] * n, "prompt": None, "finish_reasons": ["stop"] * n, "policy_version": 0, "model": "m",
        "prompt_token_ids": prompt, "token_ids": ids,
        "logprobs": [[[{str(t): -1.0}] for t in row] for row in ids],
    })

uvicorn.run(Starlette(routes=[Route("/generate", generate, methods=["POST"])]), port=0, log_level="info")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Qwen2Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def listening(process: subprocess.Popen[str]) -> str:
    """The address that a server says it listens on."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise AssertionError(f"the server ended: {said}")


def ended(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", FAKE_SERVER], stderr=subprocess.PIPE, text=True)
    yield listening(process)
    ended(process)


@pytest.fixture
def api() -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "environments.api", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with httpx.Client(base_url=listening(process), timeout=60) as client:
        yield client
    ended(process)


TYPE = ("--openai.server_type", "vllm")  # the stand-in has no other route to be asked on


def command(name: str, model: Path, server: str, *more: str) -> list[str]:
    program = [sys.executable, "-m", "environments.arithmetic", name]
    return [*program, "--env.tokenizer_name", str(model), "--openai.base_url", f"{server}/v1", *TYPE, *more]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_delivers_and_leaves_when_told(
    model: Path, server: str, api: httpx.Client, number: signal.Signals
) -> None:
    trainer: dict[str, Any] = {"wandb_group": "g", "wandb_project": "p", "batch_size": 16, "max_token_len": 64}
    trainer |= {"checkpoint_dir": "c", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 100}
    api.post("/register", json=trainer).raise_for_status()
    arguments = command("serve", model, server, "--env.rollout_server_url", str(api.base_url))
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ})
    batches = 0
    while batches < 2 and process.poll() is None:
        batches += api.get("/batch").json()["batch"] is not None
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, batches) == (0, 2), said
    assert "Traceback" not in said
    (environment,) = api.get("/status").json()["environments"]
    assert (environment["name"], environment["connected"]) == ("arithmetic_0", False)


def test_servers_that_never_come_are_named(model: Path) -> None:
    nobody = "http://127.0.0.1:9"  # the discard port: nothing listens there
    more = ("--env.retry_timeout", "0.5", "--env.rollout_server_url", nobody)
    for name, peer in [("serve", "the rollout API"), ("evaluate", "the inference server")]:
        done = run(*command(name, model, nobody, *more))
        assert done.returncode == 1
        assert f"{peer} at {nobody}: " in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), ["COMMAND: ", "serve, process, evaluate"]),
        (("serv",), ["COMMAND: ", "'serv'", "serve, process, evaluate"]),
        (("serve", "--env.grup_size", "4"), ["--env.grup_size: ", "--env.group_size"]),
        (("serve", "--env.tokenizer_name", "/no/such"), ["--env.tokenizer_name: ", "/no/such"]),
    ],
)
def test_mistakes_end_with_status_2_and_one_line(arguments: tuple[str, ...], says: list[str]) -> None:
    done = run(sys.executable, "-m", "environments.arithmetic", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in says)
