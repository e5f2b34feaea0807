"""What runs processes on another node: an agent, here without Ray, and the process as the supervisor sees it."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_common.status import VARIABLE, parse
from grpo_trainer.launch import agent as agent_module
from grpo_trainer.launch import process
from grpo_trainer.launch.agent import Line, NodeAgent, RemoteProcess, passed_on, seeing
from grpo_trainer.launch.places import Node, Place
from grpo_trainer.launch.plan import ProcessSpec
from tests.unit.test_supervisor import SAYS, STUBBORN, assert_gone

NODE = Node("b", "10.0.0.2", 2)


def spec(name: str, code: str, *arguments: str, **options: Any) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code, *arguments), **options)


def in_a_process(work: Callable[[Path], Any], folder: Path) -> Any:
    """Return a function's result from a separate process: an agent changes its folder and its environment."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, (folder,))


def finished(agent: NodeAgent, name: str) -> tuple[list[Line], int]:
    """The lines and the exit code of a process."""
    lines: list[Line] = []
    while True:
        news = agent.news()
        lines += news.lines
        if name in news.ended:
            return lines, news.ended[name]


def lines_of_a_process(folder: Path) -> tuple[list[Line], int]:
    agent = NodeAgent(str(folder / "work"), {})
    agent.start(spec("env", "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"), {})
    return finished(agent, "env")


def test_an_agent_tells_lines_before_the_exit_code(tmp_path: Path) -> None:
    lines, code = in_a_process(lines_of_a_process, tmp_path)
    assert code == 3 and {(line.is_error, line.text) for line in lines} == {(False, "a"), (True, "b")}


def surroundings(folder: Path) -> dict[str, Any]:
    os.environ |= {"RAY_JOB_ID": "7", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "4,6"}
    agent = NodeAgent(str(folder / "work"), {"HF_HOME": "/h"})
    code = """
import json, os, pathlib, stat, sys
path = pathlib.Path(sys.argv[1])
mode = stat.S_IMODE(path.stat().st_mode)
print(json.dumps({"cwd": os.getcwd(), "env": dict(os.environ), "file": path.read_text(), "mode": mode}))
"""
    one = spec("trainer-1", code, "config/t.toml", place=Place(NODE, (1,)))
    agent.start(one, {"config/t.toml": b"key"})
    (line,), _ = finished(agent, "trainer-1")
    return json.loads(line.text)


def test_a_process_finds_its_files_its_gpu_and_the_variables_of_the_run(tmp_path: Path) -> None:
    found = in_a_process(surroundings, tmp_path)
    assert (
        Path(found["cwd"]) == tmp_path / "work"
        and found["file"] == "key"
        and found["mode"] == stat.S_IRUSR | stat.S_IWUSR
    )
    environment = found["env"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "6" and environment["HF_HOME"] == "/h"
    assert "OMP_NUM_THREADS" not in environment and not [name for name in environment if name.startswith("RAY_")]


def statuses_of_a_process(folder: Path) -> tuple[bytes, bytes]:
    agent = NodeAgent(str(folder / "work"), {})
    code = SAYS + "log.warning('careful')"
    agent.start(spec("env", code, env={VARIABLE: "run/status/env.json"}), {})
    while not (news := agent.news()).ended:
        pass
    return news.said["env"], (folder / "work" / "run" / "status" / "env.json").read_bytes()


def test_an_agent_passes_on_what_a_process_says_of_itself(tmp_path: Path, remote: RemoteProcess) -> None:
    content, written = in_a_process(statuses_of_a_process, tmp_path)
    assert content == written
    said = parse(content)
    assert said is not None
    remote.pid = said.pid
    remote.tell(content)
    assert [notice.text for notice in remote.hear()] == ["WARNING careful"] and not remote.hear()


def lines_beyond_a_log(folder: Path) -> tuple[bool, int]:
    null = folder / "null"
    null.symlink_to(os.devnull)
    agent_module.os.devnull, process.LOG_CHARACTERS = str(null), 1000
    agent = NodeAgent(str(folder / "work"), {})
    agent.start(spec("env", "for number in range(100): print('x' * 100)"), {})
    lines, _ = finished(agent, "env")
    return null.is_symlink(), len(lines)


def test_an_agent_of_a_process_that_says_much_leaves_the_null_device_where_it_is(tmp_path: Path) -> None:
    assert in_a_process(lines_beyond_a_log, tmp_path) == (True, 100)


def ended_family(folder: Path) -> list[int]:
    agent = NodeAgent(str(folder), {})
    pid = agent.start(spec("trainer", STUBBORN), {})
    lines: list[Line] = []
    while not lines:
        lines += agent.news().lines
    agent.order("trainer", "note_family")
    agent.order("trainer", "terminate")
    agent.order("trainer", "kill")
    return [pid, int(lines[0].text.split()[1])]


def test_a_kill_reaches_grandchildren(tmp_path: Path) -> None:
    assert_gone(in_a_process(ended_family, tmp_path))


def test_what_of_the_environment_goes_to_other_nodes() -> None:
    given = {"HF_HOME": "/h", "VLLM_API_KEY": "k", "PYTHONPATH": "/p", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    assert passed_on(given) == {"HF_HOME": "/h", "VLLM_API_KEY": "k", "PYTHONPATH": "/p"}


def test_a_process_sees_its_own_gpus() -> None:
    both = spec("server", "", place=Place(NODE, (0, 2)))
    assert seeing(both, "3,5,7").env["CUDA_VISIBLE_DEVICES"] == "3,7"
    assert seeing(replace(both, place=Place(NODE)), "3,5,7").env == {}


@pytest.fixture
def remote(tmp_path: Path) -> RemoteProcess:
    one = spec("server", "", ready_url="http://10.0.0.2:1/health")
    return RemoteProcess(one, tmp_path / "server.log", lambda text, is_error: None, lambda _: None)


def test_a_remote_process_keeps_its_lines_and_its_cause(remote: RemoteProcess, tmp_path: Path) -> None:
    assert remote.exit_code is None and not remote.ready
    for text in ("ValueError: no float32", *(f"line {n}" for n in range(40))):
        remote.write(Line("server", is_error=True, text=text))
    remote.note_end(1)
    error = remote.ended()
    assert (error.field, error.got) == ("server", "exit code 1")
    assert "ValueError: no float32" in error.fix and "line 39" in error.fix
    assert (tmp_path / "server.log").read_text().splitlines()[-1] == "line 39"


def test_a_process_that_is_lost_names_its_node(remote: RemoteProcess) -> None:
    remote.note_end(lost="gone-b")
    assert remote.exit_code == -9 and remote.ended().got == "gone-b"
    remote.kill()  # and nobody waits for it


def test_a_process_that_had_ended_before_its_node_keeps_its_exit_code(remote: RemoteProcess) -> None:
    remote.note_end(0)
    remote.note_end(lost="gone-b")
    assert remote.exit_code == 0 and remote.ended().got == "exit code 0"
