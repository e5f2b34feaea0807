"""`grpo train` joins an API, a server and an environment that were started by hand, as docs/operating.md says."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes import ROOT, answers, free_port, running, tail, wait_for
from tests.runs import rows

pytestmark = pytest.mark.timeout(600)


def page_commands(model: Path, folder: Path, ports: dict[str, int]) -> list[list[str]]:
    """The four `grpo …` commands of the page's section, with this test's model, folder and ports."""
    text = (ROOT / "docs" / "operating.md").read_text()
    section = text.split("## Each process by hand")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    for old, new in {
        "runs/demo-model": str(model),
        "runs/by-hand": str(folder),
        **{p: str(n) for p, n in ports.items()},
    }.items():
        assert old in block, f"the page's commands do not mention {old}"
        block = block.replace(old, new)
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line.removesuffix("&"))[1:] for line in lines if line.startswith("grpo ")]


def test_four_commands_of_the_page_train_together(demo_model: Path, tmp_path: Path) -> None:
    ports = {"8000": free_port(), "9001": free_port()}
    api, server, environment, train = page_commands(demo_model, tmp_path / "run", ports)
    logs = {name: tmp_path / f"{name}.log" for name in ("api", "server", "env", "train")}
    with ExitStack() as stack:
        stack.enter_context(running("-m", "grpo_trainer", *api, log=logs["api"]))
        stack.enter_context(running("-m", "grpo_trainer", *server, log=logs["server"]))
        stack.enter_context(running("-m", "grpo_trainer", *environment, log=logs["env"]))
        wait_for("the API", lambda: answers(f"http://127.0.0.1:{ports['8000']}/"), logs["api"], 60)
        trainer = stack.enter_context(running("-m", "grpo_trainer", *train, log=logs["train"]))
        wait_for("the trainer is done", lambda: trainer.poll() is not None, logs["train"], 400)
        assert trainer.returncode == 0, tail(logs["train"])
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 5
    assert "bridge proved" in logs["train"].read_text()
