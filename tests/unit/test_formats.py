"""Formats of newer versions are refused by name; what earlier ones left (tests/data/formats) is read."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from environments.api import wire
from environments.api.service import Service
from environments.api.settings import Settings
from environments.api.store import Store
from environments.config import BaseEnvConfig
from environments.peers.http import Peer, PeerError
from environments.peers.inference import detect
from environments.peers.rollout_api import RolloutApi
from environments.running.state import FOLDER as STATES
from environments.running.state import StateFiles
from grpo_common.errors import UserError
from grpo_common.formats import FormatError, check_format, check_sqlite
from grpo_common.roster import Member, Served, in_use, read_members, read_served
from grpo_trainer.cli import app
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import RolloutConfig, TrainConfig
from grpo_trainer.errors import ServerError
from grpo_trainer.logs.sinks import JsonlSink
from grpo_trainer.metrics.rows import read_rows
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import adapter_state
from grpo_trainer.policy import Policy, SharedWeights, build_policy
from grpo_trainer.report.read import read_run, read_series
from grpo_trainer.report.runs import list_runs
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import Progress, read_state, seal
from grpo_trainer.server_client import ServerClient
from grpo_trainer.trainer import Trainer
from tests.golden.stand_in import bridge_config, write_config
from tests.old_runs import FINISHED, HOME, MODEL, UNFINISHED, config_of, content, copy_of
from tests.stand_ins import Asked, Reply, answering, registration, then_closed
from tests.unit.factories import bridge_info
from vllm_server.bridge_file import BridgeFile
from vllm_server.errors import FatalError
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile

NEWER_STORE = wire.STORE_FORMAT + 1


def numbered(path: Path) -> None:
    """Give a JSON object, or the last line of a file of them, the next number; a new file has nothing else."""
    if path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {NEWER_STORE}")
        return
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    lines[-1] = json.dumps({**json.loads(lines[-1]), "format": 2})
    path.write_text("\n".join(lines) + "\n")


@contextmanager
def refused(folder: Path, field: str, kind: type[UserError] = FormatError) -> Iterator[None]:
    """That the block is refused with the file and both numbers named, and every file of the folder is as before."""
    before = content(folder)
    with pytest.raises(kind) as error:
        yield
    assert error.value.field.endswith(field)
    newer = NEWER_STORE if field == "queue.sqlite" else 2
    assert error.value.got == f"format {newer}" and error.value.wanted.startswith(f"format {newer - 1},")
    assert error.value.fix
    assert content(folder) == before


def command(*words: object) -> str:
    """Run a `grpo` command in this process; return what it prints, or raise its error."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "samples.jsonl", "checkpoints/step_3/state.json", "queue.sqlite"),
        *("servers/members.json", "servers/served.json"),
    ],
)
def test_resume_of_a_newer_run(tmp_path: Path, name: str) -> None:
    folder = copy_of(UNFINISHED, tmp_path)
    numbered(folder / name)
    with refused(tmp_path, name):
        command("run", "--model-name", "m", "--run-dir", folder, "--resume", "auto")
    if name == "queue.sqlite":  # nor is it emptied where a new run begins
        shutil.rmtree(folder / "checkpoints")
        (folder / "metrics.jsonl").unlink()
        with refused(tmp_path, name):
            command("run", "--model-name", "m", "--run-dir", folder)


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "samples.jsonl", "logs/env-arithmetic.metrics.jsonl", "checkpoints/adapter_final/state.json"],
)
def test_report_and_list_of_a_newer_run(tmp_path: Path, name: str) -> None:
    folder = copy_of(FINISHED, tmp_path)
    copy_of(UNFINISHED, tmp_path)
    numbered(folder / name)
    with refused(tmp_path, name):
        command("report", folder)
    listed = {Path(run.folder).name: run.state for run in list_runs(tmp_path)}
    is_read = name in ("metrics.jsonl", "checkpoints/adapter_final/state.json")
    assert listed == {"finished": "newer" if is_read else "done", "unfinished": "stopped"}


@pytest.mark.parametrize("resume", ["auto", "checkpoints/step_3", "never"])
def test_resume_and_export_of_newer_checkpoints(tmp_path: Path, resume: str) -> None:
    """They are not taken for damaged either."""
    from tests.unit.test_checkpoint import checkpoints, trainer_of_all_weights

    folder = copy_of(UNFINISHED, tmp_path)
    damaged = shutil.copytree(folder / "checkpoints" / "step_3", folder / "checkpoints" / "step_1")
    (damaged / "state.json").write_text("{")  # would be moved aside
    numbered(folder / "checkpoints" / "step_3" / "state.json")
    named = resume if resume in ("auto", "never") else str(folder / resume)
    saver = checkpoints(trainer_of_all_weights(), folder / "checkpoints", resume=named)
    with refused(tmp_path, "step_3/state.json"):
        saver.resume()
    with refused(tmp_path, "step_3/state.json"):
        command("export", folder / ("checkpoints" if resume == "auto" else "checkpoints/step_3"), tmp_path / "out")


@pytest.mark.parametrize("journal", [False, True])
def test_a_newer_queue_is_not_opened(tmp_path: Path, journal: bool) -> None:
    killed = tmp_path / "killed"
    with closing(sqlite3.connect(copy_of(UNFINISHED, tmp_path) / "queue.sqlite", isolation_level=None)) as other:
        other.execute(f"PRAGMA user_version = {NEWER_STORE}")
        if not journal:
            other.close()
        shutil.copytree(tmp_path / "unfinished", killed)  # with a journal: as a killed process leaves it
    assert (killed / "queue.sqlite-wal").exists() == journal
    with refused(killed, "queue.sqlite"):
        Store(killed / "queue.sqlite")


def test_a_newer_bridge_file_is_not_replaced(tmp_path: Path) -> None:
    path = write_config(tmp_path, bridge_config("m", {}, schema_version=2))
    before = path.read_bytes()
    with pytest.raises(FatalError) as server:
        BridgeFile(path).check()
    assert "schema_version 2" in server.value.got and server.value.fix
    assert path.read_bytes() == before


def answers_of(**by_path: Any) -> Callable[[Asked], Reply]:
    def answer(asked: Asked) -> Reply:
        name = asked.path.strip("/").replace("/", "_").replace("-", "_")
        return Reply(json=by_path.get(name, {}), headers={"Content-Type": wire.JSON})

    return answer


def test_clients_refuse_newer_servers(tmp_path: Path) -> None:
    info = msgspec.to_builtins(msgspec.structs.replace(bridge_info(), format=2))
    with answering(answers_of(bridge_info=info, health={})) as url:
        client = ServerClient(Server(host="127.0.0.1", port=int(url.rpartition(":")[2])))
        with refused(tmp_path, url, ServerError):
            client.wait_until_ready()
        with refused(tmp_path, url, PeerError):
            then_closed(Peer("the inference server", url, patience=5.0), lambda peer: detect(peer, "name"))

    registered = {"register": {"uuid": 1, "format": 2}, "register_env": {"status": "success", "format": 2}}
    with answering(answers_of(**registered)) as url:
        with refused(tmp_path, url, ServerError):
            RolloutClient(RolloutConfig(atropos_url=url, rollout_timeout=5), registration(4), lambda: None).register()
        config = BaseEnvConfig(tokenizer_name="m", group_size=2, rollout_server_url=url, retry_timeout=5.0)
        with refused(tmp_path, url, PeerError):
            then_closed(RolloutApi(config), lambda api: api.register("name"))


def test_what_is_written_has_its_number(tmp_path: Path) -> None:
    seal(tmp_path, Progress(1, 1))
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": 0.5})
    sink.close()
    for name in ("state.json", "metrics.jsonl"):
        assert json.loads((tmp_path / name).read_text())["format"] == 1
    series, _ = read_series(read_rows(tmp_path / "metrics.jsonl"), tmp_path / "api.log", [])
    assert series.keys() == {"loss"}, "the number is no figure"


def test_check_format(tmp_path: Path) -> None:
    for known in ({}, {"format": 1}, {"format": 2}, [], [{"format": 3}], 0, 2):
        check_format("file", known, 2)
    for newer in ({"format": 3}, {"format": "2"}, {"format": None}, 3):
        with pytest.raises(FormatError):
            check_format("file", newer, 2)
    check_sqlite(tmp_path / "none", 1)
    (tmp_path / "empty").touch()
    check_sqlite(tmp_path / "empty", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# what runs of earlier versions left ----------------------------------------------------------------------------------


ADAPTER = "580961a0de1138c29e56c8c2016bbf5474692486da8883e6fa2c5104f0dc57fe"
"""SHA-256 of the finished run's tensors, in the order of their names."""
WEIGHTS = "33953f00ff4eb6e167b8666f77536c7b55e5dd580d60ee4def01c7b36c5a591b"
"""The same of the unfinished run's."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(tensors[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def trainer_of(config: TrainConfig, policy: Policy) -> tuple[Trainer, Checkpoints]:
    trainer = Trainer(policy.model, config)
    return trainer, Checkpoints(config, policy, trainer.optimizer, trainer.norms)


def check_optimizer(trainer: Trainer, checkpoint: Path, steps: int) -> None:
    """That the optimizer has the states of the checkpoint, bit for bit, after that many steps."""
    saved = torch.load(checkpoint / "trainer_state.pt", weights_only=True)["optimizer"]
    loaded = trainer.optimizer.state_dict()["state"]
    assert loaded.keys() == saved["state"].keys() == set(range(len(trainer.parameters)))
    for number, state in saved["state"].items():
        assert state["step"] == loaded[number]["step"] == steps
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].any() and torch.equal(state[name], loaded[number][name])


def test_report_and_list(tmp_path: Path) -> None:
    finished, unfinished = copy_of(FINISHED, tmp_path), copy_of(UNFINISHED, tmp_path)
    for folder, prompt in ((finished, "0+1="), (unfinished, "2+3=")):
        command("report", folder)
        assert prompt in (folder / "report.html").read_text(), "the samples are on the page"
    found = {Path(run["folder"]).name: run for run in json.loads(command("runs", tmp_path, "--json"))}
    kept = ("mode", "model", "steps", "total_steps", "reward", "state")
    assert {name: tuple(run[key] for key in kept) for name, run in found.items()} == {
        # (0.4375 + 0.5 + 0.375 + 0.4375) / 4
        "finished": ("lora_only", f"{HOME}/model", 4, 4, 0.4375, "done"),
        # (0.25 + 0.4375 + 0.375 + 0.4375 + 0.25) / 5
        "unfinished": ("shared_vllm", f"{HOME}/model", 5, 1000, 0.35, "stopped"),
    }


def test_files_of_old_runs() -> None:
    finished = read_run(FINISHED)
    assert (finished.steps, finished.total_steps, finished.final_step, finished.is_done) == (4, 4, 4, True)
    assert finished.numbers("reward/mean") == [0.4375, 0.5, 0.375, 0.4375]
    assert finished.numbers("publish/version") == [1.0, 2.0, 3.0, 4.0]
    assert finished.numbers("env/arithmetic/groups_sent") == [9, 4, 2, 1]
    assert len(finished.samples) == 8, "two of each step"
    first = {"step": 1, "version": 0, "environment": "arithmetic", "prompt": "0+1=", "reward": 1.0}
    assert first.items() <= finished.samples[0].items()
    assert finished.samples[0]["pieces"] == ["1", "<|endoftext|>"]
    assert set(finished.checkpoints) == {"adapter_step_3", "adapter_final"}
    options = {"weight_bridge_mode": "lora_only", "lora_r": 8, "lr": 0.001, "arithmetic.group_size": "4"}
    assert options.items() <= finished.settings.items()
    unfinished = read_run(UNFINISHED)
    assert (unfinished.steps, unfinished.final_step, unfinished.is_done) == (5, None, False)
    assert unfinished.numbers("reward/mean") == [0.25, 0.4375, 0.375, 0.4375, 0.25]

    url = "http://127.0.0.1:28911"
    assert read_members(FINISHED / "servers") == (Member("server", url, "this machine", "running", 1),)
    assert read_served(FINISHED / "servers") == {url: Served(1, 4, "")}
    assert in_use(FINISHED / "servers") == {url: 1}
    assert StateFiles(UNFINISHED / "checkpoints" / STATES, "arithmetic").newest(3) == {"position": 19}


def test_the_adapter_is_resumed(tmp_path: Path) -> None:
    folder = copy_of(FINISHED, tmp_path)
    config = config_of(folder, folder)
    trainer, checkpoints = trainer_of(config, build_policy(config))
    progress = checkpoints.resume()
    path = folder / "checkpoints" / "adapter_final"
    assert checkpoints.safe_path == path
    assert (progress.step, progress.policy_version, len(progress.batches)) == (4, 4, 4)
    assert digest(load_file(path / "adapter_model.safetensors")) == ADAPTER
    assert isinstance(trainer.model, PeftModel) and digest(adapter_state(trainer.model)) == ADAPTER
    check_optimizer(trainer, path, steps=4)
    before = read_state(folder / "checkpoints" / "adapter_step_3").progress
    assert (before.step, before.policy_version) == (3, 3)


def test_all_weights_are_resumed_from_the_checkpoint_before_the_kill(tmp_path: Path) -> None:
    folder = copy_of(UNFINISHED, tmp_path)
    config = config_of(folder, folder)
    source = msgspec.json.decode((folder / "config" / FILE_NAME).read_bytes(), type=BridgeConfigFile)
    assert (source.schema_version, source.num_params) == (1, 10)
    policy = SharedWeights(load_model(config).requires_grad_(True), None, source)
    trainer, checkpoints = trainer_of(config, policy)
    progress = checkpoints.resume()
    policy.write_loaded()
    path = folder / "checkpoints" / "step_3"
    assert checkpoints.safe_path == path
    batches = ("da1043760e009b29", "dea9cfae8f05fc76", "b3db034ea7eb50a3")
    assert (progress.step, progress.policy_version, progress.batches) == (3, 3, batches)
    assert digest({name: each.detach() for name, each in trainer.model.named_parameters()}) == WEIGHTS
    check_optimizer(trainer, path, steps=3)
    assert sum(each.numel() for each in trainer.parameters) == 8256


async def test_queues_of_old_runs(tmp_path: Path) -> None:
    """Steps 4 and 5 were trained and not saved, step 6 was running: three batches of four groups of four."""

    def counts(service: Service) -> tuple[int, int, int]:
        status = service.status()
        return status.current_step, status.queue_size, status.leased_groups

    service = Service(Settings(store=copy_of(FINISHED, tmp_path) / "queue.sqlite"))
    assert counts(service) == (4, 0, 0)
    service.close()
    service = Service(Settings(store=copy_of(UNFINISHED, tmp_path) / "queue.sqlite"))
    assert counts(service) == (5, 0, 12)
    assert [each.name for each in service.status().environments] == ["arithmetic_0"]
    await service.register(registration(16, starting_step=3))
    assert counts(service) == (3, 12, 0)
    ids = []
    for _ in range(3):
        batch = await service.next_batch(lease=60.0)
        assert batch is not None and batch.lease is not None
        ids += service.queue.leases[batch.lease.batch_id].groups
    assert counts(service) == (3, 0, 12) and await service.next_batch(lease=60.0) is None
    service.close()
    assert ids == list(range(13, 25))


@pytest.mark.parametrize("run", [FINISHED, UNFINISHED], ids=("adapter", "all weights"))
def test_export(tmp_path: Path, run: Path) -> None:
    folder, out = copy_of(run, tmp_path), tmp_path / "out"
    adapter = run == FINISHED
    base = ("--model-name", MODEL) if adapter else ()
    assert command("export", folder, out, *base).strip() == str(out)
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert digest(load_file(out / file)) == (ADAPTER if adapter else WEIGHTS)
    assert not (out / "state.json").exists() and not (out / "trainer_state.pt").exists()
    if adapter:
        command("export", folder, tmp_path / "merged", "--merge", *base)
        out = tmp_path / "merged"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.num_parameters() == 8256
