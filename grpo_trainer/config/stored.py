"""A run's folder: which one a new run gets, and `run.toml` in it, the options from which the run can be repeated.

`run.toml` has every option with its value, so a later version with other defaults continues the run as it was. It has
no keys: `grpo run --resume RUN` takes them from the environment variables or flags of its own start. Folders of version
0.1 have no such file; their options are read from the configuration files of their processes.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import tomli_w

from environments.running.settings_check import BUILT_IN
from grpo_trainer.config.bridge import CheckpointRestart
from grpo_trainer.config.options import dump
from grpo_trainer.config.rules import SET_BY_THE_RUN
from grpo_trainer.config.server import ALIASES
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from grpo_trainer.config.run import RunConfig

RUNS = Path("runs")
"""Parent folder of the runs that are started without `--run-dir`."""
LATEST = "latest"
"""In `RUNS`: the run folder of version 0.1 by default, now a link to the newest numbered one."""
RUN_FILE = "run.toml"
OLD_FILE = Path("config", "trainer.toml")
"""The trainer's own file, which a folder of version 0.1 has, too."""

SECRET_NAME = re.compile(
    r"(?:^|_)(?:secret\w*|password|passwd|credentials?|authorization|bearer|token|"
    r"(?:api|access|secret|private|auth|openai|anthropic|hf|wandb)_?key(?:_id)?)$"
)
NO_SECRET = re.compile(r"(?:^|_)(?:eos|bos|pad|unk|sep|cls|mask|stop|start|end|think\w*|special|image|tool\w*)_token$")
"""Tokens of a vocabulary."""
SHORTEST_SECRET = 6
"""Characters of an environment variable's value that is looked for in other values."""


# ---------------------------------------------------------------- folders


def next_folder(parent: Path = RUNS) -> Path:
    """Return the path of the next numbered run, such as runs/007. Another run may take it first: see `claim_folder`."""
    return parent / f"{max(_numbers(parent), default=0) + 1:03d}"


def claim_folder(parent: Path = RUNS) -> Path:
    """Make the folder of the next numbered run, which no other process gets, and point `runs/latest` to it."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = next_folder(parent)
        try:
            folder.mkdir()
        except FileExistsError:
            continue  # another process was faster
        link, new = parent / LATEST, parent / f".{LATEST}.{os.getpid()}"
        if link.is_symlink() or not link.exists():  # a folder is a run of version 0.1
            with suppress(OSError):  # a file system without links
                new.symlink_to(folder.name)
                new.replace(link)
        return folder


def newest_run(parent: Path = RUNS) -> Path | None:
    """Return the folder of the newest run that was started without `--run-dir`; None: there is none."""
    numbers = list(_numbers(parent))
    if numbers:
        return parent / f"{max(numbers):03d}"
    return parent / LATEST if (parent / LATEST).is_dir() else None


def _numbers(parent: Path) -> Iterator[int]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from (int(path.name) for path in parent.iterdir() if re.fullmatch(r"\d{3,}", path.name))


def holds_run(folder: Path) -> bool:
    """Return whether a folder has the options of a run."""
    return (folder / RUN_FILE).is_file() or (folder / OLD_FILE).is_file()


# ---------------------------------------------------------------- run.toml


def run_file(config: RunConfig) -> bytes:
    """Return the content of `run.toml`: the tables that build the run again, without keys."""
    options, server = dump(config.options), dump(config.server)
    trainer = {key: value for key, value in dump(config.trainer).items() if key not in (*SET_BY_THE_RUN, *ALIASES)}
    for key in ("run_dir", "trace"):
        options.pop(key, None)
    for key in ("replicas", "gpus", "gpu_memory_utilization"):
        if key not in config.server.model_fields_set:
            server.pop(key, None)  # chosen by the machine's GPUs
    trainer.pop("resume", None)
    if "prompts_per_step" in options:  # the batch is computed from it
        for key in ("batch_size", "gradient_accumulation_steps"):
            trainer.pop(key, None)
    environments = [
        {key: value for key, value in each.model_dump(mode="json").items() if value} for each in config.environments
    ]
    tables = {**options, "trainer": trainer, "server": server, "api": dump(config.api), "environments": environments}
    left_out: list[str] = []
    clean = without_secrets(tables, left_out)
    head = f"# The options of this run. To continue it: grpo run --resume {config.run_dir}\n"
    if left_out:
        head += f"# Keys are not stored. Left out: {', '.join(left_out)}\n"
    return (head + "\n" + tomli_w.dumps(clean)).encode()


def read_stored(folder: Path) -> dict[str, Any]:
    """Return the tables of a run's folder; empty: it holds no run.

    Raises:
        ConfigError: its file can't be read.
    """
    path = folder / (RUN_FILE if (folder / RUN_FILE).is_file() else OLD_FILE)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(
            f"can't be read: {error.strerror}", field=f"--resume {path}", fix="continue it as its owner"
        ) from None
    try:
        tables = tomllib.loads(text)
        return tables if path.name == RUN_FILE else _of_old_files(folder, tables)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", field=f"--resume {path}", fix="correct the file there") from None


def _of_old_files(folder: Path, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a run of version 0.1 from the configuration files of its trainer and environments."""
    servers = 1 + len(trainer.get("vllm_also", ()))
    gpus = {"gpus": trainer["vllm_gpus"]} if "vllm_gpus" in trainer else {}
    kept = {"weight_bridge_mode": CheckpointRestart().mode, **trainer}
    tables: dict[str, Any] = {
        "trainer": {key: value for key, value in kept.items() if key not in OLD_SET_BY_THE_RUN},
        "server": {**({"replicas": servers} if servers > 1 else {}), **gpus},
    }
    seq_len = trainer.get("seq_len", ModelConfig.model_fields["seq_len"].default)
    longest, environments = min(seq_len, trainer.get("max_model_len", seq_len)), []
    for path in sorted((folder / "config").glob("env-*.toml")):
        found = tomllib.loads(path.read_text())
        kind = re.sub(r"-\d+$", "", path.stem.removeprefix("env-"))
        if kind not in BUILT_IN:
            return tables  # the module of a user's own environment is not in these files
        derived = {"tokenizer_name": trainer.get("model_name"), "max_token_length": longest}
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


# ---------------------------------------------------------------- keys


def without_secrets(value: Any, left_out: list[str], where: str = "") -> Any:
    """Return parsed values without keys, at every depth; add the names of what was left out to a list.

    A key is known by its name, by its form (`Bearer …`, a password in a URL), or because an environment variable with
    the name of a key has the same value. JSON within a text, and words after a flag in a list, are parsed as well.
    """
    known = [text for name, text in os.environ.items() if _is_secret(name, text) and len(text) >= SHORTEST_SECRET]
    return _without(value, known, left_out, where)


_GONE = object()
"""A value that is left out."""


def _without(value: Any, known: list[str], left_out: list[str], where: str) -> Any:
    if isinstance(value, Mapping):
        kept = {}
        for key, each in value.items():
            name = f"{where}.{key}" if where else str(key)
            clean = _GONE if _is_secret(str(key), each) else _without(each, known, left_out, name)
            if clean is _GONE:
                left_out.append(name)
            else:
                kept[key] = clean
        return kept
    if isinstance(value, (list, tuple)):
        words = []
        for at, each in enumerate(value):
            flag, equals, text = each.partition("=") if isinstance(each, str) else ("", "", "")
            before = value[at - 1] if at and isinstance(value[at - 1], str) else ""
            if flag.startswith("-") and _is_secret(flag, text if equals else "x"):
                left_out.append(f"{where}.{flag}")
            elif before.startswith("-") and "=" not in before and _is_secret(before, each):
                continue  # the value of such a flag
            elif (clean := _without(each, known, left_out, where)) is _GONE:
                left_out.append(f"{where}.{at}")
            else:
                words.append(clean)
        return words
    return _without_text(value, known, left_out, where) if isinstance(value, str) else value


def _without_text(text: str, known: list[str], left_out: list[str], where: str) -> Any:
    if any(secret in text for secret in known) or re.match(r"(?i)(?:bearer|basic)\s+\S", text):
        return _GONE
    if text.lstrip().startswith(("{", "[")):
        with suppress(ValueError):
            parsed = json.loads(text)
            clean = _without(parsed, known, left_out, where)
            return text if clean == parsed else json.dumps(clean)
    if "://" in text:
        with suppress(ValueError):
            url = urlsplit(text)
            query = [(key, each) for key, each in parse_qsl(url.query) if not _is_secret(key, each)]
            user = "@" in url.netloc
            if user or len(query) < len(parse_qsl(url.query)):
                left_out.append(f"{where} (part of the URL)")
                return url._replace(netloc=url.netloc.rpartition("@")[2], query=urlencode(query)).geturl()
    return text


def _is_secret(name: str, value: Any) -> bool:
    """Return whether an option, a flag or an environment variable holds a key by its name."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("-").replace("-", "_")
    if isinstance(value, (bool, int, float)) or value in (None, ""):
        return False
    return bool(SECRET_NAME.search(plain)) and not NO_SECRET.search(plain)
