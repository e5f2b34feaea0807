"""An environment is tried before a run starts: real processes, without a server."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from rich.console import Console

from environments import base
from environments.__main__ import main
from environments.arithmetic import ArithmeticConfig, ArithmeticEnv
from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ServerConfig
from environments.conversation import Conversation
from environments.demo_model.model import build_tokenizer
from environments.from_verifiers.config import VerifiersConfig
from environments.gsm8k import Gsm8kConfig
from environments.multi_turn import MultiTurnConfig
from environments.peers.inference import Completion
from environments.running import cli
from environments.running.trial import MOST_REQUESTS, REPORT_VARIABLE, report
from environments.scoring import settled
from grpo_common.errors import Problem
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.errors import ConfigError
from grpo_trainer.launch import trial
from grpo_trainer.launch.trial import Trial, trying
from grpo_trainer.run import run
from tests.stand_ins import Scripted, scripted

pytestmark = pytest.mark.usefixtures("warm_environments")

ROOT = Path(__file__).parents[2]
SMALLEST = re.search(r"\n    from environments.*?\n(?=\nAn environment)", str(base.__doc__), re.DOTALL)
assert SMALLEST is not None
CAPITALS = "\n".join(line.removeprefix("    ") for line in SMALLEST[0].strip("\n").splitlines())
"""The environment in the docstring of `environments/base.py`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 240.0)  # 20 s are too few on a busy machine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def write(code: str, **replaced: str) -> str:
    """Write an environment's file and return its name."""
    for old, new in replaced.items():
        code = code.replace(old, new)
    Path("mine.py").write_text(code)
    return "mine.py"


def run_of(name: str, model: Path, **env: object) -> RunConfig:
    file = {"environments": [{"name": name, "env": env}]}
    return build_run(file, {"model_name": str(model), "weight_bridge_mode": "lora_only"})


def tried(name: str, model: Path, **env: object) -> Trial:
    with trying(run_of(name, model, **env)) as trials:
        (outcome,) = trials.outcomes()
    return outcome


def test_the_smallest_environment_of_the_docstring_is_tried_and_scores(model: Path) -> None:
    outcome = tried(write(CAPITALS), model)
    assert outcome.problems == ()
    # "The capital of France is " has 25 characters, one token each; Japan has one less. --seq-len leaves the room.
    assert re.search(r"prompt of 2[45] tokens.* scores 0$", outcome.found)


SECOND = f"{CAPITALS}\n\nclass Second(Capitals):\n    pass\n\n\nclass Third(Capitals):\n    pass\n"
CUT = (
    "from environments.peers.inference import Sampling\n"
    f"{CAPITALS}\n    def sampling(self, room):\n        return Sampling(room, top_p=0.9)\n"
)
ASKS = "        await self.server.ask('/v1/models')\n"
EVALUATES = (
    CAPITALS
    + """

    async def evaluate(self):
        from statistics import fmean
        from environments.running.evaluation import examine_each
        found, failed = await examine_each(self, [1], self._examine)
        return {"accuracy": fmean(found), **failed}

    async def _examine(self, row):
        await self.complete("x", 1)
        return (await self.score_group(("France", "Paris"), await self.complete("x", 1)))[0]
"""
)


def tried_here(code: str, model: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """Try an environment in this process, which has imported the tokenizer's library, and return the report."""
    monkeypatch.setenv(REPORT_VARIABLE, "report.json")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    report.cache_clear()
    arguments = [write(code), "try", "--env.tokenizer_name", str(model), "--env.max_token_length", "999", *options]
    try:
        with pytest.raises(SystemExit):
            main(arguments)
    finally:
        report.cache_clear()
        sys.modules.pop("mine", None)
    for thread in [thread for thread in threading.enumerate() if thread.name == "trial"]:
        thread.join(60)  # it looks at the stacks of all threads, which takes the time of all that come later
        assert not thread.is_alive()
    return json.loads(Path("report.json").read_text())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\n", ["no class", "BaseEnv"]),
        (SECOND, ["Second, Third", "mine.py:Second"]),
        (CAPITALS.replace("def prompt(", "def prompt)("), ["SyntaxError", "mine.py:8"]),
        (CAPITALS.replace("item[1])", 'item["capitol"])'), ["score()", "mine.py:12", "TypeError", "capitol"]),
        (CAPITALS.replace("item[0]", "item[9]"), ["prompt()", "mine.py:9", "IndexError"]),
        (CAPITALS.replace("Shuffled([", "Shuffled(no_rows or ["), ["setup()", "mine.py:6", "NameError"]),
        (CAPITALS.replace("def score(", "def scored_as("), ["score_group()"]),
        (CAPITALS.replace("def setup(", "def set_up("), ["get_next_item()", "self.items"]),
        (CAPITALS.replace("return float(answer", "return 'yes' if item else float(answer"), ["score()", "yes"]),
        ("import no_such_module\n" + CAPITALS, ["import", "mine.py:1", "no_such_module"]),
        (CAPITALS.replace("The capital", "x" * 999), ["max_token_length"]),
        (CUT, ["Capitals: sampling()", "top_p=0.9", "evaluate()"]),
        (EVALUATES.replace("fmean(", "no_mean("), ["evaluate()", "mine.py:18", "NameError"]),
        (EVALUATES.replace("self.score_group(", "self.no_score("), ["evaluate()", "mine.py:22", "no_score"]),
        (
            CAPITALS.replace("def setup", "async def setup").replace("        self.items", f"{ASKS}        self.items"),
            ["setup()", "mine.py:6", "TypeError", "body"],
        ),
        (CAPITALS, ["--env.tokenizer_name", "ids below 5"]),
    ],
    ids=[
        *("no_class", "two_classes", "syntax", "typo_in_score", "prompt", "setup", "no_score", "no_items", "no_number"),
        *("import", "no_room", "top_p", "evaluate", "each_row", "wrong_request", "unknown_token"),
    ],
)
def test_trial_names_the_wrong_line(model: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: list[str]) -> None:
    if "ids below" in words[-1]:
        small = Path("small")
        shutil.copytree(model, small)
        (small / "config.json").write_text('{"vocab_size": 5}')
        model = small
    (problem,) = tried_here(code, model, monkeypatch)["problems"]
    said = str(Problem(**problem))
    assert all(word in said for word in words), said


def test_an_evaluation_is_tried_with_made_up_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows of two requests each: 8 rows are answered."""
    found = tried_here(EVALUATES.replace("[1]", "[1] * 100"), model, monkeypatch)["found"]
    assert found.endswith("; evaluate() returns accuracy, rows_failed")
    asks = CAPITALS + "\n    async def evaluate(self):\n        return await self.server.ask('/v1/models', {})\n"
    assert str(MOST_REQUESTS) in tried_here(asks, model, monkeypatch)["found"].rpartition(";")[2]
    kept = CAPITALS + "\n    @classmethod\n    def config_init(cls):\n        return {}\n"
    assert "config_init()" in tried_here(kept, model, monkeypatch)["found"].rpartition(";")[2]


WRAPS = """

    async def evaluate(self):
        import asyncio
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(self.complete("x", 1))
        except Exception as error:
            raise RuntimeError("no evaluation") from error
"""


def test_an_evaluation_that_needs_a_server_may_say_so_by_another_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(MOST_REQUESTS) in tried_here(CAPITALS + WRAPS, model, monkeypatch)["found"].rpartition(";")[2]
    wrong = WRAPS.replace("range(20)", "range(2)").replace('self.complete("x", 1)', "self.no_answer(1)")
    (problem,) = tried_here(CAPITALS + wrong, model, monkeypatch)["problems"]
    assert "evaluate()" in str(Problem(**problem))


def test_an_environment_that_ends_its_process_is_refused(model: Path) -> None:
    (problem,) = tried(write("import os\nos._exit(7)\n"), model).problems
    assert problem.field == "--env mine.py" and "import" in problem.summary and "exit code 7" in problem.got


def test_trial_step_without_end_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, at = CAPITALS.replace("        return float", f"{SLEEPS}        return float"), "score() at mine.py:13"
    with trying(run_of(write(code), model)) as trials:
        (running,) = trials
        while running.doing != at and not running.is_over:
            running.look()
            time.sleep(0.05)
        monkeypatch.setattr(trial, "LIMIT_S", running.seconds + 2.0)
        monkeypatch.setattr(trial, "SLOW_S", 0.0)
        lines: list[str] = []
        (outcome,) = trials.outcomes(lines.append)
    assert len(lines) == 1 and "mine.py" in lines[0] and at in lines[0], "it is named before it is given up"
    assert outcome.problems == () and outcome.doing == at, outcome
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_trial_that_is_given_up_may_tidy_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tidies = """        import signal, sys, time; from pathlib import Path
        def tidy(*_):
            Path("tidied").touch(); sys.exit(0)
        signal.signal(signal.SIGTERM, tidy); Path("ready").touch(); time.sleep(600)
"""
    code = CAPITALS.replace("        self.items", tidies + "        self.items")
    monkeypatch.setattr(trial, "END_S", 240.0)
    with trying(run_of(write(code), model)) as (running,):
        while not Path("ready").exists():
            assert running._process.exit_code is None, running._process.last_words()
            time.sleep(0.05)
    assert Path("tidied").exists()


SLEEPS = """        import subprocess, time; from pathlib import Path
        Path("child").write_text(str(subprocess.Popen(["sleep", "600"]).pid)); time.sleep(600)
"""


def test_trial_of_a_named_class_and_of_a_file_with_neighbours(model: Path) -> None:
    write(SECOND)
    assert not tried("mine:Third", model).problems
    (problem,) = tried("mine.py:Fourth", model).problems
    assert "Fourth" in problem.wanted

    Path("sub").mkdir()
    Path("sub/near.py").write_text("NAME = 'Spain'\n")
    Path("sub/mine.py").write_text(f"import near\n{CAPITALS}\n\nif __name__ == '__main__':\n    Capitals.cli()\n")
    assert not tried("sub/mine.py", model).problems


def test_trial_refuses_a_group_of_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = tried(write(CAPITALS), model, group_size=1).problems
    assert problem.field == "--env mine.py: --env.group_size" and problem.got == "1"
    own_groups = f"{CAPITALS}\n    async def collect_trajectories(self, item):\n        return None\n"
    facts = tried_here(own_groups, model, monkeypatch, "--env.group_size", "1")
    assert facts["problems"] == [] and facts["group_size"] is None


def test_trial_refuses_groups_of_a_class_that_the_run_has_not_planned(model: Path) -> None:
    config = (
        "from environments.config import BaseEnvConfig\n\n\nclass Sixes(BaseEnvConfig):\n    group_size: int = 6\n\n\n"
    )
    sixes = config + f"{CAPITALS}\n    env_config_cls = Sixes\n"
    (problem,) = tried(write(sixes), model).problems
    assert problem.field == "--env mine.py: --env.group_size" and problem.fix == "add --env.group_size 6"
    assert tried("mine.py", model, group_size=6).problems == ()
    file = {"environments": [{"name": "mine.py", "env": {}}, {"name": "mine.py", "env": {"group_size": 10}}]}
    flags = {"model_name": str(model), "batch_size": 16, "gradient_accumulation_steps": 1}
    with trying(build_run(file, flags)) as trials:
        assert [each.problems for each in trials.outcomes()] == [(), ()], "6 + 10 is a step"


def test_a_setup_that_asks_the_server_is_tried_until_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = "        await self.complete('hi', 1)\n        self.items"
    code = CAPITALS.replace("def setup", "async def setup").replace("        self.items", asks)
    facts = tried_here(code, model, monkeypatch)
    assert facts["problems"] == [] and "setup()" in facts["found"]


def test_what_a_run_does_not_try(model: Path) -> None:
    with trying(run_of("arithmetic", model)) as trials:
        assert trials.outcomes() == [], "only its settings can be wrong, and they are checked"
    with trying(run_of("arithmetic", model), everything=True) as trials:
        (outcome,) = trials.outcomes()
    assert "tokens" in outcome.found
    config = build_run(
        {}, {"model_name": str(model), "weight_bridge_mode": "lora_only", "try": False, "env": write("1/0")}
    )
    with trying(config) as trials:
        assert trials.outcomes() == []


@pytest.mark.parametrize("is_own", [True, False])
def test_cli_ends_only_a_process_that_is_its_own(is_own: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def processed(env: BaseEnv[Any], groups: int) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(cli, "process", processed)
    words = ["process", "--env.tokenizer_name", str(model), "--openai.base_url", "http://127.0.0.1:9/v1"]
    monkeypatch.setattr(sys, "argv", ["mine.py", *words])
    hard = []  # what could end the process later, from another thread or in a signal handler
    monkeypatch.setattr(cli, "_call_after", lambda seconds, function: hard.append(seconds))
    monkeypatch.setattr(cli, "_stop_on_signals", lambda stop, status: hard.append(status))
    with pytest.raises(SystemExit) as ended:
        ArithmeticEnv.cli(None if is_own else words)
    assert ended.value.code == 0 and hard == ([1, cli.CLOSE_S] if is_own else [])


def test_no_command_ends_in_silence(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FAULTS of a module that only defined a class: `serve` printed nothing and exited with 0."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for code, words, status, said in (
        ("x = 1\n", ["serve"], 2, "no class"),
        (CAPITALS, ["try", "--env.tokenizer_name", str(model)], 0, "capitals: "),
    ):
        with pytest.raises(SystemExit, match=str(status)):
            main([write(code), *words])
        sys.modules.pop("mine", None)
        assert said in "".join(capsys.readouterr())


def test_a_run_refuses_a_wrong_environment_before_it_starts_anything(model: Path) -> None:
    write(CAPITALS.replace("item[1])", 'item["capitol"])'))
    (model / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 258}')
    flags = {"model_name": str(model), "weight_bridge_mode": "lora_only", "env": "mine.py", "run_dir": "run"}
    with pytest.raises(ConfigError) as refused:
        run(build_run({}, {**flags, "api.port": 0, "server.port": 0}), Console(quiet=True))
    assert "score()" in str(refused.value) and "mine.py:12" in str(refused.value) and not Path("run").exists()


# the guide's environments --------------------------------------------------------------------------------------------


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


SAYS = "40<|endoftext|>", "46<|endoftext|>"


async def test_guide_environment_scores(tens: type[BaseEnv[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    env = scripted(tens, *SAYS)

    await settled(env.setup())
    forties, fifties = cast("Any", [await env.collect_trajectories(item) for item in ((12, 34), (10, 49))])
    assert len(env.prompt(await settled(env.get_next_item()))) == len("12+34=")
    await cli.evaluate(env)
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
def test_guide_end_token_is_not_scored(tens: type[BaseEnv[Any]], said: str, finish_reason: str, text: str) -> None:
    """As in Gemma and Phi-3, the end of a turn is another token than the tokenizer's `eos_token`."""
    env = scripted(tens)
    env.tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    ids = env.tokenizer.encode(said)
    assert env.decode(Completion([1], ids, [-0.5] * len(ids), "", finish_reason, 1)) == text


def test_messages_may_be_left_out(tens: type[BaseEnv[Any]]) -> None:
    env = scripted(tens, *SAYS, include_messages=False)
    group = asyncio.run(env.collect_trajectories((12, 34)))
    assert group is not None and group.messages is None


async def test_the_guides_port_of_an_environment_of_atropos_works() -> None:
    env = scripted(shown("PortedCapitals"), "Paris<|endoftext|>", "Rome<|endoftext|>")

    await settled(env.setup())
    group = await env.collect_trajectories({"country": "France", "capital": "Paris"})
    assert group is not None and group.scores == [1.0, 0.0]
    assert env.sampling(room=100).max_tokens == 32


@pytest.mark.parametrize(("said", "heard"), [("20", "Higher."), ("90", "Lower."), ("50", None), ("what?", None)])
def test_the_guides_conversation_says_higher_or_lower(said: str, heard: str | None) -> None:
    env = scripted(shown("Guess"))
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
