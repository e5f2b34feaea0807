"""Which process goes to which machine, and the agents that run them there."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_common.status import VARIABLE, parse
from grpo_trainer.config.options import build
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, PortBusyError, ProcessFailedError
from grpo_trainer.launch import process
from grpo_trainer.launch.agent import Line, NodeAgent, RemoteProcess, passed_on, seeing
from grpo_trainer.launch.places import NO_PLACES, Node, Place, Places, free_nodes, gpus_of_run, place_run
from grpo_trainer.launch.plan import ProcessSpec, RunPlan, plan_run
from grpo_trainer.launch.replan import Replanner
from grpo_trainer.run import planned
from tests.processes import assert_ended
from tests.unit.factories import refusing
from tests.unit.test_supervisor import SAYS, STUBBORN, spec

BASE = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": "/runs/a", "cluster": "auto"}


def a_run(**flags: Any) -> RunConfig:
    return build_run({}, {**BASE, **{key.replace("__", "."): value for key, value in flags.items()}})


def nodes(*gpus: int, cpus: float = 1) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", count, cpus, str(i), is_head=i == 0) for i, count in enumerate(gpus)]


def placed(config: RunConfig, *gpus: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The node and GPUs of each process."""
    found = place_run(config, nodes(*gpus), on_gpu=True)
    return {name: (place.node.name, place.gpus) for name, place in found.items() if place.node}


def test_place_run_by_hand() -> None:
    assert placed(a_run(server__replicas="3"), 2, 2) == {
        "trainer": ("n0", (0,)), "server": ("n0", (1,)), "server-2": ("n1", (0,)), "server-3": ("n1", (1,)),
    }  # fmt: skip

    wide = a_run(server__replicas="2", tensor_parallel_size="2")
    assert placed(wide, 2, 3, 2) == {"trainer": ("n0", (0,)), "server": ("n1", (0, 1)), "server-2": ("n2", (0, 1))}

    found = placed(a_run(trainer_gpus="5"), 2, 1, 4)
    trainers = [found[name] for name in ("trainer", "trainer-1", "trainer-2", "trainer-3", "trainer-4")]
    assert trainers == [("n0", (0,)), ("n0", (1,)), ("n2", (0,)), ("n2", (1,)), ("n2", (2,))]
    assert found["server"] == ("n1", (0,))

    two = place_run(a_run(server__replicas="2", trainer_gpus="2"), nodes(0, 0), on_gpu=False)
    assert [(name, place.node and place.node.name) for name, place in two.items()] == [
        ("trainer", "n0"), ("trainer-1", "n1"), ("server", "n0"), ("server-2", "n1"),
    ]  # fmt: skip
    one = place_run(a_run(trainer_gpus="2"), nodes(0, 0, cpus=8), on_gpu=False)
    assert [(name, place.node and place.node.name) for name, place in one.items()] == [
        ("trainer", "n0"), ("trainer-1", "n0"), ("server", "n1"),
    ]  # fmt: skip
    assert not any(place.gpus for place in two.values())

    for shares in (a_run(share_base=True), a_run(weight_bridge_mode="shared_vllm")):  # both are on one GPU
        assert placed(shares, 1) == {"trainer": ("n0", (0,)), "server": ("n0", (0,))} and gpus_of_run(shares) == 1


@pytest.mark.parametrize(
    ("flags", "gpus", "got", "wanted"),
    [
        ({"server__replicas": "3"}, (2, 1), "n0 2, n1 1", "4 GPUs"),
        ({"tensor_parallel_size": "2"}, (2, 1), "n0 2, n1 1", "3 GPUs"),
        ({"trainer_gpus": "4"}, (2, 1), "n0 2, n1 1", "5 GPUs"),
        ({}, (0, 8), "head, n0", "GPU"),
    ],
)
def test_too_few_gpus_are_refused(flags: dict[str, Any], gpus: tuple[int, ...], got: str, wanted: str) -> None:
    with refusing(ConfigError, "--cluster", words=[got, wanted]):
        placed(a_run(**flags), *gpus)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_no_gpu_has_two_processes(gpus: list[int], trainers: int, servers: int, size: int) -> None:
    config = a_run(trainer_gpus=str(trainers), server__replicas=str(servers), tensor_parallel_size=str(size))
    try:
        found = place_run(config, nodes(*gpus), on_gpu=True)
    except ConfigError:
        # Enough GPUs in all may still be too few: those of one server are on one node.
        assert size > 1 or sum(gpus) < trainers + servers or not gpus[0]
        return
    used = [(place.node, gpu) for place in found.values() for gpu in place.gpus]
    assert len(used) == len(set(used)) == trainers + servers * size
    assert all(place.node and gpu < place.node.gpus for place in found.values() for gpu in place.gpus)
    assert found["trainer"].is_here


PORTS = {"api": 8123, "server": 9123, "server-2": 9124, "trainers": 7000}


def plan(config: RunConfig, *gpus: int) -> RunPlan:
    places = place_run(config, nodes(*gpus), on_gpu=True)
    return plan_run(config, PORTS, python="py", on_gpu=True, places=places)


def test_everybody_knows_where_the_servers_are() -> None:
    made = plan(a_run(server__replicas="2"), 2, 1)
    api, server, second = made.processes[:3]
    assert api.argv[api.argv.index("--host") + 1] == "127.0.0.1", "all its clients are on the head"
    assert server.argv[server.argv.index("--host") + 1] == "127.0.0.1" and server.place.is_here
    assert second.argv[second.argv.index("--host") + 1] == "10.0.0.1"
    assert second.ready_url == "http://10.0.0.1:9124/health" and not second.place.is_here
    trainer = build(TrainConfig, made.config_files[Path("/runs/a/config/trainer.toml")])
    assert [vllm.url for vllm in trainer.server.each] == ["http://127.0.0.1:9123", "http://10.0.0.1:9124"]
    environment = made.config_files[Path("/runs/a/config/env-arithmetic.toml")]["openai"]
    assert environment["base_url"] == "http://127.0.0.1:9123/v1,http://10.0.0.1:9124/v1"
    far = build(TrainConfig, plan(a_run(), 1, 1).config_files[Path("/runs/a/config/trainer.toml")])
    assert far.server.url == "http://10.0.0.1:9123"


def test_trainers_on_two_nodes_meet_at_the_heads_address() -> None:
    def meeting(*gpus: int) -> list[tuple[str, str, str]]:
        made = plan(a_run(trainer_gpus="2"), *gpus)
        trainers = [process for process in made.processes if process.name.startswith("trainer")]
        return [(each.env["MASTER_ADDR"], each.env["RANK"], each.env["LOCAL_RANK"]) for each in trainers]

    assert meeting(1, 2) == [("10.0.0.0", "0", "0"), ("10.0.0.0", "1", "0")]
    assert meeting(3) == [("127.0.0.1", "0", "0"), ("127.0.0.1", "1", "0")], "each sees its own GPU only"


# where a run's processes start again once their machine is lost, and one more server ------------------------


HEAD, B, C, D = (Node(name, f"10.0.0.{number}", 1, id=name, is_head=number == 1) for number, name in enumerate("abcd"))
CLUSTER_PORTS = {"api": 8000, "server": 9001, "server-2": 9002, "trainers": 7000}


def two_servers(tmp_path: Path, **flags: Any) -> RunConfig:
    base = {"model_name": "m", "weight_bridge_mode": "lora_only", "run_dir": str(tmp_path), "server.replicas": 2}
    return build_run({}, {**base, **flags})


class Machines:
    """A cluster of nodes, each with room for one process, which it gives to a process that asks for the second time."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes
        self.lost: set[Node] = set()
        self.asked: dict[str, Place] = {}
        self.fault: Exception | None = None

    def is_lost(self, place: Place) -> bool:
        return place.node in self.lost

    def room_for(self, name: str, gpus: int, taken: Iterable[Place]) -> Place | None:
        if name in self.asked:
            return self.asked.pop(name)
        used = {place.node for place in (*taken, *self.asked.values())}
        if free := [node for node in self.nodes if node not in used and node not in self.lost]:
            self.asked[name] = Place(free[0], tuple(range(gpus)), name)
        return None

    def forget(self, name: str) -> None:
        self.asked.pop(name, None)

    def claim(self, wanted: Mapping[str, int], places: Places) -> dict[str, int]:
        if self.fault is not None:
            raise self.fault
        return dict.fromkeys(wanted, 5555)


def replanner(config: RunConfig, machines: Machines, **options: Any) -> tuple[Replanner, dict[str, ProcessSpec]]:
    places = place_run(config, machines.nodes[:3], on_gpu=False)
    plan = partial(planned, on_gpu=False)
    specs = {process.name: process for process in plan(config, CLUSTER_PORTS, places).processes}
    return Replanner(config, CLUSTER_PORTS, places, plan, machines=cast(Any, machines), **options), specs


def given_room(again: Replanner, *specs: ProcessSpec) -> list[ProcessSpec]:
    """Where processes are once a machine, which is asked first, has room."""
    assert again.placed(specs) is None
    placed = again.placed(specs)
    assert placed is not None
    return list(placed)


def waits(again: Replanner, *specs: ProcessSpec) -> bool:
    return [again.placed(specs) for _ in range(3)] == [None, None, None]


def test_processes_of_this_machine_start_again_as_they_were(tmp_path: Path) -> None:
    config = two_servers(tmp_path)
    plan = plan_run(config, CLUSTER_PORTS, python=sys.executable, on_gpu=False)
    specs = {process.name: process for process in plan.processes}
    again = Replanner(config, CLUSTER_PORTS, NO_PLACES, partial(planned, on_gpu=False))
    placed = again.placed([specs["server-2"], specs["trainer"]])
    assert placed is not None
    assert list(placed) == [specs["server-2"], specs["trainer"]]


@pytest.mark.parametrize("fault", [ProcessFailedError("no answer", field="node"), PortBusyError("all held", field="x")])
def test_a_server_of_a_lost_machine_gets_another_with_its_own_address(tmp_path: Path, fault: Exception) -> None:
    machines = Machines(HEAD, B, C, D)
    again, specs = replanner(two_servers(tmp_path), machines)
    lost = next(spec for name, spec in specs.items() if name.startswith("server") and spec.place.node != HEAD)
    machines.lost |= {B, C} & {lost.place.node}
    assert again.placed([lost]) is None, "a machine was asked"
    machines.fault = fault
    assert again.placed([lost]) is None, "the machine has given room, and does not answer, or has no free port"
    machines.fault = None
    placed = again.placed([lost])
    assert placed is not None
    (server,) = placed
    assert server.name == lost.name and server.place.node not in (lost.place.node, None)
    assert server.ready_url == f"http://{server.place.address}:5555/health"
    assert "5555" in server.argv and server.place.address in server.argv


def test_all_trainers_meet_again_where_the_first_one_is(tmp_path: Path) -> None:
    machines = Machines(HEAD, B, C, D)
    again, specs = replanner(two_servers(tmp_path, trainer_gpus=2), machines)
    assert specs["trainer-1"].place.node == B
    machines.lost.add(B)
    placed = given_room(again, specs["trainer"], specs["trainer-1"])
    assert [spec.place.node for spec in placed] == [HEAD, D]
    assert all(spec.again == ("--resume", "auto") for spec in placed)
    assert {spec.env["MASTER_ADDR"] for spec in placed} == {HEAD.address}


def test_one_more_server_has_the_options_of_the_others(tmp_path: Path) -> None:
    machines = Machines(HEAD, B, C, D)
    again, specs = replanner(two_servers(tmp_path), machines)
    (server,) = given_room(again, again.another_server(None))
    assert (server.name, server.place.node) == ("server-3", D)
    seeds = [each.argv[each.argv.index("--seed") + 1] for each in (specs["server-2"], server)]
    assert seeds[0] != seeds[1]
    its = {"9002", specs["server-2"].place.address, seeds[0]}
    of_others = [word for word in specs["server-2"].argv if word not in its]
    assert [word for word in server.argv if word not in ("5555", D.address, seeds[1])] == of_others
    later = again.another_server(None)
    assert waits(again, later), "no machine is left"
    again.vacate("server-3")
    placed = again.placed([later])
    assert placed is not None
    assert (placed[0].name, placed[0].place) == ("server-4", server.place), "the place of the server that has left"


def test_trainers_keep_the_room_that_they_have_until_there_is_room_for_all(tmp_path: Path) -> None:
    machines = Machines(HEAD, B, C, D)
    again, specs = replanner(two_servers(tmp_path, trainer_gpus=3, **{"server.replicas": 1}), machines)
    trainers = [specs[name] for name in ("trainer", "trainer-1", "trainer-2")]
    assert [spec.place.node for spec in trainers] == [HEAD, B, C]
    machines.lost |= {B, C}
    assert waits(again, *trainers), "D alone is not enough"
    newcomer = Node("e", "10.0.0.9", 1, id="e")
    machines.nodes += (newcomer,)
    assert {spec.place.node for spec in given_room(again, *trainers)} == {HEAD, D, newcomer}


def test_a_trainer_takes_one_gpu_of_a_server_that_has_left(tmp_path: Path) -> None:
    big = [Node(name, f"10.0.0.{number}", 2, id=name, is_head=number == 1) for number, name in enumerate("abc", 1)]
    machines = Machines(*big)
    config = two_servers(tmp_path, trainer_gpus=3, **{"server.replicas": 1, "server.tensor-parallel-size": 2})
    places = {"trainer": Place(big[0], (0,)), "trainer-1": Place(big[0], (1,)), "trainer-2": Place(big[1], (0,))}
    places["server"] = Place(big[2], (0, 1))
    plan = partial(planned, on_gpu=True)
    specs = {process.name: process for process in plan(config, CLUSTER_PORTS, places).processes}
    again = Replanner(config, CLUSTER_PORTS, places, plan, machines=cast(Any, machines), on_gpu=True)
    again.vacate("server")
    machines.lost.add(big[1])
    placed = again.placed([specs[name] for name in ("trainer", "trainer-1", "trainer-2")])
    assert placed is not None and placed[2].place == Place(big[2], (0,))
    server = again.placed([specs["server"]])
    assert server is None, "one of two GPUs is free"


@pytest.mark.parametrize(
    ("given", "added", "then"),
    [({"server.replicas": 1}, "6", "5;6"), ({"server.replicas": 2, "server.gpus": "1;2"}, "3", "1;2;3")],
)
def test_replan_a_server_here_gets_the_gpus_that_are_named(
    given: dict[str, Any], added: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is alone keeps the first GPU that the run sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    plan = partial(planned, on_gpu=True)
    again = Replanner(two_servers(tmp_path, **given), CLUSTER_PORTS, NO_PLACES, plan, on_gpu=True)
    with pytest.raises(ConfigError):
        again.another_server(None)
    server = again.another_server(added)
    assert server is not None and server.env["CUDA_VISIBLE_DEVICES"] == added
    assert server.name == f"server-{given['server.replicas'] + 1}"
    assert again.config.server.gpus == then


def test_the_emptiest_machine_comes_first_and_gpus_in_use_are_not_free() -> None:
    big, small = Node("big", "1", 4, 8, id="big"), Node("small", "2", 1, 2, id="small")
    places = {"server": Place(big, (0, 1)), "server-2": Place(big, (0, 1), "later"), "trainer": Place(small, (0,))}
    assert free_nodes([big, small], places.values(), 1) == []
    del places["server-2"]
    assert free_nodes([big, small], places.values(), 2) == [big]
    assert free_nodes([small, big], places.values(), 0) == [big, small]
    assert free_nodes([big, small], [Place(big)] * 7, 0) == [small, big]  # 1 core of 8, and 2


# agents on other nodes -----------------------------------------------------------------------------------------------


NODE = Node("b", "10.0.0.2", 2)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodeAgent]]:
    """Make an agent; the folder and the variables that it sets are those of the test alone."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        yield lambda **environment: NodeAgent(str(tmp_path / "work"), environment)


def finished(agent: NodeAgent, name: str) -> tuple[list[Line], int]:
    """The lines and the exit code of a process."""
    lines: list[Line] = []
    while name not in (news := agent.news()).ended:
        lines += news.lines
    agent.order(name, "kill")
    return [*lines, *news.lines], news.ended[name]


def test_an_agent_tells_lines_before_the_exit_code(agent: Callable[..., NodeAgent]) -> None:
    here = agent()
    here.start(spec("env", "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"), {})
    lines, code = finished(here, "env")
    assert code == 3 and {(line.is_error, line.text) for line in lines} == {(False, "a"), (True, "b")}


def test_a_process_finds_its_files_its_gpu_and_the_variables_of_the_run(
    tmp_path: Path, agent: Callable[..., NodeAgent]
) -> None:
    os.environ |= {"RAY_JOB_ID": "7", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "4,6"}
    here = agent(HF_HOME="/h")
    code = """
import json, os, pathlib, stat, sys
path = pathlib.Path(sys.argv[1])
mode = stat.S_IMODE(path.stat().st_mode)
print(json.dumps({"cwd": os.getcwd(), "env": dict(os.environ), "file": path.read_text(), "mode": mode}))
"""
    here.start(spec("trainer-1", code, "config/t.toml", place=Place(NODE, (1,))), {"config/t.toml": b"key"})
    (line,), _ = finished(here, "trainer-1")
    found = json.loads(line.text)
    assert (found["cwd"], found["file"], found["mode"]) == (str(tmp_path / "work"), "key", stat.S_IRUSR | stat.S_IWUSR)
    environment = found["env"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "6" and environment["HF_HOME"] == "/h"
    assert "OMP_NUM_THREADS" not in environment and not [name for name in environment if name.startswith("RAY_")]


def test_an_agent_passes_on_what_a_process_says_of_itself(
    tmp_path: Path, agent: Callable[..., NodeAgent], remote: RemoteProcess
) -> None:
    here = agent()
    here.start(spec("env", SAYS + "log.warning('careful')", env={VARIABLE: "run/status/env.json"}), {})
    while not (news := here.news()).ended:
        pass
    content, said = news.said["env"], parse(news.said["env"])
    assert content == (tmp_path / "work" / "run" / "status" / "env.json").read_bytes() and said is not None
    remote.pid = said.pid
    remote.tell(content)
    assert [notice.text for notice in remote.hear()] == ["WARNING careful"] and not remote.hear()


def test_an_agent_of_a_process_that_says_much_leaves_the_null_device_where_it_is(
    tmp_path: Path, agent: Callable[..., NodeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    null, here = tmp_path / "null", agent()
    null.symlink_to(os.devnull)
    monkeypatch.setattr(os, "devnull", str(null))
    monkeypatch.setattr(process, "LOG_CHARACTERS", 1000)
    here.start(spec("env", "for number in range(100): print('x' * 100)"), {})
    assert len(finished(here, "env")[0]) == 100 and null.is_symlink()


def test_a_kill_reaches_grandchildren(agent: Callable[..., NodeAgent]) -> None:
    here, lines = agent(), list[Line]()
    pid = here.start(spec("trainer", STUBBORN), {})
    while not lines:
        lines += here.news().lines
    for order in ("note_family", "terminate", "kill"):
        here.order("trainer", order)
    assert_ended([pid, int(lines[0].text.split()[1])])


def test_agent_environment() -> None:
    given = {"HF_HOME": "/h", "VLLM_API_KEY": "k", "PYTHONPATH": "/p", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    assert passed_on(given) == {"HF_HOME": "/h", "VLLM_API_KEY": "k", "PYTHONPATH": "/p"}

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


def test_a_process_that_is_lost_names_its_node_unless_it_had_ended(remote: RemoteProcess, tmp_path: Path) -> None:
    ended = RemoteProcess(remote.spec, tmp_path / "ended.log", lambda text, is_error: None, lambda _: None)
    ended.note_end(0)
    for each in (remote, ended):
        each.note_end(lost="gone-b")
    assert (remote.exit_code, remote.ended().got) == (-9, "gone-b")
    assert (ended.exit_code, ended.ended().got) == (0, "exit code 0")
    remote.kill()  # and nobody waits for it
