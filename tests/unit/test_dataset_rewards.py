"""Rewards: how they are written, which functions TRL's signature allows, what a function may not return."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from environments.config import ConfigError, Settings, parse_settings
from environments.data_config import DataConfig, RewardConfig, TableError, read_reward
from environments.dataset.env import DatasetConfig
from environments.dataset.rewards import Asked, Reward, RewardError, TrainerState, load_reward, weighted_sum
from environments.maths.judge import MathJudge
from environments.scoring import Threads
from environments.tokenizers import after_thinking
from grpo_trainer.cli import app
from grpo_trainer.config.processes import RunConfig
from tests.unit.factories import refusing

# ---------------------------------------------------------------- how they are written


def test_rewards_are_a_function_and_perhaps_a_weight() -> None:
    found = {
        "my.py:f": ("my.py:f", None),
        "my.py:f=0.1": ("my.py:f", 0.1),
        "folder=1/my.py:f": ("folder=1/my.py:f", None),
        "my_package.rewards:f=-2": ("my_package.rewards:f", -2.0),
        "math": ("math", None),
        "exact_match=1e-1": ("exact_match", 0.1),
        "regex:x=5": ("regex:x=5", None),  # all of it is the pattern
        "regex:a:b=0.5": ("regex:a:b=0.5", None),
        "regex=0.5:x=5": ("regex:x=5", 0.5),
    }
    assert {text: read_reward(text) for text in found} == found


def test_rewards_that_cannot_be_read_are_named() -> None:
    got = {text: repr(text) for text in ("my.py", "my.py:", ":f", "mth")}
    got |= {f"my.py:f={weight}": f"the weight {weight!r}" for weight in ("abc", "", "nan")}
    got |= {"regex:": "no pattern", "regex=0.5": "no pattern", "regex=x:a": "the weight 'x'", "regex:(": "'('"}
    for text, part in got.items():
        with refusing(TableError, f"--reward {text}", got=part):
            read_reward(text)


def settings(*arguments: str) -> Settings[Any]:
    return parse_settings(Settings[DatasetConfig], "test", ["--env.tokenizer_name", "model", *arguments])


def test_tables_flags_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rewards = ["my.py:f", {function = "regex:[a,b]=1", weight = 0.5}]\n'
        '[env]\ntokenizer_name = "model"\n[data]\npath = "rows.jsonl"\nheld_out = 5\n'
    )
    typed = settings(
        "--data", "rows.jsonl", "--data.held_out", "5", "--reward", "my.py:f", "--reward=regex=0.5:[a,b]=1"
    )
    assert settings("--config", str(file)) == typed.model_copy(update={"config": file})
    found = [(each.function, each.weight, each.label) for each in typed.rewards]
    assert found == [("my.py:f", 1.0, "f"), ("regex:[a,b]=1", 0.5, "regex")]
    replaced = settings("--config", str(file), "--reward", "my.py:g").rewards
    assert [each.function for each in replaced] == ["my.py:g"]
    file.write_text('rewards = [{function = "a.py:f"}, {function = "b.py:f", name = "other"}]\n')
    assert [each.label for each in settings("--config", str(file)).rewards] == ["f", "other"]


@pytest.mark.parametrize("pattern", [r"\d+\\", "\"x\" 'y'", "é→𝕏", "a=5", "[a,b]{1,2}", '{"a": 1}', "null", " x "])
def test_rewards_pattern_in_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    needed = ["--data", "rows.jsonl", f"--reward=regex=0.5:{pattern}"]
    (reward,) = settings(*needed).rewards
    assert (reward.function, reward.weight) == (f"regex:{pattern}", 0.5)
    assert settings("--reward", f"regex=0.5:{pattern}").rewards == (reward,)
    runs: list[RunConfig] = []
    monkeypatch.setattr("grpo_trainer.run.run", lambda config, console: runs.append(config))
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["run", "--model", "m", *needed], catch_exceptions=False)
    assert tuple(map(RewardConfig.model_validate, runs[0].environments[0].rewards)) == (reward,)


def test_tables_only_a_new_line_is_an_escape_in_a_template() -> None:
    texts = {
        r"{q}\nAnswer:\n\nso": "{q}\nAnswer:\n\nso",
        **{same: same for same in (r"{q} \times \text{{x}} \\", r"{q}: \neq, \nabla f, \nu", r"{q} \\next")},
        r"{q}\nnew\tab": "{q}\nnew\\tab",
    }
    for template, text in texts.items():
        found = settings("--data", "d", "--data.prompt_template", template).data
        assert found.prompt_template == text
        assert DataConfig(path="d", prompt_template=text) == found  # a second reading changes nothing


@pytest.mark.parametrize("template", ["{a.b}", "{a[0]}", "{}", "{0}", "{a!r}", "{a:x>3}"])
def test_tables_a_template_names_columns_and_nothing_else(template: str) -> None:
    with refusing(ConfigError, "--data.prompt_template", got=template):
        settings("--data", "d", "--data.prompt_template", f"x {template}")


@pytest.mark.parametrize(
    ("arguments", "field", "wanted"),
    [
        (["--reward", "a.py:f", "--reward", "b.py:f"], "--reward", "different names"),
        (["--data.held_out", "5"], "--data", "a data set"),
        (["--data", "x", "--data.held_out", "1", "--data.held_out_split", "test"], "--data.held_out", "one of them"),
        (["--data", "x", "--data.prompt_template", "none"], "--data.prompt_template", "column names in braces"),
        (["--data", "x", "--data.prompt_template", "{a"], "--data.prompt_template", "column names in braces"),
    ],
)
def test_tables_that_are_wrong_are_named(arguments: list[str], field: str, wanted: str) -> None:
    with refusing(ConfigError, field, words=[wanted]):
        settings(*arguments)


# ---------------------------------------------------------------- functions

COLUMNS = ("prompt", "solution", "level")


def loaded(code: str, folder: Path, name: str = "f", columns: tuple[str, ...] = COLUMNS, **more: Any) -> Reward:
    file = folder / "rewards_of_a_test.py"
    file.write_text(code)
    return named(f"{file}:{name}", columns, **more)


def named(function: str, columns: tuple[str, ...] = COLUMNS, answer: str | None = "solution", **more: Any) -> Reward:
    config = RewardConfig(function=function, **more)
    return load_reward(config, columns, answer, Threads(4), lambda: MathJudge(1))


def asked(completions: list[Any], answer: str | None = "4", **columns: Any) -> Asked:
    count = len(completions)
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    keywords = {
        "prompt": ["2+2="] * count,
        "solution": ["$4$"] * count,
        "level": [1] * count,
        "completions": completions,
        "prompts": ["2+2="] * count,
        "completion_ids": [[1, 2]] * count,
        "trainer_state": TrainerState(3, 9),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
        **columns,
    }
    return Asked(keywords, texts, [after_thinking(text) for text in texts], answer)


def scores(reward: Reward, completions: list[Any], **columns: Any) -> list[float | None]:
    return asyncio.run(reward.scores(asked(completions, **columns)))


WHAT_TRL_PASSES = """
def f(prompts, completions, completion_ids, trainer_state, level, **kwargs):
    assert prompts == ['2+2='] * 2 and level == [1, 1] and completion_ids == [[1, 2]] * 2
    assert (trainer_state.global_step, trainer_state.max_steps) == (3, 9)
    assert sorted(kwargs) == ['log_extra', 'log_metric', 'solution']  # not `prompt`, as in TRL
    return [1.0, 3.0]
"""


@pytest.mark.parametrize(
    "code",
    [
        "def f(completions, **kwargs):\n    return [float(len(c)) for c in completions]",
        "def f(completions):\n    return [len(c) for c in completions]",
        "async def f(completions, **kwargs):\n    return [float(len(c)) for c in completions]",
        "import numpy\ndef f(completions, **_):\n    return numpy.array([len(c) for c in completions])",
        "class F:\n    async def __call__(self, completions, **_):\n        return [len(c) for c in completions]\n"
        "f = F()",
        "from functools import partial\ndef g(completions, extra, **_):\n    return [len(c) for c in completions]\n"
        "f = partial(g, extra=1)",
        WHAT_TRL_PASSES,
    ],
    ids=["keywords", "one argument", "async", "numpy", "callable", "partial", "trl"],
)
def test_rewards_functions_of_every_kind_are_called(tmp_path: Path, code: str) -> None:
    assert scores(loaded(code, tmp_path), ["a", "bcd"]) == [1.0, 3.0]


def test_rewards_files_of_one_name_are_two_modules_that_import_their_neighbours_and_load_once(tmp_path: Path) -> None:
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        (tmp_path / str(value) / f"neighbour_{value}.py").write_text(f"VALUE = {value}\n")
        (tmp_path / str(value) / "named_alike.py").write_text(
            f"from neighbour_{value} import VALUE\nCALLS = []\n"
            "def f(completions):\n    CALLS.append(1)\n    return [10 * VALUE + len(CALLS)]\ng = f\n"
        )
    rewards = [named(f"{tmp_path}/{value}/named_alike.py:{name}") for value, name in ((1, "f"), (2, "f"), (1, "g"))]
    assert [scores(each, ["a"]) for each in rewards] == [[11.0], [21.0], [12.0]]


POOLED = """
import asyncio
import multiprocessing
import sys

def size(text):
    return len(text)

def f(completions):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map_async(size, completions).get(60)

if __name__ == "__main__":
    from environments.data_config import RewardConfig
    from environments.dataset.rewards import Asked, load_reward
    from environments.scoring import Threads
    reward = load_reward(RewardConfig(function=f"{sys.argv[0]}:f"), (), None, Threads(1), None)
    print(asyncio.run(reward.scores(Asked({"completions": ["a", "bcd"]}, ["a", "bcd"], [], None))))
"""


def test_rewards_a_function_may_use_a_pool_of_new_processes(tmp_path: Path) -> None:
    """In a separate process, since the pool's processes import the main module, too."""
    (tmp_path / "pooled.py").write_text(POOLED)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "pooled.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "[1.0, 3.0]\n", done.stderr


def test_rewards_a_function_changes_only_its_own_arguments(tmp_path: Path) -> None:
    row, talk = [["x", "y"]], [{"role": "assistant", "content": "a"}]
    code = (
        "def f(completions, tests, prompts):\n"
        "    lengths = [len(each[0]) for each in tests]\n"
        "    tests[0][0].pop()\n    tests.pop()\n    completions[0][0].clear()\n    prompts.clear()\n"
        "    return [length + len(tests[0][0]) for length in lengths]\n"
    )
    reward = loaded(code, tmp_path, columns=(*COLUMNS, "tests"))
    shared = asked([talk, talk], tests=[row] * 2)
    assert [asyncio.run(reward.scores(shared)) for _ in "12"] == [[3.0, 3.0]] * 2
    assert row == [["x", "y"]] and talk == [{"role": "assistant", "content": "a"}]
    assert shared.keywords["tests"] == [row] * 2 and len(shared.keywords["prompts"]) == 2


@pytest.mark.parametrize(
    ("value", "place", "got"),
    [
        ("[1.0]", "", "1 scores"),
        ("'12'", "", "'12' (str)"),
        ("1.0", "", "1.0 (float)"),
        ("[1.0, '2']", ", answer 2", "'2' (str)"),
        ("[float('-inf'), 1.0]", ", answer 1", "-inf (float)"),
        ("[[1.0], 2.0]", ", answer 1", "[1.0] (list)"),
    ],
)
def test_rewards_what_is_no_list_of_scores_is_named(tmp_path: Path, value: str, place: str, got: str) -> None:
    reward = loaded(f"def f(completions):\n    return {value}", tmp_path)
    with refusing(RewardError, f"--reward {tmp_path}/rewards_of_a_test.py:f{place}", got=got):
        scores(reward, ["a", "b"])


@pytest.mark.parametrize(
    ("code", "name", "got", "fix"),
    [
        ("def right(completions): ...", "rigt", "rigt", "did you mean right?"),
        ("right = 3", "right", "right", ""),
        ("def f(completions, solutoin): ...", "f", "solutoin", "did you mean solution?"),
        ("def f(completions, /): ...", "f", "completions, positional only", ""),
        ("import nothing_of_this_name\ndef f(completions): ...", "f", "ModuleNotFoundError", ".py:1"),
        ("def f(completions):\n    return [", "f", "SyntaxError", ".py:2"),
        ("x = 1\nraise KeyError('why')", "f", "KeyError: 'why'", "rewards_of_a_test.py:2"),
    ],
)
def test_rewards_unusable_function_is_named(tmp_path: Path, code: str, name: str, got: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(code, tmp_path, name)
    assert got in caught.value.got and fix in str(caught.value)


def test_rewards_files_and_modules_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that lacks a library is not a missing module."""
    (tmp_path / "my_rewards.py").write_text("")
    (tmp_path / "lacking_package").mkdir()
    (tmp_path / "lacking_package" / "__init__.py").write_text("import no_such_library\n")
    (tmp_path / "lacking_package" / "rewards.py").write_text("def f(completions): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fixes = {
        "my_rewadrs.py:f": "my_rewards.py?",
        "no_such_module:f": "FILE.py",
        "lacking_package.rewards:f": "lacking_package/__init__.py:1",
    }
    for function, fix in fixes.items():
        with pytest.raises(ConfigError) as caught:
            named(function)
        assert fix in str(caught.value)


@pytest.mark.parametrize("needs", ["signal.signal(signal.SIGALRM, signal.SIG_DFL)", "math_verify.parse('4')"])
def test_rewards_a_function_that_needs_the_main_thread_is_told_apart(tmp_path: Path, needs: str) -> None:
    code = f"import math_verify, signal\ndef f(completions):\n    {needs}\n    return [1.0]\n"
    with pytest.raises(ValueError, match="thread") as caught:
        scores(loaded(code, tmp_path), ["a"])
    assert any("main_thread" in note for note in caught.value.__notes__)
    assert scores(loaded(code, tmp_path, main_thread=True), ["a"]) == [1.0]


async def test_rewards_async_functions_of_a_group_overlap(tmp_path: Path) -> None:
    code = (
        "import asyncio\nMET = None\n"
        "async def f(completions):\n    global MET\n    MET = MET or asyncio.Barrier(2)\n    await MET.wait()\n"
        "    return [1.0]\n"
    )
    reward = loaded(code, tmp_path)
    async with asyncio.timeout(20):
        assert await asyncio.gather(*(reward.scores(asked(["a"])) for _ in "12")) == [[1.0], [1.0]]


# ---------------------------------------------------------------- built-in rewards


BUILT_IN: list[tuple[str, str | None, list[str], list[float | None]]] = [
    ("exact_match", "4", ["4", " 4\n", "44", "<think>5</think> 4"], [1.0, 1.0, 0.0, 1.0]),
    ("exact_match", None, ["4"], [None]),
    (r"regex:^\d+$", None, ["4", "four", "12"], [1.0, 0.0, 1.0]),
    ("regex:a=5", None, ["a=5", "a"], [1.0, 0.0]),
    ("math", r"\frac{1}{2}", [r"\boxed{0.5}", r"so it is $\frac{2}{4}$", "three"], [1.0, 1.0, 0.0]),
    ("math", r"First … \boxed{12}", ["The answer is 12.", "13"], [1.0, 0.0]),
    ("math", "$4$", ["4", "5"], [1.0, 0.0]),
    ("math", "18", [r"\boxed{18}", "17, no: 18.", r"18 is \boxed{17}", "17=18 or 19"], [1.0, 1.0, 0.0, 0.0]),
    ("math", "18", [r"\boxed{1+17}", r"\boxed{17=18}", r"\boxed{\$18}"], [0.0, 0.0, 1.0]),
    ("math", None, ["4"], [None]),
]


async def test_rewards_built_in_and_a_search_that_does_not_end_is_given_up() -> None:
    judge = MathJudge(1)

    async def scores_of(function: str, answer: str | None, texts: list[str]) -> list[float | None]:
        reward = load_reward(RewardConfig(function=function), COLUMNS, "solution", Threads(4), lambda: judge)
        return await reward.scores(asked(texts, answer))

    try:
        for function, answer, texts, expected in BUILT_IN:
            assert await scores_of(function, answer, texts) == expected, (function, answer)
        judge.limit_s = 0.5
        with pytest.raises(RewardError) as caught:
            await scores_of(r"regex:^(\w+\s?)+\.$", None, ["a" * 40])
        assert "0.5" in str(caught.value.got)
        judge.limit_s = 30.0
        assert await scores_of("regex:é$", None, ["caf\u00e9", "x"]) == [1.0, 0.0]
    finally:
        await judge.close()


@pytest.mark.parametrize("function", ["exact_match", "math"])
def test_rewards_that_compare_need_right_answers(function: str) -> None:
    with refusing(ConfigError, f"--reward {function}", words=["answer_column"]):
        named(function, ("prompt",), None)


def test_rewards_none_and_nan_leave_a_reward_out_of_the_sum(tmp_path: Path) -> None:
    code = "import numpy\ndef f(completions):\n    return numpy.array([1.0, None], dtype=float)\n"
    first, second = loaded(code, tmp_path), loaded(code, tmp_path, weight=0.5)
    assert scores(first, ["a", "b"]) == [1.0, None]
    # 1 + 0.5 · 2 = 2; 1; 0.5 · 4 = 2; none applies
    assert weighted_sum([first, second], [[1.0, 1.0, None, None], [2.0, None, 4.0, None]]) == [2.0, 1.0, 2.0, None]
