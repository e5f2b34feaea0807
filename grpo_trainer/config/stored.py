"""`run.toml` in a run's folder: the options from which the run can be repeated.

`run.toml` has every option with its value, so a later version with other defaults continues the run as it was. It has
no keys: `grpo run --resume RUN` takes them from the environment variables or flags of the new start. Folders of version
0.1 have no such file; their options are read from the configuration files of their processes.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from environments.running.settings_check import BUILT_IN
from grpo_common.errors import Problem
from grpo_common.redaction import is_secret, redact
from grpo_trainer.config.options import dump, parse_ranges
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.rules import SET_BY_THE_RUN
from grpo_trainer.config.train import usual_rates
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import GONE

log = logging.getLogger(__name__)

RUN_FILE = "run.toml"
OLD_FILE = Path("config", "trainer.toml")
"""The trainer's own file, which a folder of version 0.1 has, too."""
LEFT_OUT = "left_out"
"""In `run.toml`: the names of options that are not stored, or not whole, because they hold secrets."""
CHOSEN = "chosen"
"""In `run.toml`: the names of options that nobody gave (`RunConfig.unset`)."""
STARTED_IN = "started_in"
"""In `run.toml`: the folder from which relative paths count. If the run's folder is below it, it is seen from there,
so that both may move."""
COMPUTED = {"batch_size": "batch_size", "microbatch": "max_tokens_per_microbatch"}
"""Names of `RunConfig.unset` -> options of the trainer that each start computes again, and `run.toml` has not."""
OLD_OPTIONS = frozenset({"activation_offload", "benchmark", "checkpoint_url", "vllm_standby"})
"""Options of earlier versions that did not change what is trained: a run that has them continues without them."""
OLD_DEFAULTS = {
    **{"training_steps": 10, "batch_size": 2, "gradient_accumulation_steps": 32, "seq_len": 2048, "log_samples": 0}
}
"""Defaults of version 0.1, whose files have only what the user gave. `grpo run` would choose other values now."""
OLD_SET_BY_THE_RUN = frozenset(
    {
        *("atropos_url", "rollout_url", "rollout_api_key", "vllm_api_key", "vllm_host", "vllm_port", "vllm_also"),
        *("vllm_roster", "vllm_gpus", "vllm_config_path", "save_path", "log_dir", "resume"),
    }
)
"""Options that version 0.1 wrote into a trainer's file although nobody had given them, and keys."""
OLD_SET_FOR_ENVIRONMENTS = frozenset(
    {
        *("metrics_path", "wandb_name", "rollout_server_url", "rollout_api_key", "use_wandb"),
        *("retry_timeout", "base_url", "model_name", "server_type", "api_key", "roster"),
    }
)


def holds_run(folder: Path) -> bool:
    """Return whether a folder has the options of a run."""
    return (folder / RUN_FILE).is_file() or (folder / OLD_FILE).is_file()


def run_file(config: RunConfig) -> bytes:
    """Return the content of `run.toml`: the tables that build the run again, without keys."""
    not_repeated = {*SET_BY_THE_RUN, "run_dir", "trace", "allow_changed_data", "resume"}
    not_repeated |= {COMPUTED[name] for name in config.unset & COMPUTED.keys()}
    options, trainer = dump(config.options), dump(config.trainer)
    if "prompts_per_step" in options:  # the batch is computed from it
        not_repeated.add("gradient_accumulation_steps")
    by_machine = {"replicas", "gpus", "gpu_memory_utilization"} - config.server.model_fields_set
    server = {
        key: value
        for key, value in trainer.pop("server").items()
        if f"server.{key}" not in not_repeated and key not in by_machine
    }
    options, trainer = ({k: v for k, v in table.items() if k not in not_repeated} for table in (options, trainer))
    environments = [
        {key: value for key, value in each.model_dump(mode="json").items() if value} for each in config.environments
    ]
    tables = {**options, "trainer": trainer, "server": server, "api": dump(config.api), "environments": environments}
    secrets = [text for name, text in os.environ.items() if is_secret(name) and name != "PWD"]  # a shell's folder
    clean = redact(tables, drop=True, known=secrets)
    head = f"# The options of this run. To continue it: grpo run --resume {shlex.quote(str(config.run_dir))}\n"
    notes = {LEFT_OUT: list(dict.fromkeys(clean.names)), CHOSEN: sorted(config.unset & {*COMPUTED, "lr", "seq_len"})}
    here, folder = Path.cwd(), config.run_dir.resolve()
    place = {STARTED_IN: os.path.relpath(here, folder) if folder.is_relative_to(here) else str(here)}
    kept = {key: names for key, names in notes.items() if names}
    return (head + "\n" + tomli_w.dumps(place | kept | clean.value)).encode()


def read_stored(folder: Path) -> dict[str, Any]:
    """Return the tables of a run's folder; empty: it holds no run. Raise a `ConfigError` if its file can't be read."""
    path = folder / (RUN_FILE if (folder / RUN_FILE).is_file() else OLD_FILE)
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        tables = tables if path.name == RUN_FILE else _of_old_files(folder, tables)
        began = (folder / str(tables.get(STARTED_IN, Path.cwd()))).resolve()
    except FileNotFoundError:
        return {}
    except OSError as error:
        why, fix = f"can't be read: {error.strerror}", "continue it as its owner"
        raise ConfigError(why, field=f"--resume {path}", fix=fix) from None
    except (ValueError, RecursionError) as error:
        why, fix = f"no options of a run: {error}", "correct it, and the files beside it"
        raise ConfigError(why, field=f"--resume {path}", fix=fix) from None
    trainer = tables.get("trainer", {})
    if "checkpoint_url" in trainer:
        log.warning("%s: checkpoint_url has been removed, so nothing is copied there; %s", path, GONE["checkpoint_url"])
    kept = {key: trainer[key] for key in trainer if key not in OLD_OPTIONS}
    if kept.get("lora_adapter") and (kept.get("kl_beta") or kept.get("log_kl")):
        kept.setdefault("kl_reference", "base")  # before the option, the reference was the model without an adapter
    for key in kept.keys() & {"lora_layer_indices", "train_layer_indices"}:
        if isinstance(kept[key], str):  # before they were lists; a wrong one is named when the options are read
            with suppress(ConfigError):
                kept[key] = [*parse_ranges(kept[key])]
    return {**tables, "trainer": kept, STARTED_IN: str(began)}


def left_behind(folder: Path, began: Path, names: Iterable[str]) -> Iterator[Problem]:
    """Yield the first file, folder or module of names that a run began with elsewhere: here it may be another."""
    for name in names if began != Path.cwd() else ():
        own, module = Path(name.partition(":")[0]), began.joinpath(*name.partition(":")[0].split("."))
        there = (began / own, module.with_name(f"{module.name}.py"), module / "__init__.py")
        if own.parts and not own.is_absolute() and any(path.exists() for path in there):
            fix = f"cd {shlex.quote(str(began))}, and resume there, or give the option again"
            yield Problem(f"--resume {folder}", f"a start in {Path.cwd()}", f"one in {began}, which has {own}", fix)
            return


def _of_old_files(folder: Path, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a run of version 0.1 from the configuration files of its trainer and environments."""
    servers, mode = 1 + len(trainer.get("vllm_also", ())), trainer.get("weight_bridge_mode", "none")
    server = {"replicas": servers} if servers > 1 else {}
    server |= {"gpus": trainer["vllm_gpus"]} if "vllm_gpus" in trainer else {}
    kept = {"weight_bridge_mode": mode, "lr": usual_rates(mode).default, **OLD_DEFAULTS, **trainer}
    own = {key: value for key, value in kept.items() if key not in OLD_SET_BY_THE_RUN}
    tables: dict[str, Any] = {"trainer": own, "server": server}
    longest = min(kept["seq_len"], trainer.get("max_model_len", kept["seq_len"]))
    derived = {"tokenizer_name": trainer.get("model_name"), "max_token_length": longest}
    environments = []
    for path in sorted((folder / "config").glob("env-*.toml")):
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        kind = re.sub(r"-\d+$", "", path.stem.removeprefix("env-"))
        if kind not in BUILT_IN:
            return tables  # the module of a user's own environment is not in these files
        env, openai = (
            {
                key: value
                for key, value in found.get(table, {}).items()
                if key not in OLD_SET_FOR_ENVIRONMENTS and value != derived.get(key)
            }
            for table in ("env", "openai")
        )
        environments.append({"name": kind, "env": env, "openai": openai})
    return tables | ({"environments": environments} if environments else {})
