"""Environments of the `verifiers` library: with a policy that answers from a script, and in a run that trains."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from environments.demo_model.model import build_tokenizer
from environments.from_verifiers.__main__ import folder
from tests.processes import ROOT, running, tail
from tests.runs import jsonl, trained
from tests.stand_ins import Asked, Reply, answering, generated

pytestmark = pytest.mark.timeout(600)

GAP = "alignment/logprob_diff_max"

ENVIRONMENT = '''
"""Two tasksets: sums in one turn, and sums that a tool makes."""

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def digits(self, trace: vf.Trace) -> float:
        return sum(c.isdigit() for c in trace.last_reply) / max(1, len(trace.last_reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    count: int = 40


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        pairs = [(10 + i, 20 + i) for i in range(self.config.count)]
        return [SumTask(Sum(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task) for a, b in pairs]


__all__ = ["Sums"]
'''

WITH_TOOL = '''
"""Sums that a tool makes."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class Sum(vf.TaskData):
    answer: str = ""


class ToolConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[Sum, vf.State, ToolConfig]):
    @classmethod
    def toolsets(cls, config: ToolConfig) -> list[vf.Toolset]:
        return [Adder(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(self.data.answer))


class SumsConfig(vf.TasksetConfig):
    task: ToolConfig = ToolConfig()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        return [SumTask(Sum(prompt="2+3?", answer="5"), self.config.task)]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """verifiers in a separate virtual environment, kept in the user's cache for the next time."""
    done = subprocess.run(
        [sys.executable, "-m", "environments.from_verifiers", "install"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"verifiers can't be installed here: {done.stderr.strip().splitlines()[-1:]}")
    script = tmp_path_factory.mktemp("uv") / "program.py"
    script.write_text('# /// script\n# requires-python = ">=3.10"\n# dependencies = ["openai", "mcp==2.0.0"]\n# ///\n')
    command = [str(folder() / "bin" / "uv"), "sync", "--script", str(script), "--no-config", "--quiet"]
    prepared = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if prepared.returncode:
        pytest.skip(f"verifiers' programs can't be prepared here: {prepared.stderr.strip().splitlines()[-1:]}")


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """The environments as modules that Python finds."""
    place = tmp_path / "packages"
    place.mkdir()
    (place / "plain_sums.py").write_text(ENVIRONMENT)
    (place / "tool_sums.py").write_text(WITH_TOOL)
    judged = "return float(trace.last_reply == self.data.answer)"
    (place / "lost_sums.py").write_text(ENVIRONMENT.replace(judged, 'raise SystemExit("no judge")'))
    return {"PYTHONPATH": f"{place}:{ROOT}", "HF_HUB_OFFLINE": "1"}


def run(arguments: list[str], log: Path, env: dict[str, str]) -> int:
    """`python -m ARGUMENTS`, everything it says in a file."""
    with running("-m", *arguments, log=log, env=env) as process:
        return process.wait(450)


def chat_tokenizer(place: Path) -> PreTrainedTokenizerFast:
    """A token per byte and those of Qwen3's chats."""
    made = build_tokenizer()
    specials = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    made.add_special_tokens({"additional_special_tokens": [*specials, "<think>", "</think>"]})
    # Qwen2's own class would call <|endoftext|> its unknown token, as no real tokenizer of Qwen3 does.
    saved = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token="<|im_end|>")
    saved.save_pretrained(place)
    return saved


@contextmanager
def scripted(tokenizer: PreTrainedTokenizerFast, turns: list[str], prompts: list[str]) -> Iterator[str]:
    """A server whose policy says these, turn by turn."""

    def handle(asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply(json={"boot_id": "b", "policy_version": 7} if asked.path == "/bridge/info" else {})
        prompts.append(str(tokenizer.decode(asked.json()["prompt"]["prompt_token_ids"])))
        row = tokenizer.encode(turns[prompts[-1].count("<|im_start|>assistant") - 1])
        return Reply(json=generated(asked.json(), row, version=7))

    with answering(handle) as url:
        yield f"{url}/v1"


def test_several_turns_with_a_tool_are_the_servers_tokens(
    installed: None, tmp_path: Path, packages: dict[str, str]
) -> None:
    call = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    tokenizer, prompts, log = chat_tokenizer(tmp_path / "tokenizer"), [], tmp_path / "log"
    with scripted(tokenizer, [call, "It is 5<|im_end|>"], prompts) as url:
        command = ["environments.from_verifiers", "process", "--env.env_id", "tool_sums", "--groups", "1"]
        command += ["--env.tokenizer_name", str(tmp_path / "tokenizer"), "--env.renderer", "qwen3"]
        command += ["--env.group_size", "2", "--openai.base_url", url]
        command += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        assert run(command, log, packages) == 0, tail(log)
    (group,) = jsonl(tmp_path / "groups.jsonl")
    assert group["scores"] == [1.0, 1.0] and group["policy_versions"] == [7, 7]
    sampled = [token for token in group["masks"][0] if token != -100]
    assert tokenizer.decode(sampled) == call + "It is 5<|im_end|>"
    for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        assert all(m in (-100, token) for m, token in zip(mask, tokens, strict=True))
        assert logprobs == [1.0 if m == -100 else -0.5 for m in mask]
    assert "<tool_response>\n5\n</tool_response>" in tokenizer.decode(group["tokens"][0])
    assert [message["role"] for message in group["messages"][0]] == ["user", "assistant", "tool", "assistant"]
    assert len(prompts) == 4 and '"name": "adder_add"' in prompts[0]


def test_an_environment_of_verifiers_trains(
    installed: None, demo_model: Path, tmp_path: Path, packages: dict[str, str]
) -> None:
    run_dir = tmp_path / "run"
    own = {"env_id": "plain_sums", "env_args": '{"taskset": {"count": 30}}', "group_size": 4, "max_tokens": 4}
    options = {"batch_size": 8, "env": "verifiers", **{f"env.{name}": value for name, value in own.items()}}
    done = trained(demo_model, run_dir, variables=packages, **options)
    assert [row["step"] for row in done] == [1, 2, 3]
    assert all(row["batch/sequences"] == 8 and 0 < row["reward/mean"] <= 1.1 for row in done)
    # The server's ids and logprobs, at its temperature. A step whose groups have no signal moves nothing.
    assert next(row[GAP] for row in done if GAP in row) < 1e-3
    reported = jsonl(run_dir / "logs" / "env-verifiers.metrics.jsonl")
    assert any({"verifiers_0/right", "verifiers_0/digits", "verifiers_0/length"} <= row.keys() for row in reported)


def test_an_evaluation_whose_rollouts_fail_ends_with_the_reason(
    installed: None, tmp_path: Path, packages: dict[str, str]
) -> None:
    tokenizer, log = chat_tokenizer(tmp_path / "tokenizer"), tmp_path / "log"
    with scripted(tokenizer, ["30<|im_end|>"], []) as url:
        command = ["environments.from_verifiers", "evaluate", "--env.env_id", "lost_sums", "--openai.base_url", url]
        command += ["--env.tokenizer_name", str(tmp_path / "tokenizer"), "--env.renderer", "qwen3"]
        assert run([*command, "--env.eval_tasks", "4"], log, packages) == 1
    assert re.search(r"RolloutFailed\b.*\blost_sums: ", tail(log)) and "no judge" in tail(log)
