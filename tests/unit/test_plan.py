"""What a run starts, read from its configuration alone."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from environments.running.settings_check import BUILT_IN
from grpo_trainer.config.options import build
from grpo_trainer.config.processes import RunConfig, environment_command
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import DistributedConfig, TrainConfig
from grpo_trainer.engine.head import ExactHead
from grpo_trainer.errors import ConfigError, PortBusyError
from grpo_trainer.launch import ports
from grpo_trainer.launch.plan import (
    SET_FOR_ENVIRONMENTS,
    ProcessSpec,
    RunPlan,
    commands_to_start,
    plan_run,
    server_process,
    started_again,
)
from grpo_trainer.launch.ports import FREE_PORTS, VARIABLE, claim_ports
from grpo_trainer.run import empty_old_queue
from grpo_trainer.weights.bridge import problems_of
from tests.processes import free_port
from tests.unit.factories import refusing
from tests.unit.test_proof import INFO
from tests.unit.tiny_lora import tiny_qwen
from vllm_server.flags import early

PORTS = {"api": 8123, "server": 9123, "server-2": 9124, "server-3": 9125, "trainers": 7000}
KEPT = {"server.extra_args": "--kv-cache-memory-bytes=1000"}
THREE = {"server.replicas": "3", "server.gpus": "0;1,2;3", "server.port": 9123}
DEGREES = {"tensor_parallel_size": "2", "pipeline_parallel_size": "3", "data_parallel_size": "4"}
SPREAD = {f"--{name.replace('_', '-')}": value for name, value in DEGREES.items()}


def a_run(file: Any = None, **flags: Any) -> RunConfig:
    base = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": "/runs/a"}
    return build_run(file or {}, {**base, **flags})


def plan(*, on_gpu: Any = False, file: Any = None, **flags: Any) -> RunPlan:
    return plan_run(a_run(file, **flags), PORTS, python="py", on_gpu=on_gpu)


def option(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def processes_of(made: RunPlan, kind: str) -> list[ProcessSpec]:
    return [process for process in made.processes if process.name.rstrip("-0123456789") == kind]


def server_of(made: RunPlan) -> ProcessSpec:
    (server,) = processes_of(made, "server")
    return server


def trainers_file(made: RunPlan) -> TrainConfig:
    return build(TrainConfig, made.config_files[Path("/runs/a/config/trainer.toml")])


def environments_file(made: RunPlan) -> Mapping[str, Any]:
    return made.config_files[Path("/runs/a/config/env-arithmetic.toml")]


TOGETHER = ["api", "server", "trainer", "env-arithmetic"]


@pytest.mark.parametrize(
    ("flags", "on_gpu", "cache_bytes", "stages"),
    [
        ({}, False, None, [TOGETHER]),
        ({}, True, 1000, [TOGETHER]),
        (KEPT, True, None, [TOGETHER]),
        ({"trainer_gpus": "2"}, True, 1000, [["api", "server", "trainer", "trainer-1", "env-arithmetic"]]),
        # where the server measures the GPU
        ({}, True, None, [["api", "server", "env-arithmetic"], ["trainer"]]),
        # the trainer starts its servers itself
        ({"weight_bridge_mode": "none"}, True, None, [["api", "trainer", "env-arithmetic"]]),
        ({"weight_bridge_mode": "lora_restart"}, True, None, [["api", "trainer", "env-arithmetic"]]),
        (THREE | {"weight_bridge_mode": "none"}, True, None, [["api", "trainer", "env-arithmetic"]]),
    ],
)
def test_plan_stages(flags: dict[str, Any], on_gpu: bool, cache_bytes: int | None, stages: list[list[str]]) -> None:
    made, again = (
        plan_run(a_run(**flags), PORTS, python="py", on_gpu=on_gpu, cache_bytes=cache_bytes) for _ in range(2)
    )
    assert [[process.name for process in stage] for stage in made.stages] == stages
    assert made == again


def test_what_the_run_says_of_the_server_reaches_the_one_that_the_trainer_starts() -> None:
    table = {"server.dtype": "float16", "server.max_model_len": "99", "server.gpu_memory_utilization": "0.3"}
    table |= {"server.enforce_eager": True, "server.extra_args": "--seed,7", "vllm_timeout": "50", "vllm_api_key": "k"}
    table |= DEGREES
    made = plan(on_gpu=True, weight_bridge_mode="none", **table)
    model = "/runs/a/checkpoints/step_3"
    spec = server_process(trainers_file(made), python="py", on_gpu=True, model=model, flags=("--x", "1"))
    wanted = {
        "--model": model,
        "--served-model-name": "demo",  # what environments ask for stays the same
        **{"--port": "9123", "--dtype": "float16", "--max-model-len": "99", "--gpu-memory-utilization": "0.3"},
        **{"--seed": "7", "--x": "1", **SPREAD},
    }
    assert {flag: option(spec.argv, flag) for flag in wanted} == wanted
    assert "--enforce-eager" in spec.argv and not {"--logits-dtype", "--max-lora-rank", "k"} & {*spec.argv}
    assert spec.ready_url == "http://127.0.0.1:9123/health"
    assert spec.ready_timeout == 50 and spec.env == {"VLLM_API_KEY": "k"}
    environment = environments_file(made)
    assert environment["openai"]["api_key"] == "k"
    assert environment["env"]["retry_timeout"] > 50, "environments must outwait a restart"


@pytest.mark.parametrize(
    ("flags", "on_gpu", "wanted"),
    [
        # the versions that samples may come from
        ({}, False, {"--lora-keep-versions": "4"}),
        ({"max_staleness": "0"}, False, {"--lora-keep-versions": "2"}),
        ({"max_staleness": "5"}, False, {"--lora-keep-versions": "7"}),
        ({"max_staleness": "5", "lora_keep_versions": "3"}, False, {"--lora-keep-versions": "3"}),
        # the trainer's length and dtype, unless the server's is given
        ({"seq_len": "64"}, False, {"--max-model-len": "64", "--dtype": "float32"}),
        ({"seq_len": "64", "server.max_model_len": "99"}, False, {"--max-model-len": "99"}),
        ({"dtype": "float16"}, True, {"--dtype": "float16"}),
        # on a GPU CUDA graphs stay on and memory is shared
        ({}, True, {"--enforce-eager": None, "--gpu-memory-utilization": "0.45", "--dtype": "bfloat16"}),
        ({}, False, {"--gpu-memory-utilization": None}),
        # over several GPUs
        (DEGREES, True, SPREAD),
        ({f"server.{name}": value for name, value in DEGREES.items()}, True, SPREAD),
        ({}, True, dict.fromkeys(SPREAD)),
    ],
)
def test_plan_server_options(flags: dict[str, Any], on_gpu: bool, wanted: dict[str, str | None]) -> None:
    made = plan(on_gpu=on_gpu, **flags)
    argv = server_of(made).argv
    assert {flag: option(argv, flag) if flag in argv else None for flag in wanted} == wanted
    assert trainers_file(made).dtype == option(argv, "--dtype")


def test_plan_cache_and_idle_threads() -> None:
    server = server_of(plan_run(a_run(), PORTS, python="py", on_gpu=True, cache_bytes=1000))
    assert option(server.argv, "--kv-cache-memory-bytes") == "1000"
    assert not any("kv-cache" in word for word in server_of(plan(on_gpu=True)).argv)
    # processes that share the cores
    assert all(process.env["OMP_WAIT_POLICY"] == "passive" for process in plan(on_gpu=False).processes)
    assert not any("OMP_WAIT_POLICY" in process.env for process in plan(on_gpu=True).processes)


def test_plan_server_seeds() -> None:
    def seeds(step: int = 0, **flags: Any) -> list[str]:
        made = plan_run(a_run(**{"server.replicas": 2, **flags}), PORTS, python="py", on_gpu=False, step=step)
        return [option(server.argv, "--seed") for server in processes_of(made, "server")]

    first = seeds()
    assert seeds() == first
    others = [*seeds(seed=1), *seeds(step=10)]
    assert len({*first, *others}) == 6
    server = server_of(plan())
    again = [option(started_again(server, start).argv, "--seed") for start in range(3)]
    assert again[0] == option(server.argv, "--seed") and len(set(again)) == 3
    assert all(0 <= int(seed) < 2**31 for seed in [*first, *others, *again])

    config = a_run(weight_bridge_mode="none").trainer
    specs = [server_process(config, python="py", on_gpu=False, model="m", step=version) for version in (0, 3, 3)]
    first, second, same = (option(spec.argv, "--seed") for spec in specs)
    assert first != second == same

    server = server_of(plan(**{"server.extra_args": "--seed=7"}))
    assert server.argv.count("--seed") == 0 and "--seed=7" in started_again(server, 1).argv


@pytest.mark.parametrize("mode", ["none", "lora_only", "lora_restart", "shared_vllm"])
def test_both_keys_reach_all_who_need_them_and_no_command_line(mode: str) -> None:
    made = plan(weight_bridge_mode=mode, vllm_api_key="door-1", rollout_api_key="door-2")
    trainer, environment = trainers_file(made), environments_file(made)
    assert (trainer.server.api_key, trainer.rollout_api_key) == ("door-1", "door-2")
    assert (environment["openai"]["api_key"], environment["env"]["rollout_api_key"]) == ("door-1", "door-2")
    api = made.processes[0]
    assert api.env["ROLLOUT_API_KEY"] == api.ready_key == "door-2"
    assert all(server.env["VLLM_API_KEY"] == server.ready_key == "door-1" for server in processes_of(made, "server"))
    assert not any("door-" in word for process in made.processes for word in process.argv)
    without = plan(weight_bridge_mode=mode)
    assert "rollout_api_key" not in environments_file(without)["env"]
    assert not any(each.ready_key or "_API_KEY" in " ".join(each.env) for each in without.processes)


@pytest.mark.parametrize("mode", ["none", "lora_only"])
@pytest.mark.parametrize(("served", "asked"), [("512", 512), ("4096", 2048)])
def test_environments_ask_for_no_more_than_is_served(mode: str, served: str, asked: int) -> None:
    made = plan(weight_bridge_mode=mode, seq_len="2048", **{"server.max_model_len": served})
    assert environments_file(made)["env"]["max_token_length"] == asked


def test_a_run_that_begins_again_finds_no_queue_of_one_before_it(tmp_path: Path) -> None:
    queue, log = tmp_path / "queue.sqlite", tmp_path / "queue.sqlite-wal"

    def left(**more: str) -> bool:
        queue.touch()
        log.touch()
        empty_old_queue(a_run(run_dir=str(tmp_path), **more))
        assert queue.exists() == log.exists()
        return queue.exists()

    assert not left()
    assert not left(resume="auto"), "there is no checkpoint to resume from"
    assert left(**{"api.store": str(queue)}), "a file that the user names is the user's"
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3" / "state.json").touch()
    assert left(resume="auto")
    assert not left()
    with (tmp_path / "queue.sqlite.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert left(), "an API has it open"


def test_plan_environments() -> None:
    file = {"environments": [{"name": "arithmetic", "env": {"retry_timeout": 5}}]}
    assert environments_file(plan(file=file, weight_bridge_mode="none"))["env"]["retry_timeout"] == 5

    file = {"environments": [{"name": "arithmetic"}, {"name": "arithmetic"}]}
    made = plan(file=file, weight_bridge_mode="none", rollout_api_key="k")
    tables = [table["env"] for path, table in made.config_files.items() if path.name.startswith("env-")]
    assert {key for table in tables for key in table} == SET_FOR_ENVIRONMENTS | {"seed"}

    names = ("arithmetic", "arithmetic", "my.envs.maze_server", "tests/unit/test_plan.py:Chess")
    made = plan(file={"environments": [{"name": name} for name in names]})
    own = ["env-arithmetic", "env-arithmetic-2", "env-maze", "env-test_plan"]
    assert [process.name for process in made.processes[3:]] == own
    assert len({name for name in made.config_files if name.name.startswith("env")}) == 4


def test_a_trainer_of_all_weights_has_time_to_save_them() -> None:
    seconds = {
        mode: processes_of(plan(weight_bridge_mode=mode), "trainer")[0].stop_seconds
        for mode in ("none", "shared_vllm", "lora_only", "lora_restart")
    }
    assert seconds["none"] == seconds["shared_vllm"] > seconds["lora_restart"] == seconds["lora_only"]


def test_both_ends_agree_on_ports_lora_and_folders() -> None:
    made = plan(lora_r="32", lora_name="sums", lora_keep_versions="6")
    server, trainer, environment = server_of(made), trainers_file(made), environments_file(made)
    wanted = {"--port": "9123", "--max-lora-rank": "32", "--lora-name": "sums", "--lora-keep-versions": "6"}
    wanted |= {"--lora-root": "/runs/a/adapters"}
    assert {flag: option(server.argv, flag) for flag in wanted} == wanted
    assert server.ready_url == "http://127.0.0.1:9123/health" and "--shared-weights" not in server.argv
    assert trainer.server.port == 9123 and trainer.atropos_url == "http://127.0.0.1:8123"
    assert trainer.log_dir == Path("/runs/a") and trainer.save_path == Path("/runs/a/checkpoints")
    assert environment["env"]["rollout_server_url"] == "http://127.0.0.1:8123"
    assert environment["openai"]["base_url"] == "http://127.0.0.1:9123/v1"
    for store, words in (("", ["/runs/a/queue.sqlite"]), ("/elsewhere/q", ["/elsewhere/q"]), ("none", [])):
        argv = plan(**({"api.store": store} if store else {})).processes[0].argv
        assert [after for word, after in pairwise(argv) if word == "--store"] == words


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("flags", [{"weight_bridge_mode": "shared_vllm"}, {"single_copy": True}, {"share_base": True}])
def test_a_server_that_shares_its_weights_tells_the_trainer_where_they_are(flags: dict[str, Any], on_gpu: bool) -> None:
    base = {"model_name": "demo", "run_dir": "/runs/a", "logits_dtype": "model"}
    if "share_base" in flags:
        base["weight_bridge_mode"] = "lora_only"
    made = plan_run(build_run({}, {**base, **flags}), PORTS, python="py", on_gpu=on_gpu)
    server, trainer = server_of(made), trainers_file(made)
    assert "--shared-weights" in server.argv
    assert trainer.weight_bridge_mode in ("shared_vllm", "lora_only") and trainer.shares_weights
    assert str(trainer.vllm_config_path) == option(server.argv, "--bridge-config-path")
    assert str(trainer.vllm_config_path).startswith("/runs/a/config/")
    assert ("--max-lora-rank" in server.argv) == ("share_base" in flags)
    assert option(server.argv, "--dtype") == trainer.dtype
    assert option(server.argv, "--logits-dtype") == trainer.logits_dtype == "model"
    if on_gpu:
        assert option(server.argv, "--gpu-memory-utilization") == "0.45" and "--enforce-eager" not in server.argv


# environments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "expected"), [([None, None, None], [0, 1, 2]), ([1, None, None], [1, 0, 2]), ([None, 7, 7], [0, 7, 7])]
)
def test_plan_environments_of_a_kind_have_other_seeds(own: list[int | None], expected: list[int]) -> None:
    sums = [{"name": "arithmetic", "env": {} if seed is None else {"seed": seed}} for seed in own]
    made = plan(file={"environments": [*sums, {"name": "gsm8k"}]})
    tables = [table["env"] for path, table in made.config_files.items() if path.stem.startswith("env-")]
    assert [table.get("seed", 0) for table in tables] == [*expected, 0]


def test_environment_command_of_a_module_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_command("arithmetic") == ("environments.arithmetic",)
    assert environment_command("my.xiangqi") == ("environments", "my.xiangqi")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "xiangqi.py").touch()
    for name in ("xiangqi", "xiangqi.py", "./xiangqi.py", "xiangqi.py:Chess", str(tmp_path / "xiangqi.py")):
        assert environment_command(name) == ("environments", name)


@pytest.mark.parametrize(
    ("name", "helps"),
    [
        ("xiangqi", [", ".join(BUILT_IN), "my_envs.xiangqi"]),
        ("rows.jsonl", ["--data rows.jsonl"]),
        ("ches.py", ["chess.py"]),
        ("a/b.py", ["path"]),
        ("reverse", ["mine.reverse_text", "mine/reverse_text.py", "/a/b:/c"]),  # the last: where it was searched for
    ],
)
def test_environment_command_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, helps: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a/b:/c")
    (tmp_path / "mine").mkdir()
    for file in ("chess.py", "rows.jsonl", "mine/reverse_text.py"):
        (tmp_path / file).touch()
    with refusing(ConfigError, "--env", got=name, words=helps):
        environment_command(name)


# several trainers and servers --------------------------------------------------------------------------------


def test_each_gpu_of_the_trainer_has_a_process_and_they_meet_at_one_port() -> None:
    trainers = processes_of(plan(on_gpu=True, trainer_gpus="3"), "trainer")
    assert [process.name for process in trainers] == ["trainer", "trainer-1", "trainer-2"]
    assert len({process.argv for process in trainers}) == 1
    assert [(one.env["RANK"], one.env["LOCAL_RANK"]) for one in trainers] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {(one.env["WORLD_SIZE"], one.env["MASTER_ADDR"], one.env["MASTER_PORT"]) for one in trainers} == {
        ("3", "127.0.0.1", "7000")
    }
    assert [(one.ends_run, one.may_end) for one in trainers] == [(True, False), (False, True), (False, True)]
    for each in (*trainers, *processes_of(plan(), "trainer")):
        assert (each.restarts, each.again) == ("trainers", ("--resume", "auto"))
        assert "--resume" not in each.argv  # the first start is as the user configured it


def test_plan_lone_trainer_beside_a_job_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    (trainer,) = processes_of(plan(), "trainer")
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", **trainer.env}.items():
        monkeypatch.setenv(name, value)
    assert (DistributedConfig().processes, DistributedConfig().rank) == (1, 0)


@pytest.mark.parametrize("flags", [{"weight_bridge_mode": "shared_vllm"}, {"share_base": True}])
def test_plan_pairs_of_trainer_and_server(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    made = plan(on_gpu=True, trainer_gpus="2", **flags)
    servers, trainer = processes_of(made, "server"), trainers_file(made)
    assert [server.env["CUDA_VISIBLE_DEVICES"] for server in servers] == ["4", "5"]
    assert all("--shared-weights" in server.argv for server in servers)
    files = [option(server.argv, "--bridge-config-path") for server in servers]
    assert files[0] == "/runs/a/config/vllm_bridge_config.json" and len(set(files)) == 2
    assert [process.env["LOCAL_RANK"] for process in processes_of(made, "trainer")] == ["0", "1"]
    assert trainer.weight_bridge_mode in ("shared_vllm", "lora_only") and trainer.vllm_config_path is None
    assert [vllm.port for vllm in trainer.server.each] == [9123, 9124]
    assert environments_file(made)["openai"]["base_url"].count(",") == 1


@pytest.mark.parametrize(
    ("flags", "shared"),
    [
        ({}, [False, False, False]),
        ({"share_base": True}, [True, False, False]),
        ({"share_base": True, "trainer_gpus": "2"}, [True, True, False]),
    ],
)
def test_plan_several_servers(flags: dict[str, Any], shared: list[bool]) -> None:
    made = plan(on_gpu=True, **THREE, **flags)
    servers = processes_of(made, "server")
    assert [server.name for server in servers] == ["server", "server-2", "server-3"]
    assert [option(server.argv, "--port") for server in servers] == ["9123", "9124", "9125"]
    assert [server.env["CUDA_VISIBLE_DEVICES"] for server in servers] == ["0", "1,2", "3"]
    assert ["--shared-weights" in server.argv for server in servers] == shared
    urls = [f"http://127.0.0.1:{port}" for port in (9123, 9124, 9125)]
    assert [vllm.url for vllm in trainers_file(made).server.each] == urls
    assert environments_file(made)["openai"]["base_url"] == ",".join(f"{url}/v1" for url in urls)


def test_plan_trainers_servers() -> None:
    made = plan(on_gpu=True, **THREE | {"weight_bridge_mode": "none", "server.gpus": "0;1;2"})
    each = trainers_file(made).server.each
    assert [(vllm.port, vllm.gpus) for vllm in each] == [(9123, "0"), (9124, "1"), (9125, "2")]

    given = {"model": "m", "weight_bridge_mode": "lora_only", "vllm_also": "h:9001, g:9002", "vllm_api_key": "k"}
    each = build(TrainConfig, given).server.each
    assert [vllm.url for vllm in each] == ["http://127.0.0.1:9001", "http://h:9001", "http://g:9002"]
    assert all(vllm.api_key == "k" and vllm.also == () for vllm in each)


# commands to start by hand what `grpo train` alone needs -----------------------------------------------------


def by_hand(**flags: Any) -> TrainConfig:
    return build(TrainConfig, {"model_name": "my models/m", "weight_bridge_mode": "lora_only", "seq_len": 64, **flags})


def servers_command(config: TrainConfig) -> tuple[list[str], dict[str, str]]:
    """The words of the server's command, and the word after each."""
    found = commands_to_start(config, on_gpu=False, there=lambda _: False)
    ((command,),) = [commands for name, commands in found.items() if "inference server" in name]
    return shlex.split(command), dict(pairwise(shlex.split(command)))


def test_commands_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    command, given = servers_command(by_hand(vllm_port=9007, lora_r=8, log_dir="/logs"))
    assert command[:2] == ["grpo", "serve"]
    assert (given["--model"], given["--port"], given["--max-model-len"]) == ("my models/m", "9007", "64")
    assert (given["--max-lora-rank"], given["--lora-root"]) == ("8", "/logs/adapters")
    assert early(command[2:]).port == 9007

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    command, given = servers_command(by_hand(weight_bridge_mode="shared_vllm", vllm_config_path="/b.json"))
    assert "--shared-weights" in command and given["--bridge-config-path"] == "/b.json"
    assert command[0].startswith("VLLM_API_KEY=") and "secret" not in " ".join(command)

    assert commands_to_start(by_hand(), on_gpu=False, there=lambda _: True) == {}
    owned = commands_to_start(by_hand(weight_bridge_mode="none"), on_gpu=False, there=lambda _: False)
    assert [name.split(" at ")[0] for name in owned] == ["rollout API"]
    nobody = by_hand(vllm_port=free_port(), rollout_url=f"http://127.0.0.1:{free_port()}")
    assert len(commands_to_start(nobody, on_gpu=False)) == 2


# what is asked of a server that was started apart from the trainer -------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "servers", "rounds", "warned"),
    [
        ("bfloat16", "float32", True, ("float32", "bfloat16", "model")),
        ("bfloat16", "bfloat16", False, ("bfloat16", "float32", "float32")),
        ("bfloat16", "bfloat16", True, None),
        ("bfloat16", "float32", False, None),
        ("float32", "float32", True, None),
        ("bfloat16", None, True, None),  # a server that does not say
    ],
)
def test_logits_that_one_side_rounds_are_told(
    dtype: str, servers: str | None, rounds: bool, warned: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny_qwen()
    model.to(torch.bfloat16)
    if not rounds:
        model.lm_head.__class__ = ExactHead
    info = msgspec.structs.replace(INFO, logits_dtype=servers, dtype=dtype)
    assert problems_of(info, INFO.max_model_len, model=model) == []
    assert [record.args for record in caplog.records] == ([warned] if warned else [])  # server's, trainer's, wanted
    caplog.clear()
    assert problems_of(info, INFO.max_model_len) == [] and not caplog.text  # of a server that the trainer has started


# ports for a run's processes --------------------------------------------------------------------------------


def test_a_busy_port_names_its_holder_and_free_ones_differ(monkeypatch: Any, busy_port: int) -> None:
    monkeypatch.setattr(ports, "RUN", re.compile(""))  # whatever has started this process counts as a `grpo run`
    with refusing(PortBusyError, "--api.port", words=[str(busy_port), f"pid {os.getpid()}"]) as error:
        claim_ports({"api": busy_port, "server": 0})
    assert error.value.exit_code == 2 and "--api.port 0" in error.value.fix
    claimed = claim_ports({"a": 0, "b": 0, "c": 0})
    assert list(claimed) == ["a", "b", "c"]
    assert len({*claimed.values(), *claim_ports({"a": 0, "b": 0}).values()}) == 5


def test_free_ports_are_those_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert claim_ports({"a": 0})["a"] in FREE_PORTS
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server that starts: it does not listen yet
        holder.bind(("127.0.0.1", port := free_port()))
        monkeypatch.setenv(VARIABLE, f"{port}-{port + 1}")
        assert claim_ports({"a": 0}) == {"a": port + 1}
        with refusing(PortBusyError, VARIABLE, words=["held"]):
            claim_ports({"a": 0, "b": 0})


def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls in a row, with held ports between."""
    first = free_port()
    monkeypatch.setenv(VARIABLE, f"{first}-{first + 19}")
    with ExitStack() as held:
        for port in range(first, first + 20, 2):
            with suppress(OSError):  # a server of another test holds it
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert len({free_port() for _ in range(5)}) == 5


@pytest.mark.parametrize("given", ["x", "1", "9-8", "2009-2008", "0-5000", "65535-65536", "-1-5"])
def test_a_range_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with refusing(PortBusyError, VARIABLE, got=given):
        claim_ports({"a": 0})
