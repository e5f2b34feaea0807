"""`grpo run`: one file or a set of flags for the rollout API, the server, the environments and the trainer.

In TOML, a table each; the keys of `[trainer]` are the flags of `grpo train`:

    run_dir = "runs/sums"

    [trainer]
    model_name = "runs/demo-model"
    weight_bridge_mode = "lora_only"

    [server]
    port = 0

    [[environments]]
    name = "arithmetic"
    env = { group_size = 8 }

On the command line the trainer's flags stand as they are, the others carry their table's name: `--server.port 0`,
`--api.port 0`; `--env NAME` picks the environment and `--env.KEY`, `--openai.KEY`, `--data.KEY` set its options.
`--data D --reward R` is the environment `dataset`; in TOML:

    [data]
    path = "problems.jsonl"

    [[rewards]]
    function = "my.py:right"
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from environments.running import settings_check
from grpo_common.errors import Problem, collected
from grpo_common.redaction import is_secret
from grpo_common.suggest import nearest
from grpo_trainer.config.bridge import ADAPTER_MODES
from grpo_trainer.config.options import Section, build, dump, given_keys, options_of, override, shown
from grpo_trainer.config.processes import (
    PROMPTS,
    ApiProcess,
    EnvironmentProcess,
    RunConfig,
    RunOptions,
    newest_run,
    problems_of_tables,
)
from grpo_trainer.config.rules import SET_BY_THE_RUN, checked
from grpo_trainer.config.server import Server
from grpo_trainer.config.stored import CHOSEN, LEFT_OUT, RUN_FILE, holds_run, read_stored
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.config.values import at_home
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import flags_of, unknown_key, unknown_word

log = logging.getLogger(__name__)

GROUP = 8
"""Answers to a prompt of an environment whose `group_size` is not known before it runs."""
PROMPT_ROOM = 1024
"""Tokens for the prompt beside an answer of `--env.max_tokens`, unless `--seq-len` is given."""
GPUS_PER_NODE = 8
"""Default of `--gpus-per-node`, and what a dry run expects of a cluster that does not answer."""
PASS_TOKENS = 16_384
"""Tokens of a forward pass, unless the user says otherwise or memory allows fewer."""
DEFAULTS = {"weight_bridge_mode": "lora_only", "training_steps": 100}
"""Where `grpo run` differs from `grpo train`, whose defaults are those of the Atropos example trainer."""


OF_THE_ENVIRONMENT = ("data", "rewards")
"""Tables of a file that may stand outside `[[environments]]` if there is only one environment."""
SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {"options": RunOptions, "trainer": TrainConfig, "api": ApiProcess}
)
"""By their names in `RunConfig`."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: the file is missing or is no TOML; the message has line and column.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            "no such file", field="--config", got=path, wanted="a TOML file", fix="correct the path"
        ) from None
    except IsADirectoryError:
        raise ConfigError(field="--config", got=f"{path}, a folder", wanted="a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", field=f"--config {path}", fix="correct the file there") from None


def build_run(file: Mapping[str, Any], flags: Mapping[str, Any], env_args: Sequence[str] = ()) -> RunConfig:
    """A run's configuration from a file's tables and flags; flags win.

    Args:
        file: the tables of the TOML file, empty without one.
        flags: values by key; `server.` and `api.` keys carry their prefix, `run_dir` and `env` are the run's.
        env_args: what the command line has beyond known flags: `--env.KEY VALUE` and `--openai.KEY VALUE`.

    Raises:
        ConfigError: unknown keys, wrong values, options that the run sets itself, or options that do not go together;
            the last only where all else is right.
    """
    problems: list[Problem] = []
    given, typed = _tables_of(file, problems), _tables_of_flags(flags)
    stored, stored_in = _continued(given, typed, problems)
    kept = _tables_of(stored, problems)
    layers = (kept, given, typed)
    _say_one_batch(layers)
    keeps_prompts = "prompts_per_step" in kept["options"] and not any(
        "prompts_per_step" in each["options"] for each in (given, typed)
    )
    merged = {}
    for table, section in SECTIONS.items():
        merged[table] = override(section, override(section, kept[table], given[table]), typed[table])
    trainer = merged["trainer"]
    for name in list(trainer):
        (key,) = given_keys(TrainConfig, {name: None})
        if key in SET_BY_THE_RUN:
            flag, instead = f"--{name.replace('_', '-')}", SET_BY_THE_RUN[key]
            problems.append(Problem(flag, fix=f"use {instead}", summary="set by the run itself"))
            del trainer[name]
    said = given_keys(TrainConfig, trainer) - _still_chosen(((stored, kept), (file, given), ({}, typed)))
    if "weight_bridge_mode" not in said and file:
        mode = DEFAULTS["weight_bridge_mode"]
        log.warning(
            "the file names no weight_bridge_mode: grpo run trains %s by default since 0.2 (earlier: none)", mode
        )
    trainer |= {key: value for key, value in DEFAULTS.items() if key not in said}
    built: dict[str, Any] = {}
    for table, section in SECTIONS.items():
        with collected(problems):
            built[table] = build(section, merged[table], where="api." if table == "api" else "")
    with collected(problems):
        options = _env_options(env_args, problems)
        if flags.get("data") is not None:
            options["data"]["path"] = flags["data"]
        own = {key: file[key] for key in OF_THE_ENVIRONMENT if key in file}
        tables, rewards = file.get("environments") or stored.get("environments", []), flags.get("reward") or ()
        built["environments"] = _environments(tables, flags.get("env"), options, rewards, own)
        again = {**options, "rewards": rewards, "name": flags.get("env")}
        keys = {name: given_keys(each, typed[name]) for name, each in SECTIONS.items()}
        problems += _not_given_again(_names(file, LEFT_OUT), keys, again, None)
        keys = {name: keys[name] | given_keys(each, given[name]) for name, each in SECTIONS.items()}
        again = None if file.get("environments") else {**own, **again, "rewards": rewards or own.get("rewards")}
        problems += _not_given_again(_names(stored, LEFT_OUT), keys, again, stored_in)
        problems += problems_of_tables(built["environments"])
    if problems:
        raise ConfigError.of(problems)
    sizes = [settings_check.group_size(each.name, each.env) or GROUP for each in built["environments"]]
    if "seq_len" not in said:
        built["trainer"] = _with_room_for_answers(built["trainer"], built["environments"])
    built["trainer"], built["options"] = _with_batch(
        built["trainer"], built["options"], max(sizes), said, keeps_prompts=keeps_prompts
    )
    unset = {"lr", "seq_len"} - said | ({"run_dir"} if built["options"].run_dir is None else set())
    if built["options"].prompts_per_step and "batch_size" not in said:
        unset |= {"batch_size"} | ({"microbatch"} if "max_tokens_per_microbatch" not in said else set())
    config = RunConfig.model_validate({**built, "unset": frozenset(unset)})
    if differs := list(_differences(kept["trainer"], config.trainer, stored_in)):
        raise ConfigError.of(differs)
    server = _one_for_each_trainer(config)
    return checked(config.model_copy(update={"trainer": config.trainer.model_copy(update={"server": server})}))


def _continued(
    given: dict[str, dict[str, Any]], typed: dict[str, dict[str, Any]], problems: list[Problem]
) -> tuple[dict[str, Any], Path | None]:
    """Return the stored tables of the run that `--resume` continues, and its folder; without one nothing.

    `--resume RUN` takes all of the run's options. `--resume auto` takes what is trained; where it is trained, the
    options of run, server and API, is said by the command. Both become `auto` in the folder of the run.
    """
    resume, run_dir = (
        next((said[table][key] for said in (typed, given) if key in said[table]), None)
        for table, key in (("trainer", "resume"), ("options", "run_dir"))
    )
    if resume in (None, "never"):
        return {}, None
    folder = at_home(Path(run_dir)) if run_dir else None
    if resume == "auto":
        folder = folder or newest_run()
        stored = {} if folder is None else _what_is_trained(read_stored(folder))
        typed["options"] |= {} if folder is None else {"run_dir": str(folder)}
        return stored, folder if stored else None
    path = at_home(Path(resume))
    if holds_run(path):
        if folder is not None and folder.resolve() != path.resolve():
            fix = "leave --run-dir out, or name the checkpoint from which a new run starts"
            problems.append(Problem("--run-dir", f"{folder} and --resume {path}", "one run", fix))
        typed["trainer"]["resume"] = "auto"
        typed["options"]["run_dir"] = str(path)
        return read_stored(path), path
    own = path.absolute().parent.parent
    branches = folder is not None and folder.resolve() != own.resolve()
    if not path.is_dir():
        wanted = "the folder of a run or of a checkpoint, auto, or never"
        problems.append(Problem("--resume", str(path), wanted, summary="no such folder"))
    elif folder is None and holds_run(own):
        typed["options"]["run_dir"] = str(own)
    stored = _what_is_trained(read_stored(own), places=not branches)
    return stored, own if stored else None


def _what_is_trained(stored: Mapping[str, Any], *, places: bool = True) -> dict[str, Any]:
    """Return the tables and options of a stored run that say what is trained, with or without `PLACES`."""
    kept = {key: value for key, value in stored.items() if key in CONTINUED}
    left_out = [name for name in _names(kept, LEFT_OUT) if name.partition(".")[0] in CONTINUED]
    if not places and isinstance(trainer := kept.get("trainer"), dict):
        kept["trainer"] = {key: value for key, value in trainer.items() if key not in PLACES}
        left_out = [name for name in left_out if name not in {f"trainer.{key}" for key in PLACES}]
    return kept | ({LEFT_OUT: left_out} if kept else {})


CONTINUED = frozenset({"trainer", "environments", "prompts_per_step", LEFT_OUT, CHOSEN})
"""Tables and options of a stored run that say what is trained."""
PLACES = frozenset({"wandb_group"})
"""Options of a trainer that say where a run keeps what it makes: a run that branches from another has its own."""
BATCH = ("batch_size", "gradient_accumulation_steps")


def _say_one_batch(layers: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Drop from each layer the size of a step that a later layer says by another name."""
    for number, said in enumerate(layers):
        later = layers[number + 1 :]
        named = {key.replace("-", "_") for each in later for key in each["trainer"]} & {*BATCH}
        keeps = not number and len(named) == 1 and "prompts_per_step" in said["options"]  # a stored run's sequences
        if keeps or any("prompts_per_step" in each["options"] for each in later):
            said["trainer"] = {
                key: value for key, value in said["trainer"].items() if key.replace("-", "_") not in BATCH
            }
        if BATCH[1] in named and not keeps:
            said["options"].pop("prompts_per_step", None)


def _still_chosen(layers: Sequence[tuple[Mapping[str, Any], dict[str, dict[str, Any]]]]) -> set[str]:
    """Return the options that an earlier start chose and may choose again: nobody gave them, neither then nor now.

    A stored learning rate stays, and a stored sequence length is the least.

    Args:
        layers: the tables of a file, and what they say by section.
    """
    found: set[str] = set()
    for tables, said in layers:
        found -= given_keys(TrainConfig, said["trainer"])
        found |= {"seq_len"} & {*_names(tables, CHOSEN)}
    return found


def _names(tables: Mapping[str, Any], key: str) -> list[str]:
    """Return the names in a note of `run.toml`."""
    names = tables.get(key)
    return [*map(str, names)] if isinstance(names, list) else []


def _is_key(name: str) -> bool:
    """Return whether what `run.toml` left out is a key, such as `trainer.vllm_api_key`."""
    return is_secret(re.split(r"[ .]", name)[-1])


def _not_given_again(
    names: Sequence[str], said: Mapping[str, set[str]], environments: Mapping[str, Any] | None, folder: Path | None
) -> Iterator[Problem]:
    """Yield the options that a stored run had and its file has not, unless they are keys or were given again.

    A key may come from an environment variable; `_tables_of` warns of it.

    Args:
        names: those that the file left out.
        said: what the command gives, by section.
        environments: the same by an environment's table; None: all of the environments.
    """
    for name in names:
        table, _, rest = name.partition(".")
        if _is_key(name) or (table == "environments" and environments is None):
            continue
        if table == "environments":
            group, _, rest = rest.partition(".")[2].partition(".")
            key = re.split(r"[ .]", rest)[0]
            given = environments or {}
            if group == "rewards":
                flag, is_given = "--reward", bool(given.get("rewards"))
            elif group == "name":
                flag, is_given = "--env", bool(given.get("name"))
            else:
                flag, is_given = f"--{group}.{key}", key in given.get(group, {})
        else:
            section = {"server": "trainer"}.get(table, table if table in SECTIONS else "options")
            prefix = f"{table}." if table in ("server", "api") else ""
            written = re.split(r"[ .]", rest or name)[0]
            (key,) = given_keys(SECTIONS[section], {f"{prefix if section == 'trainer' else ''}{written}": None})
            flag, is_given = f"--{prefix}{written.replace('_', '-')}", key in said[section]
        if not is_given:
            where = f"{folder / RUN_FILE}" if folder else "the file"
            why = f"{where} has not all of it, because it held a secret"
            yield Problem(flag, "nothing", "its value", "give it again", why)


def _with_room_for_answers(trainer: TrainConfig, environments: Sequence[EnvironmentProcess]) -> TrainConfig:
    """Return the options with room for the longest answers that environments ask for."""
    answers = [str(each.env.get("max_tokens", "")) for each in environments]
    longest = max((int(text) for text in answers if text.isdecimal()), default=0)
    seq_len = max(trainer.seq_len, longest + PROMPT_ROOM)
    if seq_len == trainer.seq_len:
        return trainer
    return trainer.model_copy(update={"seq_len": seq_len})


def _with_batch(
    trainer: TrainConfig, options: RunOptions, answers: int, said: set[str], *, keeps_prompts: bool
) -> tuple[TrainConfig, RunOptions]:
    """Return the options with the sequences of a step and of a microbatch, from prompts and answers a step.

    Args:
        answers: to a prompt.
        said: options of the trainer that were given; the older names of a step's size stay what they were.
        keeps_prompts: the prompts are those of a stored run, whose step stays as large.

    Raises:
        ConfigError: both were given, and don't go together.
    """
    prompts = options.prompts_per_step
    if prompts is None and said & {*BATCH}:
        return trainer, options
    prompts = prompts or PROMPTS
    sequences = prompts * answers
    if keeps_prompts and "gradient_accumulation_steps" in said:
        size, rest = divmod(sequences, trainer.gradient_accumulation_steps)
        if rest:
            got, wanted = trainer.gradient_accumulation_steps, f"a divisor of the run's {sequences} sequences a step"
            raise ConfigError(field="--gradient-accumulation-steps", got=got, wanted=wanted, fix="leave it out")
        return trainer.model_copy(update={"batch_size": size}), options
    if "gradient_accumulation_steps" in said:
        got = f"{prompts} and --gradient-accumulation-steps {trainer.gradient_accumulation_steps}"
        raise ConfigError("it is computed", field="--prompts-per-step", got=got, wanted="one of them")
    if "batch_size" in said and sequences % trainer.batch_size:
        got = f"{prompts} x {answers} answers in microbatches of {trainer.batch_size}"
        fix = "leave --batch-size out: microbatches are as large as memory allows"
        raise ConfigError(field="--prompts-per-step", got=got, wanted="whole microbatches", fix=fix)
    most = max(1, (trainer.max_tokens_per_microbatch or PASS_TOKENS) // trainer.seq_len)
    size = next(size for size in range(min(most, sequences), 0, -1) if sequences % size == 0)
    size = trainer.batch_size if "batch_size" in said else size
    update = {"batch_size": size, "gradient_accumulation_steps": sequences // size}
    return trainer.model_copy(update=update), options.model_copy(update={"prompts_per_step": prompts})


def _differences(stored: Mapping[str, Any], trainer: TrainConfig, folder: Path | None) -> Iterator[Problem]:
    """Yield the options that say which parameters are trained and are not those of the checkpoints to continue."""
    if folder is None or not any(folder.glob("checkpoints/*/state.json")):
        return
    now, fix = dump(trainer), "leave it out, or start a new run without --resume"
    modes = [table.get("weight_bridge_mode") for table in (stored, now)]
    if modes[0] and len({mode in ADAPTER_MODES for mode in modes}) == 2:
        wanted = f"{modes[0]}, or another mode that trains the same"
        yield Problem("--weight-bridge-mode", str(modes[1]), wanted, fix, f"not as in {folder / RUN_FILE}")
        return
    for key in ("lora_r", "lora_target_modules", "lora_layer_indices", "train_layer_indices"):
        if modes[0] and stored.get(key, now.get(key)) != now.get(key):
            flag, got = f"--{key.replace('_', '-')}", shown(now.get(key, "all"))
            yield Problem(flag, got, shown(stored[key]), fix, f"not as in {folder / RUN_FILE}")


def _tables_of(file: Mapping[str, Any], problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """What a file says, by section."""
    run_keys = [leaf.key for leaf in options_of(RunOptions)]
    tables = ("trainer", "server", "api", "environments", *OF_THE_ENVIRONMENT)
    if keys := [name for name in _names(file, LEFT_OUT) if _is_key(name)]:
        log.warning("the stored options have no keys; give them again by flags or variables: %s", ", ".join(keys))
    notes = (LEFT_OUT, CHOSEN)
    strange = [key for key in file if key not in (*tables, *notes) and key.replace("-", "_") not in run_keys]
    problems += [unknown_key(key, [*tables, *run_keys]) for key in strange]
    given = {table: file.get(table, {}) for table in ("trainer", "server", "api")}
    for table in [table for table, value in given.items() if not isinstance(value, dict)]:
        problems.append(Problem(table, repr(given.pop(table)), f"a table: [{table}]"))
    options = {key.replace("-", "_"): value for key, value in file.items() if key not in (*tables, *notes, *strange)}
    server = {f"server.{key}": value for key, value in given.pop("server", {}).items()}
    said = {table: dict(given.get(table, {})) for table in SECTIONS} | {"options": options}
    if said["trainer"].pop("server", None) is not None:
        problems.append(
            Problem("trainer.server", fix="write [server]", summary="a run's server is no part of [trainer]")
        )
    said["trainer"] = server | said["trainer"]
    for key in [key for key in said["trainer"] if key.replace("-", "_") == "prompts_per_step"]:
        options.setdefault("prompts_per_step", said["trainer"].pop(key))  # it is looked for among the trainer's
    return said


def _tables_of_flags(flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the command line says, by section."""
    run_keys = [leaf.key for leaf in options_of(RunOptions)]
    typed: dict[str, dict[str, Any]] = {table: {} for table in SECTIONS}
    for key, value in flags.items():
        table, _, name = key.rpartition(".")
        if table == "server":
            typed["trainer"][key] = value
        elif key not in ("env", "data", "reward"):
            typed[table or ("options" if key in run_keys else "trainer")][name] = value
    return typed


def _one_for_each_trainer(config: RunConfig) -> Server:
    """Return the server's options with a server for each trainer process, on its GPU, where they share weights.

    Numbers of servers or GPUs that the user has given stay.
    """
    server, processes = config.server, config.options.trainer_gpus
    if processes == 1 or not config.trainer.shares_weights or server.tensor_parallel_size > 1:
        return server
    if "replicas" not in server.model_fields_set:
        server = server.model_copy(update={"replicas": processes})
        server.model_fields_set.discard("replicas")
    if server.gpus is None and server.replicas == processes and config.options.cluster is None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        names = visible[:processes] if len(visible) >= processes else map(str, range(processes))
        server = server.model_copy(update={"gpus": ";".join(names)})
        server.model_fields_set.discard("gpus")  # another start may see other GPUs
    return server


def _environments(
    tables: Any,
    name: str | None,
    options: Mapping[str, Mapping[str, str]],
    rewards: Sequence[str],
    own: Mapping[str, Any],
) -> tuple[EnvironmentProcess, ...]:
    """Return the environments of a file and of flags.

    Args:
        options: options of the environment by table.
        rewards: those of flags, which replace the file's.
        own: the file's tables outside `[[environments]]`.
    """
    if isinstance(tables, dict):  # [environments] instead of [[environments]]: meant as one
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(field="environments", got=repr(tables), wanted="tables: [[environments]]")
    if not (name or any(options.values()) or rewards or own):
        return tuple(_environment(table) for table in tables) or (EnvironmentProcess(),)
    if len(tables) > 1:
        raise ConfigError(
            "it does not say which environment of the file is meant",
            field="--env",
            got=f"{len(tables)} environments",
            wanted="one environment in the file",
            fix="edit the file: an entry of [[environments]] has its own env, openai, data and rewards",
        )
    table = {**(tables[0] if tables else {}), **own}
    if isinstance(table.get("data"), str):
        table["data"] = {"path": table["data"]}
    groups = {group: table.get(group, {}) for group in options}
    merged = {group: {**given, **options[group]} for group, given in groups.items() if isinstance(given, dict)}
    reads_data = table.get("data") or table.get("rewards") or options["data"] or rewards
    default = settings_check.DATASET if reads_data else "arithmetic"
    typed = {**({"name": name} if name else {}), **({"rewards": rewards} if rewards else {})}
    return (_environment({"name": default, **table, **typed, **merged}),)


def _environment(table: dict[str, Any]) -> EnvironmentProcess:
    known = list(EnvironmentProcess.model_fields)
    problems = [unknown_key(key, known, "environments.") for key in table if key not in known]
    for group in ("env", "openai", "data"):
        if not isinstance(table.get(group, {}), dict):
            problems.append(Problem(f"environments.{group}", repr(table[group]), "a table of options"))
    if not isinstance(rewards := table.get("rewards", ()), list | tuple):
        problems.append(Problem("rewards", repr(rewards), "a list, or tables: [[rewards]]"))
    if problems:
        raise ConfigError.of(problems)
    return EnvironmentProcess(**table)


def _env_options(args: Sequence[str], problems: list[Problem]) -> dict[str, dict[str, str]]:
    """`--env.group_size 8 --openai.api_key=x` as `{"env": {"group_size": "8"}, "openai": {"api_key": "x"}}`."""
    found: dict[str, dict[str, str]] = {"env": {}, "openai": {}, "data": {}}
    for flag, value in flags_of(args):
        group, _, key = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or group not in found or not key:
            problems.append(_unknown_flag(flag, group, key))
        elif value is None:
            problems.append(Problem(flag, "nothing", "a value after it"))
        else:
            found[group][key.replace("-", "_")] = value
    return found


def _unknown_flag(flag: str, group: str, key: str) -> Problem:
    """Return the problem of what is no flag of a run's; the name of its table may be wrong or missing."""
    of_both = (*options_of(TrainConfig), *options_of(RunOptions))
    known = [name for each in of_both for name in (*each.flags, *each.former)]
    known += [f"--api.{name.removeprefix('--')}" for each in options_of(ApiProcess) for name in each.flags]
    tables = ["env", "openai", "data", "server", "api"]
    if key and group in tables:
        start = f"--{group}."
        return unknown_key(
            f"--{key}", [name.removeprefix(start) for name in known if name.startswith(start)], start[2:]
        )
    table = nearest(group, tables) if key else None
    if table:
        return Problem(flag, fix=f"did you mean --{table}.{key}?", summary="unknown option")
    return unknown_word(flag, [*known, "--env", "--data", "--reward", "--config"])
