"""The settings of an environment, from the command line and from a TOML file.

Flags are the paths of the settings: ``--env.group_size 8`` is `Settings.env.group_size`, and ``group_size = 8`` in the
table ``[env]`` of a file given with ``--config``. Flags override the file, and the file overrides the defaults.
"""

import json
import re
import sys
import textwrap
import tomllib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from environments.data_config import DataConfig, RewardConfig, Rewards
from grpo_common.errors import Problem, UserError, wanted_by_pydantic
from grpo_common.sampling import CUTS, WHOLE_VOCABULARY
from grpo_common.suggest import did_you_mean


class ConfigError(UserError, ValueError):
    """The command line or the configuration file is wrong."""

    exit_code = 2


class PromptTooLong(ConfigError):
    """A prompt leaves no room for an answer within `max_token_length`."""


class PromptRefused(ConfigError):
    """The model's chat template does not render a prompt."""


class UnusableRow(UserError, ValueError):
    """A row of the data set can't be read, or has no prompt."""


def _http_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("wanted a URL such as http://127.0.0.1:8000")
    return url.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url)]
HttpUrls = Annotated[str, AfterValidator(lambda urls: ",".join(_http_url(url.strip()) for url in urls.split(",")))]


def _from_json(value: Any) -> Any:
    """Decode JSON text, the form of the command line; a file has a table."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'wanted a JSON object such as {{"key": true}}; correct it: {error}') from None


JsonTable = Annotated[dict[str, Any], BeforeValidator(_from_json)]
"""A table in a file, a JSON object on the command line."""


def _no(value: Any) -> bool:
    if value not in (False, "False", "false", "0"):
        raise ValueError("wanted False; omit it")
    return False


No = Annotated[bool, BeforeValidator(_no)]
"""An option of older scripts without effect, which can only be off."""


class BaseEnvConfig(BaseModel):
    """Settings that every environment has (``--env.…``); subclasses add their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokenizer_name: str = Field(
        description="model whose tokenizer is used, a folder or hub name; unset: --openai.model_name"
    )
    group_size: int = Field(default=8, ge=1, description="completions per item; advantages compare their scores")
    max_token_length: int = Field(default=2048, ge=2, description="longest sequence, prompt and completion, in tokens")
    temperature: float = Field(default=1.0, gt=0.0, description="sampling temperature of training groups")
    max_tokens: int | None = Field(
        default=None, ge=1, description="longest answer in tokens; unset: what max_token_length leaves"
    )
    stop_at_turn_end: bool = Field(
        default=True,
        description="stop an answer at the token that ends a turn in the chat template, also if the model does not "
        "name it as a stop token (many base models do not)",
    )
    mask_truncated: bool = Field(
        default=False,
        description="leave answers that reached their limit out of the loss; their rewards still count in the baseline",
    )
    system_prompt: str | None = Field(
        default=None,
        description="system message before every prompt, instead of the environment's; empty: none; unset: the "
        "environment's",
    )
    chat_template_kwargs: JsonTable = Field(
        default_factory=dict,
        description='variables of the chat template, a table or JSON: {"enable_thinking": false}',
    )
    rollout_server_url: HttpUrl = Field(default="http://127.0.0.1:8000", description="URL of the rollout API")
    rollout_api_key: str | None = Field(default=None, description="key of the rollout API, if it requires one")
    total_steps: int = Field(default=-1, ge=-1, description="stop at this step of the trainer; -1: at its last step")
    max_concurrent_groups: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(lambda groups: None if groups in (-1, "-1") else groups),  # Atropos' default, for no limit
    ] = Field(
        default=None,
        validation_alias=AliasChoices("max_concurrent_groups", "max_num_workers"),
        description="limit of groups generated at the same time; unset: in a run its batches are the limit",
    )
    max_batches_offpolicy: int | None = Field(
        default=None,
        ge=1,
        description="limit of batches, queued or being generated, ahead of the trainer; unset: enough to keep the "
        "server busy",
    )
    max_threads: int = Field(
        default=16, ge=1, description="limit of threads for `score` and tools that are not coroutines"
    )
    score_timeout: float = Field(
        default=120.0, gt=0.0, description="seconds for scoring a group; a group that takes longer is dropped"
    )
    group_timeout: float = Field(
        default=1800.0, gt=0.0, description="seconds for a group, with its generation; one that takes longer is dropped"
    )
    inference_weight: float = Field(
        default=1.0, ge=0.0, description="share of the generation, relative to other environments"
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0.0, le=1.0, description="share of each batch reserved for this environment"
    )
    ensure_scores_are_not_same: bool = Field(
        default=False, description="skip (and count) groups whose scores are all equal, since their advantages are zero"
    )
    include_messages: bool = Field(default=True, description="send the messages as text, too")
    data_path_to_save_groups: Path | None = Field(default=None, description="JSONL file for the groups")
    metrics_path: Path | None = Field(default=None, description="JSONL file for metrics, one line a step")
    state_dir: Path | None = Field(
        default=None, description="folder for the environment's saved state; unset: in the trainer's checkpoint folder"
    )
    data_record: Path | None = Field(
        default=None, description="JSON file with fingerprints of the data, with which a resumed run compares them"
    )
    steps_per_eval: int = Field(default=0, ge=0, description="steps between evaluations while serving; 0: none")
    retry_timeout: float = Field(
        default=300.0, gt=0.0, description="seconds to retry when the rollout API or the server does not answer"
    )
    seed: int = Field(default=0, ge=0, description="seed of the item order")
    batch_size: int | None = Field(default=None, description="accepted for old scripts; the trainer sets it")
    teacher_url: HttpUrl | None = Field(
        default=None, description="URL of a teacher's server to distil from; unset: none"
    )
    teacher_model_name: str | None = Field(default=None, description="the teacher's model name; unset: the served one")
    teacher_api_key: str | None = Field(default=None, description="key of the teacher's server, if it requires one")
    teacher_top_k: int = Field(default=8, ge=1, le=20, description="the teacher's likeliest tokens per position")
    use_wandb: bool = Field(default=False, description="accepted for old scripts; the trainer logs to W&B")
    wandb_name: str | None = Field(default=None, description="name for registration")


class ServerConfig(BaseModel):
    """The inference server (``--openai.…``; the names are those of environments written for Atropos)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: HttpUrls = Field(
        default="http://127.0.0.1:9001/v1",
        description="URL of the inference server; several servers with the same policy: URLs separated by commas",
    )
    roster: Path | None = Field(
        default=None,
        description="folder with the list of a run's servers, which grpo run writes; replaces base_url",
    )
    model_name: str | None = Field(default=None, description="model or adapter to sample; unset: the newest policy")
    api_key: str | None = Field(default=None, description="key of the server, if it requires one")
    server_type: Literal["auto", "vllm", "openai"] = Field(
        default="auto", description="kind of server; auto: detected from its answers"
    )
    timeout: float = Field(default=1200.0, gt=0.0, description="time limit of one request, in seconds")
    num_max_requests_at_once: int = Field(default=512, ge=1, description="limit of in-flight requests at a server")


EnvConfig = TypeVar("EnvConfig", bound=BaseEnvConfig)

SHORT: Final = {"data.path": "data", "env.agent": "agent"}
"""Settings that have a second, short flag."""
REWARDS: Final = "rewards"
"""The setting whose flag may be repeated, without commas: a regular expression may have some."""
FLAG: Final = re.compile(r"--[A-Za-z][^\s=]*(?:=|\Z)|-h\Z")
"""An argument that is a flag. Every other one after a flag is its value, also if it begins with a dash."""


class Settings(BaseModel, Generic[EnvConfig]):
    """All settings of one command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: EnvConfig
    openai: ServerConfig = ServerConfig()
    data: DataConfig = DataConfig()
    rewards: Rewards = Field(
        default=(),
        validation_alias=AliasChoices("rewards", "reward"),
        description="FILE.py:FUNCTION, MODULE:FUNCTION, exact_match, math or regex:PATTERN; FUNCTION=0.1 has a weight; "
        "may be repeated",
    )
    slurm: No = Field(default=False, description="accepted for old scripts")
    groups: int = Field(default=10, ge=1, description="groups that process writes")
    config: Path | None = Field(
        default=None, description="TOML file with the same settings, in [env], [openai], [data], [[rewards]]"
    )

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_model(cls, values: Any) -> Any:
        """Use the sampled model's tokenizer, unless another is named."""
        env, openai = values.get("env"), values.get("openai")
        if isinstance(env, dict) and isinstance(openai, dict) and openai.get("model_name"):
            return values | {"env": {"tokenizer_name": openai["model_name"]} | env}
        return values


def parse_settings(settings_cls: type[Settings[Any]], prog: str, arguments: Sequence[str]) -> Settings[Any]:
    """Return the settings from command-line arguments and the file that they may name; ``--help`` exits.

    Raise a ConfigError if a key is unknown (the nearest is suggested), a value not legal, or the file no TOML.
    """
    fields = {paths[0]: (paths, field) for paths, field in _fields(settings_cls)}
    flags = {f"--{each}": paths[0] for paths, _ in fields.values() for each in paths}
    flags |= {f"--{short}": path for path, short in SHORT.items() if path in fields}
    names = sorted(flag.removeprefix("--") for flag in flags)
    given, problems = defaultdict[str, list[str]](list), list[Problem]()
    waiting = deque(arguments)
    while waiting:
        flag, equals, text = waiting.popleft().partition("=")
        if flag in ("-h", "--help"):
            print(_help(prog, fields.values(), flags))
            sys.exit(0)
        if not equals and waiting and not FLAG.match(waiting[0]):
            equals, text = "=", waiting.popleft()
        if flag not in flags:
            name = flag.removeprefix("--")
            problems.append(Problem(flag, summary="no such option", fix=_nearest(name, names, "--")))
        elif not equals:
            problems.append(Problem(flag, summary="has no value"))
        else:
            given[flags[flag]].append(text)
    if problems:
        raise ConfigError.of(problems)
    values: dict[str, Any] = {"env": {}} | _file_values(given["config"][-1] if "config" in given else None)
    tables = [name for name in settings_cls.model_fields if name != "config"]
    for name in values:
        if name not in tables:
            raise ConfigError("no such table", field=name, fix=_nearest(name, tables, ""))
    if isinstance(values.get("data"), str):
        values["data"] = {"path": values["data"]}
    for path, texts in given.items():
        *folders, name = path.split(".")
        table = values
        for folder in folders:
            table = table.setdefault(folder, {})
            if not isinstance(table, dict):
                raise ConfigError(field=folder, got=repr(table), wanted="a table")
        paths, field = fields[path]
        for older in paths[1:]:
            table.pop(older.rpartition(".")[2], None)  # of the file
        table[name] = texts if path == REWARDS else _value(texts, field)
    try:
        return settings_cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError.of([_explain(wrong, names) for wrong in error.errors()]) from None


def _help(prog: str, fields: Iterable[tuple[list[str], FieldInfo]], flags: Mapping[str, str]) -> str:
    """Return the text of `--help`: each option with its kind, its description and its default."""
    lines = [f"usage: {prog} [--TABLE.NAME VALUE …]", ""]
    for paths, field in fields:
        default = "required" if field.is_required() else f"default: {field.get_default(call_default_factory=True)}"
        lines.append(f"  {', '.join(flag for flag, path in flags.items() if path == paths[0])} {_kind(field)}")
        lines += textwrap.wrap(
            f"{field.description or ''} ({default})", 100, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "\n".join(lines)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[list[str], FieldInfo]]:
    """Yield each setting with its path, such as ``env.group_size``, and the paths of its older names."""
    for name, field in model.model_fields.items():
        nested = next((kind for kind in _kinds(field) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if nested is not None:
            yield from _fields(nested, f"{prefix}{name}.")
        else:
            alias = field.validation_alias
            choices = alias.choices if isinstance(alias, AliasChoices) else [name]
            yield [f"{prefix}{choice}" for choice in choices], field


def _kinds(field: FieldInfo) -> list[Any]:
    """Return the types that a field accepts."""
    annotation = field.annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [get_args(part)[0] if get_origin(part) is Annotated else part for part in parts or (annotation,)]


def _kind(field: FieldInfo) -> str:
    """Return what `--help` shows for a value."""
    kind = next(kind for kind in _kinds(field) if kind is not NoneType)
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    return str(getattr(get_origin(kind) or kind, "__name__", "VALUE")).upper()


def _value(texts: Sequence[str], field: FieldInfo) -> Any:
    """Return a value of the command line for pydantic, which converts text to numbers.

    It is the last text, and `None` is one. A list has the items of all texts, each JSON or separated by commas; a table
    is JSON.
    """
    text, kinds = texts[-1], [kind for kind in _kinds(field) if kind is not NoneType]
    if text == "None" and len(kinds) < len(_kinds(field)):
        return None
    if any(_is_a(kind, Mapping) for kind in kinds):
        found = _decoded(text)
        return found if isinstance(found, dict) else text
    if not any(_is_a(kind, Sequence, AbstractSet) for kind in kinds):
        return text
    found = [_decoded(each) for each in texts]
    lists = [each if isinstance(each, list) else text.split(",") for each, text in zip(found, texts, strict=True)]
    items = [item for each in lists for item in each]
    return text if items == [text] and len(kinds) > 1 else items


def _is_a(kind: Any, *bases: type) -> bool:
    """Return whether a type is a kind of collection; text is none."""
    kind = get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, bases) and not issubclass(kind, str | bytes)


def _decoded(text: str) -> Any:
    """Return what JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _file_values(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        got, fix = error.strerror, "name a TOML file"
        raise ConfigError("cannot be read", field=f"--config {path}", got=got, fix=fix) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", field=f"--config {path}", fix="correct the file there") from None


def check_table(table: str, model: type[BaseModel], values: Mapping[str, object]) -> None:
    """Raise a ConfigError for an unknown key of a table, naming the nearest, or for a value that is not legal.

    Without a name of the table, `model` has tables. Missing keys are allowed, because other sources may add them.
    """
    try:
        model.model_validate(values)
    except ValidationError as error:
        outer = (table,) if table else ()
        names = sorted(path for paths, _ in _fields(model, "".join(f"{each}." for each in outer)) for path in paths)
        found = [wrong | {"loc": (*outer, *wrong["loc"])} for wrong in error.errors() if wrong["type"] != "missing"]
        if found:
            raise ConfigError.of([_explain(wrong, names) for wrong in found]) from None


def refuse_data(name: str, has_data: bool, has_rewards: bool) -> None:
    """Refuse `[data]` and `[[rewards]]` for an environment that does not read them."""
    if has_data or has_rewards:
        raise ConfigError(
            f"the environment {name} has prompts and a reward already",
            field="--data" if has_data else "--reward",
            got=f"--env {name}",
            wanted="--env dataset, or an environment of your own with takes_data = True",
            fix="omit --env, or omit --data and --reward",
        )


def require_data(has_data: bool, has_rewards: bool) -> None:
    """Require `[data]` and `[[rewards]]`."""
    if not has_data:
        raise ConfigError("no data set", field="--data", fix="add --data FILE, or the name of a data set on the hub")
    if not has_rewards:
        raise ConfigError(
            "no reward scores the answers",
            field="--reward",
            fix="add --reward FILE.py:FUNCTION, or a built-in: exact_match, math, regex:PATTERN",
        )


def _nearest(name: str, names: Sequence[str], flag: str) -> str:
    if name.rpartition(".")[2].replace("-", "_") in CUTS:
        return WHOLE_VOCABULARY
    return did_you_mean(name, names, "--help lists them", prefix=flag)


def _explain(wrong: Any, names: Sequence[str]) -> Problem:
    """Return a pydantic error as a problem. Validators raise a `UserError`, or an error of the form `wanted …; FIX`."""
    path = ".".join(map(str, wrong["loc"]))
    if isinstance(raised := wrong.get("ctx", {}).get("error"), UserError):
        return replace(raised.problems[0], field=raised.field or f"--{path}")
    if wrong["type"] == "extra_forbidden":
        *entry, key = wrong["loc"]
        if entry and isinstance(entry[-1], int):  # of [[rewards]], the only list of tables
            known = RewardConfig.model_fields
            fix = did_you_mean(key, known, f"known: {', '.join(known)}")
            return Problem(path, summary="no such setting", fix=fix)
        return Problem(path, summary="no such setting", fix=_nearest(path, names, ""))
    if wrong["type"] == "missing":
        return Problem(f"--{path}", summary="required, but not given")
    got, message = f"{wrong['input']!r:.200}", wrong["msg"].removeprefix("Value error, ")
    for begin in ("Input should be ", "wanted "):
        if message.startswith(begin):
            wanted, _, fix = wanted_by_pydantic(message.removeprefix(begin)).partition("; ")
            return Problem(f"--{path}", got, wanted, fix)
    return Problem(f"--{path}", got, summary=message)
