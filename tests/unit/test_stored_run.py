"""A run's own folder, the options that it stores, and runs that are continued from them."""

from __future__ import annotations

import json
import logging
import shlex
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from grpo_trainer import __version__
from grpo_trainer.cli import app
from grpo_trainer.config import run as of_runs
from grpo_trainer.config.processes import RunConfig, claim_folder, link_latest, newest_run, next_folder
from grpo_trainer.config.run import build_run
from grpo_trainer.config.stored import OLD_OPTIONS, RUN_FILE, run_file
from grpo_trainer.errors import ConfigError
from grpo_trainer.machine import Machine
from grpo_trainer.model.shape import ModelShape
from grpo_trainer.record import write_record
from grpo_trainer.run import own_folder
from grpo_trainer.run_defaults import chosen
from tests.old_runs import FINISHED, UNFINISHED, copy_of
from tests.unit.factories import refusing

TINY = ModelShape(64, 128, layers=2, heads=4, kv_heads=4, head_dim=16, vocab=1000, tied=True, positions=4096)
ADAPTER = str(FINISHED / "checkpoints" / "adapter_final")


def stored(folder: Path, *words: str, file: dict[str, Any] | None = None, **flags: Any) -> RunConfig:
    """A run whose options were stored in a folder."""
    given = {key.replace("__", "."): value for key, value in flags.items()}
    config = build_run(file or {}, {"model_name": "m", "run_dir": str(folder), **given}, words)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_bytes(run_file(config))
    return config


def continued(resume: Path | str, *words: str, **flags: Any) -> RunConfig:
    return build_run({}, {"resume": str(resume), **{key.replace("__", "."): v for key, v in flags.items()}}, words)


def save_checkpoint(folder: Path) -> Path:
    path = folder / "checkpoints" / "adapter_step_3"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    return path


# folders ----------------------------------------------------------------------------------------------------


def test_runs_that_start_at_once_have_different_folders(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    assert next_folder(parent).name == "001" and newest_run(parent) is None
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: claim_folder(parent), range(16)))
    assert sorted(path.name for path in made) == [f"{number:03d}" for number in range(1, 17)]
    newest = newest_run(parent)
    assert newest is not None and newest.name == "016" and not (parent / "latest").is_symlink()
    for folder in ("002", "016"):
        link_latest(parent / folder)
    assert (parent / "latest").resolve() == (parent / "016").resolve()
    (parent / "1000").mkdir()
    assert next_folder(parent).name == "1001"
    old = tmp_path / "old" / "latest"  # the run of an earlier version stays where it was
    old.mkdir(parents=True)
    assert newest_run(old.parent) == old and claim_folder(old.parent).name == "001"
    link_latest(old.parent / "001")
    assert old.is_dir() and not old.is_symlink()


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError), own_folder(build_run({}, {"model_name": "m"})) as config:
        assert config.run_dir == Path("runs/001") and config.run_dir.is_dir()
        raise ConfigError("no room")
    assert not (tmp_path / "runs" / "001").exists() and not (tmp_path / "runs" / "latest").is_symlink()
    with own_folder(build_run({}, {"model_name": "m"})) as config:
        (config.run_dir / "log").touch()
    assert (tmp_path / "runs" / "001" / "log").exists()
    with own_folder(build_run({}, {"model_name": "m", "run_dir": "mine"})) as config:
        assert config.run_dir == Path("mine") and not config.run_dir.exists()


# continued --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"lora_r": 32, "lora_layer_indices": "0-3", "lr": 3e-4, "kl_beta": 0.1, "max_staleness": 2},
        {"weight_bridge_mode": "shared_vllm", "master_weights": True, "trainer_gpus": 2},
        {"weight_bridge_mode": "none", "train_layer_indices": "1", "batch_size": 4, "server__dtype": "bfloat16"},
        {"weight_bridge_mode": "broadcast", "server__replicas": 2, "server__gpus": "0;1", "api__port": 0},
        {"lora_adapter": ADAPTER, "kl_beta": 0.1},
        {"server__quantization": "fp8", "server__extra_args": "--seed,7", "prompts_per_step": 4},
    ],
)
def test_a_run_is_continued_by_its_folder_alone(tmp_path: Path, flags: dict[str, Any]) -> None:
    folder = tmp_path / "a run; $x" / "007"
    words = ("--env.group_size", "4", "--env.level=2", "--openai.timeout", "9")
    config = stored(folder, *words, env="word_problems", **flags)
    command = (folder / RUN_FILE).read_text().splitlines()[0].rpartition(": ")[2]
    assert shlex.split(command) == ["grpo", "run", "--resume", str(folder)]
    again = continued(folder)
    assert again.run_dir == folder and again.trainer.resume == "auto"
    assert again.unset <= {"batch_size", "microbatch", "seq_len"}
    trainer = again.trainer.model_copy(update={"resume": "never"})
    assert (trainer, again.server, again.api) == (config.trainer, config.server, config.api)
    assert (again.options, again.environments) == (config.options, config.environments)


def rewrite(folder: Path, *removed: str, **added: Any) -> None:
    """Changes the trainer's table of a stored run."""
    tables = tomllib.loads((folder / RUN_FILE).read_text())
    tables["trainer"] |= added
    for key in removed:
        del tables["trainer"][key]
    (folder / RUN_FILE).write_text(tomli_w.dumps(tables))


def test_a_run_of_before_an_option_is_continued(tmp_path: Path) -> None:
    config = stored(tmp_path / "r", weight_bridge_mode="none")
    rewrite(tmp_path / "r", **dict.fromkeys(OLD_OPTIONS, True))  # which are gone now
    again = continued(tmp_path / "r").trainer
    assert again.model_copy(update={"resume": "never"}) == config.trainer
    flags: list[dict[str, Any]] = [{"kl_beta": 0.1}, {"log_kl": True}]
    for number, of_reference in enumerate(flags):
        folder = tmp_path / str(number)
        stored(folder, lora_adapter=ADAPTER, **of_reference)
        rewrite(folder, "kl_reference")
        assert continued(folder).trainer.kl_reference == "base"


@pytest.mark.parametrize(("mode", "key"), [("lora_only", "lora_layer_indices"), ("none", "train_layer_indices")])
def test_a_run_with_layers_as_text_is_continued(tmp_path: Path, mode: str, key: str) -> None:
    """Earlier versions stored them so."""
    flags: dict[str, Any] = {"weight_bridge_mode": mode, key: "0-3,7"}
    stored(tmp_path / "r", **flags)
    rewrite(tmp_path / "r", **{key: "0-3,7"})
    save_checkpoint(tmp_path / "r")
    for same in ({}, {key: "7,0-3"}):
        assert continued(tmp_path / "r", **same).trainer.layer_indices == (0, 1, 2, 3, 7)
    with refusing(ConfigError, f"--{key.replace('_', '-')}", got="0,1,2,3", wanted="0,1,2,3,7"):
        continued(tmp_path / "r", **{key: "0-3"})


def test_new_defaults_change_no_stored_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stored(tmp_path / "r")
    monkeypatch.setattr(of_runs, "DEFAULTS", {"weight_bridge_mode": "none", "training_steps": 7})
    monkeypatch.setattr(of_runs, "PROMPTS", 5)
    for again in (continued(tmp_path / "r"), continued("auto", run_dir=str(tmp_path / "r"), model_name="m")):
        assert again.trainer.weight_bridge_mode == "lora_only" and again.trainer.training_steps == 100
        assert again.trainer.sequences_per_step == config.trainer.sequences_per_step


def started(folder: Path, *words: str, memory: int = 24, **flags: Any) -> RunConfig:
    """A run whose options were stored after the start chose some of them."""
    config = chosen(stored(folder, *words, **flags), Machine(python="3.12", memory=memory * 10**9), TINY)
    (folder / RUN_FILE).write_bytes(run_file(config))
    return config


def test_resume_chooses_again_what_the_start_chose(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    config = started(folder)
    assert (config.trainer.seq_len, config.trainer.lr) == (2048, 5e-4)
    assert tomllib.loads((folder / RUN_FILE).read_text())["chosen"] == ["batch_size", "lr", "microbatch", "seq_len"]
    again = continued(folder)
    assert (again.trainer.lr, again.trainer.seq_len) == (5e-4, 2048)
    assert again.trainer.max_tokens_per_microbatch is None and "microbatch" in again.unset
    assert "lr" not in again.unset, "it stays"
    longer = continued(folder, "--env.max_tokens", "20000").trainer
    assert (longer.seq_len, longer.sequences_per_step) == (20_000 + 1024, 256)
    assert continued(folder, "--env.max_tokens", "100").trainer.seq_len == 2048
    given = continued(folder, "--env.max_tokens", "100", seq_len=32_768)
    assert given.trainer.seq_len == 32_768 and "seq_len" not in given.unset
    assert run_file(chosen(continued(folder), Machine(python="3.12", memory=24 * 10**9), TINY)).count(b"seq_len") == 2
    started(tmp_path / "given", seq_len=512, max_tokens_per_microbatch=1024, prompts_per_step=8, batch_size=4)
    again = continued(tmp_path / "given", "--env.max_tokens", "20000")  # which stays
    assert (again.trainer.seq_len, again.trainer.batch_size) == (512, 4)
    assert again.trainer.max_tokens_per_microbatch == 1024 and not again.unset & {"microbatch", "batch_size"}


@pytest.mark.parametrize(
    ("flags", "batch", "steps"),
    [
        ({"gradient_accumulation_steps": 4}, 64, 4),
        ({"batch_size": 16}, 16, 16),
        ({"batch_size": 4, "gradient_accumulation_steps": 2}, 4, 2),
    ],
)
def test_resume_with_one_size_of_the_batch(tmp_path: Path, flags: dict[str, Any], batch: int, steps: int) -> None:
    started(tmp_path / "r")
    again = continued(tmp_path / "r", **flags)
    assert (again.trainer.batch_size, again.trainer.gradient_accumulation_steps) == (batch, steps)
    with refusing(ConfigError, "--gradient-accumulation-steps"):
        continued(tmp_path / "r", gradient_accumulation_steps=3)
    started(tmp_path / "old", batch_size=4, gradient_accumulation_steps=8)
    assert continued(tmp_path / "old", batch_size=2).trainer.sequences_per_step == 16


def test_flags_win_over_what_is_stored(tmp_path: Path) -> None:
    stored(tmp_path / "r", "--env.group_size", "4", training_steps=5, lr=1e-3, weight_bridge_mode="lora_restart")
    again = continued(
        tmp_path / "r", "--env.temperature=0.7", training_steps=9, weight_bridge_mode="lora_only", api__port=0
    )
    assert again.trainer.training_steps == 9 and again.trainer.lr == 1e-3 and again.api.port == 0
    assert again.environments[0].env == {"group_size": "4", "temperature": "0.7"}
    assert again.trainer.weight_bridge_mode == "lora_only"
    small = continued(tmp_path / "r", batch_size=4, gradient_accumulation_steps=2)
    assert small.trainer.sequences_per_step == 8


def test_resume_auto_takes_what_is_trained_and_not_where(tmp_path: Path) -> None:
    mode = "broadcast"
    stored(tmp_path / "r", weight_bridge_mode=mode, trainer_gpus=2, server__replicas=2, server__gpus="0;1", trace=True)
    again = continued("auto", run_dir=str(tmp_path / "r"))
    assert again.trainer.weight_bridge_mode == mode
    assert (again.options.trainer_gpus, again.server.replicas, again.options.trace) == (1, 1, False)
    nothing = continued("auto", run_dir=str(tmp_path / "other"), model_name="m")
    assert nothing.trainer.weight_bridge_mode == "lora_only" and nothing.run_dir == tmp_path / "other"


def test_resume_auto_without_a_folder_continues_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "run_dir" in continued("auto", model_name="m").unset
    stored(Path("runs/001"), lr=1e-3)
    stored(Path("runs/002"), lr=2e-3)
    again = continued("auto")
    assert again.run_dir == Path("runs/002") and again.trainer.lr == 2e-3 and "run_dir" not in again.unset


def test_a_checkpoint_continues_its_run_or_another(tmp_path: Path) -> None:
    """Another one does not inherit places."""
    stored(tmp_path / "r", weight_bridge_mode="lora_restart", wandb_group="g", wandb_project="p")
    path = save_checkpoint(tmp_path / "r")
    for folder in (None, tmp_path / "r", tmp_path / "new"):
        again = continued(path, **({"run_dir": str(folder)} if folder else {}))
        trainer, own = again.trainer, folder != tmp_path / "new"
        assert again.run_dir == (folder or tmp_path / "r") and trainer.weight_bridge_mode == "lora_restart"
        assert trainer.resume == str(path)
        assert trainer.wandb_group == ("g" if own else None) and trainer.wandb_project == "p"
    assert continued(path, run_dir=str(tmp_path / "new"), wandb_group="other").trainer.wandb_group == "other"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"weight_bridge_mode": "none"}, "--weight-bridge-mode"),
        ({"lora_r": 8}, "--lora-r"),
        ({"lora_target_modules": "q_proj"}, "--lora-target-modules"),
    ],
)
def test_other_parameters_than_the_checkpoints_are_refused(tmp_path: Path, flags: dict[str, Any], field: str) -> None:
    stored(tmp_path / "r")
    assert continued(tmp_path / "r", **flags), "nothing is saved yet"
    save_checkpoint(tmp_path / "r")
    with refusing(ConfigError, field):
        continued(tmp_path / "r", **flags)


def test_a_folder_that_is_not_there_and_two_folders_are_refused(tmp_path: Path) -> None:
    with refusing(ConfigError, "--resume", got=str(tmp_path / "typo")):
        continued(tmp_path / "typo", model_name="m")
    stored(tmp_path / "r")
    with refusing(ConfigError, "--run-dir"):
        continued(tmp_path / "r", run_dir=str(tmp_path / "s"))
    (tmp_path / "r" / RUN_FILE).write_text("a = [")
    with refusing(ConfigError, f"--resume {tmp_path / 'r' / RUN_FILE}"):
        continued(tmp_path / "r")


OLD_TRAINER = """
model_name = "m"
training_steps = 60
batch_size = 64
gradient_accumulation_steps = 1
seq_len = 64
lr = 1e-6
rollout_api_key = "of-the-api"
vllm_port = 9123
vllm_also = ["127.0.0.1:9124"]
vllm_api_key = "of-the-server"
vllm_dtype = "bfloat16"
"""
OLD_ENVIRONMENT = """
[env]
rollout_api_key = "of-the-api"
group_size = 16
level = "1-2"

[openai]
api_key = "of-the-server"
timeout = 9.0
"""


@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_a_run_of_version_0_1_keeps_its_bridge(tmp_path: Path, resume: str) -> None:
    """Its trainer's file has no mode: `none` was the default."""
    config = tmp_path / "r" / "config"
    config.mkdir(parents=True)
    (config / "trainer.toml").write_text(OLD_TRAINER)
    (config / "env-word_problems.toml").write_text(OLD_ENVIRONMENT)
    flags = {"run_dir": str(tmp_path / "r")} if resume == "auto" else {}
    again = continued("auto" if resume == "auto" else tmp_path / "r", **flags)
    assert again.trainer.weight_bridge_mode == "none" and again.run_dir == tmp_path / "r"
    assert (again.trainer.training_steps, again.trainer.sequences_per_step) == (60, 64)
    assert (again.trainer.lr, again.trainer.seq_len) == (1e-6, 64)
    assert again.server.dtype == "bfloat16" and again.server.replicas == (2 if resume == "folder" else 1)
    (environment,) = again.environments
    assert environment.name == "word_problems" and environment.env == {"group_size": 16, "level": "1-2"}
    assert environment.openai == {"timeout": 9.0}
    assert again.trainer.rollout_api_key is None and again.trainer.server.api_key is None


@pytest.mark.parametrize(("mode", "lr"), [(None, 1e-6), ("shared_vllm", 1e-6), ("lora_only", 1e-5)])
@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_old_run_keeps_the_defaults_of_its_version(tmp_path: Path, mode: str | None, lr: float, resume: str) -> None:
    (tmp_path / "config").mkdir()
    table = 'model_name = "m"\n' + (f'weight_bridge_mode = "{mode}"\n' if mode else "")
    (tmp_path / "config" / "trainer.toml").write_text(table)
    again = continued("auto", run_dir=str(tmp_path)) if resume == "auto" else continued(tmp_path)
    again = chosen(again, Machine(python="3.12", memory=24 * 10**9), TINY)
    trainer = again.trainer
    assert (trainer.training_steps, trainer.batch_size, trainer.gradient_accumulation_steps) == (10, 2, 32)
    assert (trainer.lr, trainer.seq_len, trainer.log_samples) == (lr, 2048, 0)
    assert trainer.max_tokens_per_microbatch is None
    assert continued(tmp_path, training_steps=20).trainer.training_steps == 20


@pytest.mark.parametrize(("folder", "mode", "steps"), [(FINISHED, "lora_only", 4), (UNFINISHED, "shared_vllm", 1000)])
def test_the_options_of_released_versions_are_read(folder: Path, mode: str, steps: int) -> None:
    again = continued(folder)
    assert (again.trainer.weight_bridge_mode, again.trainer.training_steps) == (mode, steps)
    assert (again.trainer.sequences_per_step, again.trainer.dtype) == (16, "float32")
    assert again.server.extra_args == ("--kv-cache-memory-bytes", "16777216")
    assert again.environments[0].env == {"low": "0", "high": "3", "group_size": "4"}
    assert again.environments[0].openai == {}


# keys -------------------------------------------------------------------------------------------------------


def test_stored_run_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret-6")
    words = (
        "--env.teacher_url",
        "http://u:s3cret-4@t/v1",
        "--env.teacher_api_key",
        "s3cret-1",
        "--env.system_prompt=s3cret-6",
    )
    keys: dict[str, Any] = {"rollout_api_key": "s3cret-2", "vllm_api_key": "s3cret-3"}
    keys["server__extra_args"] = "--hf-token,s3cret-5"
    stored(tmp_path / "r", *words, **keys)
    text = (tmp_path / "r" / RUN_FILE).read_text()
    tables = tomllib.loads(text)
    assert "s3cret" not in text and tables["environments"][0]["env"] == {"teacher_url": "http://t/v1"}
    assert {"trainer.rollout_api_key", "environments.0.env.system_prompt"} <= set(tables["left_out"])
    for resume in (tmp_path / "r", "auto"):
        with pytest.raises(ConfigError) as error:
            continued(resume, vllm_api_key="s3cret-3", **({"run_dir": str(tmp_path / "r")} if resume == "auto" else {}))
        assert [each.field for each in error.value.problems] == ["--env.teacher_url", "--env.system_prompt"]
    with pytest.raises(ConfigError) as error:
        build_run(tables, {"run_dir": str(tmp_path / "repeated")}, ["--env.teacher_url=http://t"])
    assert [each.field for each in error.value.problems] == ["--env.system_prompt"]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = continued(
            tmp_path / "r", "--env.teacher_url", "http://u:x@t", "--env.system_prompt=Add.", vllm_api_key="s3cret-3"
        )
    assert again.environments[0].env == {"teacher_url": "http://u:x@t", "system_prompt": "Add."}
    assert again.trainer.server.api_key == "s3cret-3" and again.server.extra_args == ()
    (warning,) = caplog.records
    assert "trainer.rollout_api_key" in str(warning.args)


def test_stored_run_keeps_words_like_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    prompt = "End your answer with token=<number>. password: none. Bearer examples --ask nothing"
    words = ("--env.system_prompt", prompt)
    flags: dict[str, Any] = {"reward": [r"regex:token=(\d+)"], "data": str(tmp_path / "rows.jsonl")}
    config = stored(tmp_path / "r", *words, model_name="models/sk-learn-and-more-of-it-0123456789", **flags)
    assert "left_out" not in tomllib.loads((tmp_path / "r" / RUN_FILE).read_text())
    again = continued(tmp_path / "r")
    assert again.environments == config.environments and again.environments[0].env["system_prompt"] == prompt
    assert again.trainer.model_name == config.trainer.model_name


# what a run can be repeated from ----------------------------------------------------------------------------


def test_versions_and_the_users_environment_are_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/sums.py").write_text("raise SystemExit('is not imported')\n")
    config = build_run({}, {"model_name": "m", "run_dir": str(tmp_path / "r"), "env": "mine.sums"})
    (tmp_path / "r").mkdir()
    for gpus in (["H200"], ["H200"], ["H100", "H100"]):
        write_record(config, gpus)
    first, second = json.loads((tmp_path / "r" / "versions.json").read_text())
    assert first["grpo"] == __version__ and {"torch", "vllm", "transformers", "python"} <= set(first)
    assert (first["gpus"], second["gpus"]) == (["H200"], ["H100", "H100"])
    assert (tmp_path / "r" / "code" / "sums.py").read_text() == Path("mine/sums.py").read_text()
    assert continued(tmp_path / "r").environments[0].name == "mine.sums"
    assert (tmp_path / "r" / RUN_FILE).stat().st_mode & 0o077 == 0


def test_record_has_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "my.py").write_text(f"raise SystemExit('{folder} is not imported')\n")
    Path("in_a_module.py").write_text("x = 1\n")
    rewards = ["a/my.py:f", "b/my.py:g=0.5", "in_a_module:h", "math", "regex:a:b.py", "gone.py:i"]
    flags = {"model_name": "m", "run_dir": str(tmp_path / "r"), "data": "rows.jsonl", "reward": rewards}
    config = build_run({}, {**flags, "allow_changed_data": True}, ["--data.held_out", "5"])
    (tmp_path / "r").mkdir()
    for _ in range(2):
        write_record(config, [])
    code = tmp_path / "r" / "code"
    assert len(list(code.glob("my*.py"))) == 2 and (code / "in_a_module.py").read_text() == "x = 1\n"
    Path("in_a_module.py").write_text("x = 2\n")
    assert str(code) not in caplog.text
    for _ in range(2):
        write_record(config, [])
    assert caplog.text.count(str(code / "in_a_module.py")) == 2, "each start with a changed file says so"
    assert sorted(path.read_text() for path in code.glob("in_a_module*.py")) == ["x = 1\n", "x = 2\n"]
    again = continued(tmp_path / "r")
    assert again.environments == config.environments and again.environments[0].name == "dataset"
    assert config.options.allow_changed_data and not again.options.allow_changed_data, "a permission is for one start"


def test_a_run_that_names_files_is_continued_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    Path("mine.py").touch()
    for number, reward in enumerate(("mine.py:f", "mine:f")):
        stored(Path(f"r/{number}"), data="rows.jsonl", reward=[reward])
        Path("../a").rename("../b")  # with its files
        continued(Path(f"r/{number}"))
        monkeypatch.chdir(tmp_path)
        with refusing(ConfigError, f"--resume b/r/{number}", words=[str(tmp_path / "b")]):
            continued(f"b/r/{number}")
        assert continued(f"b/r/{number}", reward=["math"]).environments[0].rewards == ("math",), (
            "the option was given again"
        )
        monkeypatch.chdir(Path("b").rename("a"))


def test_commands_without_a_folder_take_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("report", "servers"):
        nothing = CliRunner().invoke(app, [command])
        assert isinstance(nothing.exception, ConfigError) and nothing.exception.field == "--run-dir"
    for folder in ("001", "002"):
        copy_of(FINISHED, tmp_path / "runs").rename(tmp_path / "runs" / folder)
    assert CliRunner().invoke(app, ["report"]).output == "runs/002/report.html\n"
    assert json.loads(CliRunner().invoke(app, ["servers", "--json"]).stdout)[0]["name"] == "server"
