"""Which process goes to which machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.config.options import build
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.launch.places import Node, Place, gpus_of_run, place_run
from grpo_trainer.launch.plan import RunPlan, plan_run

BASE = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": "/runs/a", "cluster": "auto"}


def a_run(**flags: Any) -> RunConfig:
    return build_run({}, {**BASE, **{key.replace("__", "."): value for key, value in flags.items()}})


def nodes(*gpus: int, cpus: float = 1) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", count, cpus, str(i), is_head=i == 0) for i, count in enumerate(gpus)]


def placed(config: RunConfig, *gpus: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The node and GPUs of each process."""
    found = place_run(config, nodes(*gpus), on_gpu=True)
    return {name: (place.node.name, place.gpus) for name, place in found.items() if place.node}


def test_servers_go_wherever_there_is_room() -> None:
    assert placed(a_run(server__replicas="3"), 2, 2) == {
        "trainer": ("n0", (0,)), "server": ("n0", (1,)), "server-2": ("n1", (0,)), "server-3": ("n1", (1,)),
    }  # fmt: skip


def test_a_servers_gpus_are_on_one_node() -> None:
    wide = a_run(server__replicas="2", tensor_parallel_size="2")
    assert placed(wide, 2, 3, 2) == {"trainer": ("n0", (0,)), "server": ("n1", (0, 1)), "server-2": ("n2", (0, 1))}


def test_trainers_fill_the_head_and_then_the_emptiest_node() -> None:
    found = placed(a_run(trainer_gpus="5"), 2, 1, 4)
    trainers = [found[name] for name in ("trainer", "trainer-1", "trainer-2", "trainer-3", "trainer-4")]
    assert trainers == [("n0", (0,)), ("n0", (1,)), ("n2", (0,)), ("n2", (1,)), ("n2", (2,))]
    assert found["server"] == ("n1", (0,))


@pytest.mark.parametrize("flags", [{"share_base": True}, {"weight_bridge_mode": "shared_vllm"}])
def test_a_server_that_shares_its_weights_is_on_the_trainers_gpu(flags: dict[str, Any]) -> None:
    config = a_run(**flags)
    assert placed(config, 1) == {"trainer": ("n0", (0,)), "server": ("n0", (0,))} and gpus_of_run(config) == 1


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
    with pytest.raises(ConfigError) as error:
        placed(a_run(**flags), *gpus)
    assert error.value.field == "--cluster" and got in error.value.got and wanted in error.value.wanted


def test_on_cpus_processes_share_cores_when_there_are_too_few() -> None:
    two = place_run(a_run(server__replicas="2", trainer_gpus="2"), nodes(0, 0), on_gpu=False)
    assert [(name, place.node and place.node.name) for name, place in two.items()] == [
        ("trainer", "n0"), ("trainer-1", "n1"), ("server", "n0"), ("server-2", "n1"),
    ]  # fmt: skip
    one = place_run(a_run(trainer_gpus="2"), nodes(0, 0, cpus=8), on_gpu=False)
    assert [(name, place.node and place.node.name) for name, place in one.items()] == [
        ("trainer", "n0"), ("trainer-1", "n0"), ("server", "n1"),
    ]  # fmt: skip
    assert not any(place.gpus for place in two.values())


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


def test_a_place_without_a_cluster_is_here() -> None:
    assert Place().is_here and Place().address == "127.0.0.1"
