"""`grpo run`: one file or a set of flags for the rollout API, the server, the environments and the trainer.

In TOML, options are keys of the file or of a table `[trainer]`; those of server and API stand in tables:

    run_dir = "runs/sums"

    [trainer]
    model_name = "runs/demo-model"
    weight_bridge_mode = "lora_only"

    [server]
    port = 0

    [[environments]]
    name = "arithmetic"
    env = { group_size = 8 }

On the command line the options of a table carry its name: `--server.port 0`, `--api.port 0`; `--env NAME` picks the
environment and `--env.KEY`, `--openai.KEY`, `--data.KEY` set its options. `--data D --reward R` is the environment
`dataset`; in TOML:

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.running import settings_check
from grpo_common.errors import Problem, collected
from grpo_common.redaction import is_secret
from grpo_common.suggest import nearest
from grpo_trainer.config.bridge import ADAPTER_MODES
from grpo_trainer.config.options import Given, Layer, at_home, dump, make, merged, options_of, read, shown
from grpo_trainer.config.processes import (
    PROMPTS,
    ApiProcess,
    EnvironmentProcess,
    RunConfig,
    RunOptions,
    RunSection,
    newest_run,
    problems_of_tables,
)
from grpo_trainer.config.rules import SET_BY_THE_RUN, checked
from grpo_trainer.config.stored import CHOSEN, LEFT_OUT, RUN_FILE, STARTED_IN, holds_run, left_behind, read_stored
from grpo_trainer.config.train import TrainConfig
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
BATCH = frozenset({"batch_size", "gradient_accumulation_steps"})
OF_THE_ENVIRONMENT = ("data", "rewards")
"""Tables of a file that may stand outside `[[environments]]` if there is only one environment."""
CONTINUED = frozenset({"trainer", "environments", "prompts_per_step", LEFT_OUT, CHOSEN, STARTED_IN})
"""Tables and options of a stored run that say what is trained."""
PLACES = frozenset({"wandb_group"})
"""Options of a trainer that say where a run keeps what it makes: a run that branches from another has its own."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raise a `ConfigError`, with line and column, if it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, IsADirectoryError):
        got = f"{path}, a folder" if path.is_dir() else f"{path}, which does not exist"
        raise ConfigError(field="--config", got=got, wanted="a TOML file", fix="correct the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", field=f"--config {path}", fix="correct the file there") from None


def build_run(file: Mapping[str, Any], flags: Mapping[str, Any], env_args: Sequence[str] = ()) -> RunConfig:
    """A run's configuration from a file's tables and flags; flags win.

    `flags` has options, and `--env`, `--data` and `--reward`. `env_args` is what the command line has beyond known
    flags: `--env.KEY VALUE` and `--openai.KEY VALUE`.

    Raises:
        ConfigError: unknown keys, wrong values, options that the run sets itself, or options that do not go together;
            the last only where all else is right.
    """
    problems: list[Problem] = []
    given = _layer(file, problems)
    own = {name: value for name, value in flags.items() if name in ("env", "data", "reward")}
    typed = read(RunSection, problems, {name: value for name, value in flags.items() if name not in own})
    stored, stored_in = _continued(given, typed, problems)
    kept = _layer(stored, problems)
    keeps_prompts = "prompts_per_step" in kept and "prompts_per_step" not in {**given, **typed}
    values = merged(RunSection, *_with_one_batch(kept, given, typed))
    for key in values.keys() & SET_BY_THE_RUN.keys():
        fix = f"use {SET_BY_THE_RUN[key]}"
        problems.append(Problem(values.pop(key).flag, fix=fix, summary="set by the run itself"))
    # An earlier start chose the sequence length, and may choose it again: nobody gave it, neither then nor now.
    chosen = {"seq_len"} & {*_names(stored if "seq_len" not in given else file, CHOSEN)} - typed.keys()
    said = values.keys() - chosen
    if "weight_bridge_mode" not in said and file:
        log.warning(
            "the file names no weight_bridge_mode: grpo run trains %s by default since 0.2 (earlier: none)",
            DEFAULTS["weight_bridge_mode"],
        )
    values |= {key: Given(value, "") for key, value in DEFAULTS.items() if key not in said}
    parts: dict[str, Any] = {}
    for name, section in (("trainer", TrainConfig), ("options", RunOptions), ("api", ApiProcess)):
        keys = {f"api.{option.key}" if name == "api" else option.key: option.key for option in options_of(section)}
        with collected(problems):
            parts[name] = make(section, {keys[key]: given for key, given in values.items() if key in keys})
    with collected(problems):
        options = _env_options(env_args, problems)
        if own.get("data") is not None:
            options["data"]["path"] = own["data"]
        tables = {key: file[key] for key in OF_THE_ENVIRONMENT if key in file}
        several, rewards = file.get("environments") or stored.get("environments", []), own.get("reward") or ()
        parts["environments"] = _environments(several, own.get("env"), options, rewards, tables)
        again = {**options, "rewards": rewards, "name": own.get("env")}
        problems += _not_given_again(_names(file, LEFT_OUT), typed, again, "the file")
        again = None if file.get("environments") else {**tables, **again, "rewards": rewards or tables.get("rewards")}
        where = str(stored_in / RUN_FILE) if stored_in else ""
        problems += _not_given_again(_names(stored, LEFT_OUT), {**given, **typed}, again, where)
        problems += problems_of_tables(parts["environments"])
        if stored_in is not None:
            old = kept.keys() - given.keys() - typed.keys()
            names = [str(kept[key].value) for key in ("model_name", "lora_adapter") if key in old]
            for each in () if file.get("environments") or tables else parts["environments"]:
                names += [] if options["data"].get("path") else [str(each.data.get("path", ""))]
                names += [] if rewards else each.reward_sources
                names += [] if own.get("env") or each.name in settings_check.BUILT_IN else [each.name]
            problems += left_behind(stored_in, Path(stored.get(STARTED_IN, Path.cwd())), names)
    if problems:
        raise ConfigError.of(problems)
    trainer, run, environments = parts["trainer"], parts["options"], parts["environments"]
    if "seq_len" not in said:
        answers = [str(each.env.get("max_tokens", "")) for each in environments]
        longest = max((int(text) for text in answers if text.isdecimal()), default=0)
        trainer = trainer.model_copy(update={"seq_len": max(trainer.seq_len, longest + PROMPT_ROOM)})
    sizes = [settings_check.group_size(each.name, each.env) or GROUP for each in environments]
    trainer, run = _with_batch(trainer, run, max(sizes), said, keeps_prompts=keeps_prompts)
    unset = {"lr", "seq_len"} - said | ({"run_dir"} if run.run_dir is None else set())
    if run.prompts_per_step and "batch_size" not in said:
        unset |= {"batch_size"} | ({"microbatch"} if "max_tokens_per_microbatch" not in said else set())
    if differs := list(_differences(kept, trainer, stored_in)):
        raise ConfigError.of(differs)
    return checked(
        RunConfig(
            options=run,
            trainer=_with_servers(trainer, run),
            api=parts["api"],
            environments=environments,
            unset=frozenset(unset),
        )
    )


def _layer(tables: Mapping[str, Any], problems: list[Problem]) -> Layer:
    """Return the options of a file; environments have no part in it."""
    if keys := [name for name in _names(tables, LEFT_OUT) if _is_key(name)]:
        log.warning("the stored options have no keys; give them again by flags or variables: %s", ", ".join(keys))
    others = ("trainer", "environments", *OF_THE_ENVIRONMENT, LEFT_OUT, CHOSEN, STARTED_IN)
    trainer = tables.get("trainer", {})
    if not isinstance(trainer, dict):
        problems.append(Problem("trainer", repr(trainer), "a table: [trainer]"))
        trainer = {}
    return read(RunSection, problems, {key: tables[key] for key in tables if key not in others}, trainer)


# ---- a run that is continued


def _continued(given: Layer, typed: Layer, problems: list[Problem]) -> tuple[dict[str, Any], Path | None]:
    """Return the stored tables of the run that `--resume` continues, and its folder; without one nothing.

    `--resume RUN` takes all of the run's options. `--resume auto` takes what is trained; where it is trained, the
    options of run, server and API, is said by the command. Both become `auto` in the folder of the run.
    """

    def set_flags(**values: str) -> None:
        typed.update({key: Given(value, f"--{key.replace('_', '-')}") for key, value in values.items()})

    both = {**given, **typed}
    resume, run_dir = (both[key].value if key in both else None for key in ("resume", "run_dir"))
    if resume in (None, "never"):
        return {}, None
    folder = at_home(Path(run_dir)) if run_dir else None
    if resume == "auto":
        folder = folder or newest_run()
        if folder is None:
            return {}, None
        set_flags(run_dir=str(folder))
        stored = _what_is_trained(read_stored(folder))
        return stored, folder if stored else None
    path = at_home(Path(resume))
    if holds_run(path):
        if folder is not None and folder.resolve() != path.resolve():
            fix = "leave --run-dir out, or name the checkpoint from which a new run starts"
            problems.append(Problem("--run-dir", f"{folder} and --resume {path}", "one run", fix))
        set_flags(resume="auto", run_dir=str(path))
        return read_stored(path), path
    own = path.absolute().parent.parent
    if not path.is_dir():
        wanted = "the folder of a run or of a checkpoint, auto, or never"
        problems.append(Problem("--resume", str(path), wanted, summary="no such folder"))
    elif folder is None and holds_run(own):
        set_flags(run_dir=str(own))
    stored = _what_is_trained(read_stored(own), places=folder is None or folder.resolve() == own.resolve())
    return stored, own if stored else None


def _what_is_trained(stored: Mapping[str, Any], *, places: bool = True) -> dict[str, Any]:
    """Return the tables and options of a stored run that say what is trained, with or without `PLACES`."""
    kept = {key: value for key, value in stored.items() if key in CONTINUED}
    left_out = [name for name in _names(kept, LEFT_OUT) if name.partition(".")[0] in CONTINUED]
    if not places and isinstance(trainer := kept.get("trainer"), dict):
        kept["trainer"] = {key: value for key, value in trainer.items() if key not in PLACES}
        left_out = [name for name in left_out if name.removeprefix("trainer.") not in PLACES]
    return kept | ({LEFT_OUT: left_out} if kept else {})


def _names(tables: Mapping[str, Any], note: str) -> list[str]:
    """Return the names in a note of `run.toml`."""
    names = tables.get(note)
    return [*map(str, names)] if isinstance(names, list) else []


def _is_key(name: str) -> bool:
    """Return whether what `run.toml` left out is a key, such as `trainer.vllm_api_key`."""
    return is_secret(re.split(r"[ .]", name)[-1])


def _not_given_again(
    names: Sequence[str], said: Layer, environments: Mapping[str, Any] | None, where: str
) -> Iterator[Problem]:
    """Yield the options that a stored run's file left out, except keys and what was given again.

    A key may come from an environment variable; `_layer` warns of it. `environments` has what is given, by an
    environment's table; None: all of the environments.
    """
    for name in names:
        table, *rest = re.split(r"[ .]", name.removeprefix("trainer."))
        if _is_key(name) or (table == "environments" and environments is None):
            continue
        if table == "environments" and environments is not None:
            group, key = rest[1], rest[2] if len(rest) > 2 else ""
            flag = {"rewards": "--reward", "name": "--env"}.get(group, f"--{group}.{key}")
            given = environments.get(group)
            is_given = key in given if isinstance(given, Mapping) else bool(given)
        else:
            key = f"{table}.{rest[0]}" if table in ("server", "api") else table
            flag, is_given = f"--{key.replace('_', '-')}", key in said
        if not is_given:
            why = f"{where} has not all of it, because it held a secret"
            yield Problem(flag, "nothing", "its value", "give it again", why)


def _differences(stored: Layer, trainer: TrainConfig, folder: Path | None) -> Iterator[Problem]:
    """Yield the options that say which parameters are trained and are not those of the checkpoints to continue."""
    if folder is None or not any(folder.glob("checkpoints/*/state.json")) or "weight_bridge_mode" not in stored:
        return
    now, fix, why = dump(trainer), "leave it out, or start a new run without --resume", f"not as in {folder / RUN_FILE}"
    mode = stored["weight_bridge_mode"].value
    if (mode in ADAPTER_MODES) != trainer.trains_adapter:
        wanted = f"{mode}, or another mode that trains the same"
        yield Problem("--weight-bridge-mode", trainer.weight_bridge_mode, wanted, fix, why)
        return
    for key in ("lora_r", "lora_target_modules", "lora_layer_indices", "train_layer_indices"):
        if key in stored and stored[key].value != now.get(key):
            flag = f"--{key.replace('_', '-')}"
            yield Problem(flag, shown(now.get(key, "all")), shown(stored[key].value), fix, why)


# ---- the size of a step, and servers


def _with_one_batch(*layers: Layer) -> Iterator[Layer]:
    """Yield each layer without the size of a step that a later layer says by another name."""
    for number, layer in enumerate(layers):
        later = {key for each in layers[number + 1 :] for key in each}
        named = later & BATCH
        keeps = not number and len(named) == 1 and "prompts_per_step" in layer  # a stored run's sequences
        gone = {*BATCH} if keeps or "prompts_per_step" in later else set[str]()
        if "gradient_accumulation_steps" in named and not keeps:
            gone.add("prompts_per_step")
        yield {key: given for key, given in layer.items() if key not in gone}


def _with_batch(
    trainer: TrainConfig, options: RunOptions, answers: int, said: Collection[str], *, keeps_prompts: bool
) -> tuple[TrainConfig, RunOptions]:
    """Return the options with the sequences of a step and of a microbatch, from prompts and the answers to each.

    Of the options that were `said`, the older names of a step's size stay what they were. With `keeps_prompts`, the
    prompts are those of a stored run, whose step stays as large.

    Raises:
        ConfigError: both were given, and don't go together.
    """
    prompts, steps = options.prompts_per_step, trainer.gradient_accumulation_steps
    if prompts is None and BATCH & {*said}:
        return trainer, options
    prompts = prompts or PROMPTS
    sequences = prompts * answers
    if keeps_prompts and "gradient_accumulation_steps" in said:
        size, rest = divmod(sequences, steps)
        if rest:
            wanted = f"a divisor of the run's {sequences} sequences a step"
            raise ConfigError(field="--gradient-accumulation-steps", got=steps, wanted=wanted, fix="leave it out")
        return trainer.model_copy(update={"batch_size": size}), options
    if "gradient_accumulation_steps" in said:
        got = f"{prompts} and --gradient-accumulation-steps {steps}"
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


def _with_servers(trainer: TrainConfig, options: RunOptions) -> TrainConfig:
    """Return the options with a server for each trainer process, on its GPU, where they share weights.

    Numbers of servers or GPUs that the user has given stay.
    """
    server, processes, update = trainer.server, options.trainer_gpus, dict[str, Any]()
    if processes == 1 or not trainer.shares_weights or server.tensor_parallel_size > 1:
        return trainer
    if "replicas" not in server.model_fields_set:
        update["replicas"] = processes
    if server.gpus is None and update.get("replicas", server.replicas) == processes and options.cluster is None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        names = visible[:processes] if len(visible) >= processes else map(str, range(processes))
        update["gpus"] = ";".join(names)
    server = server.model_copy(update=update)
    server.model_fields_set.difference_update(update)  # another start may see other GPUs
    return trainer.model_copy(update={"server": server})


# ---- environments


def _environments(
    tables: Any,
    name: str | None,
    options: Mapping[str, Mapping[str, str]],
    rewards: Sequence[str],
    own: Mapping[str, Any],
) -> tuple[EnvironmentProcess, ...]:
    """Return the environments of a file and of flags: `name`, `options` by table, and `rewards` instead of the file's.

    `own` has the file's tables outside `[[environments]]`.
    """
    if isinstance(tables, dict):  # [environments] instead of [[environments]]: meant as one
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(field="environments", got=repr(tables), wanted="tables: [[environments]]")
    if not (name or any(options.values()) or rewards or own):
        return tuple(_environment(table) for table in tables) or (EnvironmentProcess(),)
    if len(tables) > 1:
        got, why = f"{len(tables)} environments", "it does not say which environment of the file is meant"
        fix = "edit the file: an entry of [[environments]] has its own env, openai, data and rewards"
        raise ConfigError(why, field="--env", got=got, wanted="one environment in the file", fix=fix)
    table = {**(tables[0] if tables else {}), **own}
    if isinstance(table.get("data"), str):
        table["data"] = {"path": table["data"]}
    groups = {group: table.get(group, {}) for group in options}
    groups = {group: {**given, **options[group]} for group, given in groups.items() if isinstance(given, dict)}
    reads_data = table.get("data") or table.get("rewards") or options["data"] or rewards
    default = settings_check.DATASET if reads_data else "arithmetic"
    default = settings_check.AGENT if "agent" in options["env"] else default
    typed = {**({"name": name} if name else {}), **({"rewards": rewards} if rewards else {})}
    return (_environment({"name": default, **table, **typed, **groups}),)


def _environment(table: dict[str, Any]) -> EnvironmentProcess:
    known = [f"environments.{key}" for key in EnvironmentProcess.model_fields]
    problems = [unknown_key(name, known) for key in table if (name := f"environments.{key}") not in known]
    for group in ("env", "openai", "data"):
        if not isinstance(table.get(group, {}), dict):
            problems.append(Problem(f"environments.{group}", repr(table[group]), "a table of options"))
    if not isinstance(name := table.get("name", ""), str):
        problems.append(Problem("environments.name", repr(name), "a text"))
    if not isinstance(rewards := table.get("rewards", ()), list | tuple):
        problems.append(Problem("rewards", repr(rewards), "a list, or tables: [[rewards]]"))
    if problems:
        raise ConfigError.of(problems)
    return EnvironmentProcess(**table)


def _env_options(args: Sequence[str], problems: list[Problem]) -> dict[str, dict[str, str]]:
    """`--env.group_size 8 --openai.api_key=x` as `{"env": {"group_size": "8"}, "openai": {"api_key": "x"}}`."""
    found: dict[str, dict[str, str]] = {"env": {}, "openai": {}, "data": {}}
    known = [flag for each in options_of(RunSection) for flag in (*each.flags, *each.former)]
    for flag, value in flags_of(args):
        group, _, key = flag.removeprefix("--").partition(".")
        group, key = ("env", "agent") if flag == "--agent" else (group, key)
        if flag.startswith("--") and group in found and key:
            if value is None:
                problems.append(Problem(flag, "nothing", "a value after it"))
            else:
                found[group][key.replace("-", "_")] = value
        elif key and group not in (tables := [*found, "server", "api"]) and (near := nearest(group, tables)):
            problems.append(Problem(flag, fix=f"did you mean --{near}.{key}?", summary="unknown option"))
        else:
            problems.append(unknown_word(flag, [*known, "--env", "--agent", "--data", "--reward", "--config"]))
    return found
