"""One real run for each weight bridge: `grpo run` with a real vLLM learns from new versions, ends, and is resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.processes import assert_ended, running, tail
from tests.runs import arguments, check_format, family_until_the_end, of_mode, rows

pytestmark = pytest.mark.timeout(600)

RELAUNCHED = ("lora_restart", "none")
SERVED = [0, 2, 2, 4, 4]
"""Versions that a server which is relaunched every two steps, and at each start of the run, has after each step."""


@pytest.mark.parametrize("mode", ["lora_only", "shared_vllm", "broadcast", *RELAUNCHED])
def test_run_is_resumed(demo_model: Path, tmp_path: Path, mode: str) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    before = {file.name: file.read_bytes() for file in demo_model.iterdir()}
    # Without a bound all three batches may be sampled before the first publish.
    traced = {"trace": True} if mode in RELAUNCHED else {"trace": True, "max-staleness": 1}
    for steps, more in ((3, traced), (5, {"resume": "auto"})):
        words = arguments(demo_model, run_dir, **of_mode(mode, **{"training-steps": steps, **more}))
        if mode in ("lora_only", "none") and "resume" in more:  # all else is in the run's folder
            words = [*words[:3], "--resume", str(run_dir), "--training-steps", str(steps)]
        with running(*words, log=log) as process:
            members = family_until_the_end(process, log)
            assert process.wait() == 0, tail(log)
        assert members
        assert_ended(members)
        assert f"Step {steps}/{steps}" in log.read_text()
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3, 4, 5]
    of_environments = {key for row in done for key in row if key.startswith("reward/env_")}
    assert of_environments == {"reward/env_0", "reward/env_0_std"}, "the resumed environment is the same one"
    versions = [row["publish/version"] for row in done]
    assert versions == sorted(set(versions))
    fresh = [row for row in done if row["rollout/staleness_max"] == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)  # same weights, same logprobs
    assert all(row["train/changed_fraction"] > 0 for row in done if not row["train/skipped"])
    said = (run_dir / "logs" / "trainer.log").read_text()
    if mode in RELAUNCHED:
        check_relaunches(run_dir, done, said)
    else:
        assert said.count("bridge proved") == 2
    assert not list((run_dir / "checkpoints").glob(".*")), "remains of a write"
    assert json.loads((run_dir / "versions.json").read_text())[0]["vllm"]
    assert not (run_dir / "config" / "vllm_bridge_config.json").exists()
    assert {file.name: file.read_bytes() for file in demo_model.iterdir()} == before
    check_final(run_dir / "checkpoints", demo_model, mode)
    check_timeline(run_dir / "trace.json", mode)


def check_timeline(trace: Path, mode: str) -> None:
    """Every process recorded what it did in the first three steps, in a form that Perfetto reads."""
    events = json.loads(trace.read_text())
    check_format(events)
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    seen = {(processes[each["pid"]], each["name"]) for each in events if each["ph"] in "Xb"}
    fenced = {("server", "fence")}
    server = {"lora_only": {("server", "load adapter")}, "shared_vllm": fenced, "broadcast": fenced}.get(mode, set())
    assert seen >= server | {
        *(("env-arithmetic", stage) for stage in ("generate", "score", "post")),
        *(("trainer", stage) for stage in ("wait", "fetch", "prepare", "forward_backward", "optimizer")),
        *(("trainer", stage) for stage in ("publish", "save")),
    }
    generated = [each for each in events if each["name"] == "generate" and each["ph"] == "b"]
    assert {each["args"].get("version") for each in generated} > {0} or mode in RELAUNCHED


def check_relaunches(run_dir: Path, done: list[dict[str, Any]], said: str) -> None:
    """The server was relaunched on every second version."""
    assert [row["publish/served_version"] for row in done] == SERVED
    assert [row["step"] for row in done if "publish/start_time" in row] == [2, 4]
    assert re.findall(r"bridge proved.*\bversion (\d+)", said) == ["0", "2", "3", "4"]
    # The batch of step 5 was sampled by version 4 less its staleness: by one that a relaunch brought.
    assert 4 - done[-1]["rollout/staleness_max"] >= 2
    lines = (run_dir / "logs" / "env-arithmetic.log").read_text().splitlines()
    slow = ("no progress for", "waiting for")  # of a relaunch that takes a minute or more
    warned = [line for line in lines if " WARNING " in line and not any(words in line for words in slow)]
    assert not warned, "the server's absence was expected"


def check_final(checkpoints: Path, base: Path, mode: str) -> None:
    """What a run leaves is what others load, and not what it started from."""
    if mode.startswith("lora"):
        state = load_file(checkpoints / "adapter_final" / "adapter_model.safetensors")
        assert any(tensor.any() for name, tensor in state.items() if "lora_B" in name)
        return
    folders = (checkpoints / "model_final", base)
    trained, started_from = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    pairs = zip(trained.parameters(), started_from.parameters(), strict=True)
    assert not any(torch.equal(new, old) for new, old in pairs), "every weight is trained"
