"""No secret is shown, in whatever form it stands among options, command lines and messages; figures are."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st

from environments.config import BaseEnvConfig, ServerConfig
from grpo_common.errors import Problem, UserError
from grpo_common.redaction import is_secret, redact, redacted, redacted_arguments, redacted_text
from grpo_common.text import Lines, PrintableFormatter, printable
from grpo_trainer.config.options import options_of
from grpo_trainer.config.processes import ApiProcess, RunOptions
from grpo_trainer.config.run import build_run
from grpo_trainer.config.stored import run_file
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.dry_run import Ahead, as_json, rows_of
from grpo_trainer.launch.plan import ProcessSpec, plan_run
from grpo_trainer.launch.process import Process
from grpo_trainer.logs.sinks import public
from tests.unit.test_report import html_of, row, write_run

SECRETS = (
    *("vllm_api_key", "--hf-token", "HF_TOKEN", "clientSecret", "apiKey", "APIKey", "x-api-key", "token", "authtoken"),
    *("aws_secret_access_key", "password", "db_pass", "wandb_token", "hf_tokens", "--openai.api_key", "Authorization"),
    *("private_key", "HF_TOKEN_READ", "credentials", "basic_auth", "session-cookie", "OPENAI_KEY", "passwd", "pwd"),
)
FIGURES = (
    *("max_tokens", "stop_token_ids", "tokenizer_name", "eos_token", "sort_key", "--max-num-batched-tokens", "key"),
    *("token_budget", "max_token_length", "long_prefill_token_threshold", "pad_token_id", "tokens_per_second"),
    *("forward_pass", "max_tokens_per_microbatch", "skip_special_tokens", "ssl_keyfile", "answer_key", "tokens"),
)


@pytest.mark.parametrize(("name", "expected"), [*((s, True) for s in SECRETS), *((f, False) for f in FIGURES)])
def test_is_secret(name: str, expected: bool) -> None:
    assert is_secret(name) == expected


def test_is_secret_own_options() -> None:
    options = {leaf.key for section in (RunOptions, TrainConfig, ApiProcess) for leaf in options_of(section)}
    options |= {*BaseEnvConfig.model_fields, *ServerConfig.model_fields}
    secrets = {"server.api_key", "rollout_api_key", "teacher_api_key", "api_key"}
    assert {name for name in options if is_secret(name)} == secrets


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--hf-token", "abc", "--seed", "7"), ("--hf-token", "…", "--seed", "7")),
        (("--hf-token", "123"), ("--hf-token", "…")),
        (("--api_key=abc",), ("--api_key=…",)),
        (("--max-num-batched-tokens", "512"), ("--max-num-batched-tokens", "512")),
        (("--extra-args=--max-num-batched-tokens=8192",), ("--extra-args=--max-num-batched-tokens=8192",)),
        (("--tokenizer", "abc", "--hf-token", "--seed"), ("--tokenizer", "abc", "--hf-token", "--seed")),
        (("--api-key", "a", "b", "--port", "1"), ("--api-key", "…", "…", "--port", "1")),  # vLLM takes several
        (("--extra-args=--hf-token", "abc"), ("--extra-args=--hf-token", "…")),
        (("--extra-args", "--hf-token abc --seed 7"), ("--extra-args", "--hf-token … --seed 7")),
        (("--openai.base_url", "http://u:abc@h/v1"), ("--openai.base_url", "http://…@h/v1")),
        (("--env.kwargs", '{"api_key": "abc", "n": 1}'), ("--env.kwargs", '{"api_key": "…", "n": 1}')),
        (('--env.kwargs={"a": {"password": {"b": ["abc"]}}}',), ('--env.kwargs={"a": {"password": "…"}}',)),
        (("-H", "Authorization: Bearer abc def"), ("-H", "Authorization: …")),
        (("HF_TOKEN=abc", "grpo", "run"), ("HF_TOKEN=…", "grpo", "run")),
    ],
)
def test_redacted_arguments(words: tuple[str, ...], shown: tuple[str, ...]) -> None:
    assert redacted_arguments(words) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:a/b@h:80/v1", "http://…@h:80/v1"),
        ("http://hf_abc@h/v1", "http://…@h/v1"),
        ("http://h:8000/@scope/p?model=m", "http://h:8000/@scope/p?model=m"),
        ("GET http://h/v1?key=abc&model=m", "GET http://h/v1?key=…&model=m"),
        ("{'api_key': 'a b', 'n': 2}", "{'api_key': '…', 'n': 2}"),
        (r"log: {\"api_key\": \"abc\", \"n\": 2}", r"log: {\"api_key\": \"…\", \"n\": 2}"),
        ("['--hf-token', 'abc', '--port', '1']", "['--hf-token', '…', '--port', '1']"),
        ("note: api_key=abc", "note: api_key=…"),
        ("refused Bearer abcdef123", "refused Bearer …"),
        ("a hf_ABCDEFGHIJKLMNOPQRST here", "a … here"),
        ("eos_token: 2, max_tokens: 512, tokens: 3", "eos_token: 2, max_tokens: 512, tokens: 3"),
        ("got token: 151999, wanted below 151,936", "got token: 151999, wanted below 151,936"),
        ("token: 15199912345678", "token: …"),
        ("a bearer token is wanted", "a bearer token is wanted"),
        ('{"api_key": "abc", "api_key": ""}', '{"api_key": "…", "api_key": ""}'),
    ],
)
def test_redacted_text(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


def test_redact_leaves_out_what_a_file_for_the_next_start_may_not_have() -> None:
    given = {
        "lr": 1e-4,
        "vllm_api_key": "hunter2",
        "extra_args": ["--hf-token", "hunter3", "--api-key=hunter4", "--seed", "7"],
        "url": "http://user:hunter5@h/v1",
        "kwargs": '{"api_key": "hunter6", "n": 1}',
        "logs": "http://h/v1?token=hunter7",
    }
    found = redact(given, drop=True)
    kept = {
        "lr": 1e-4,
        "extra_args": ["--seed", "7"],
        "url": "http://h/v1",
        "kwargs": '{"n": 1}',
        "logs": "http://h/v1",
    }
    assert found.value == kept
    assert found.names == [*("vllm_api_key", "extra_args --hf-token", "extra_args.2", "url", "kwargs.api_key", "logs")]
    assert {"hunter2", "hunter3", "hunter6"} <= found.secrets


def test_redact_known_secrets_and_problems() -> None:
    assert redact({"prompt": "say hunter2!", "n": 1}, known=["hunter2"]).value == {"prompt": "say …!", "n": 1}
    assert redact({"lr": 1}, known=["1"]).value == {"lr": 1}  # too short to be looked for

    assert Problem("--vllm-api-key", "'hunter2'", "a string").got == "…"
    error = UserError("refused by http://u:hunter2@h", field="--url", got="{'token': 'hunter2'}", wanted="a list")
    assert "hunter2" not in str(error) and "{'token': '…'}" in str(error)


def test_trackers_and_logs_of_processes_get_no_secret(tmp_path: Path) -> None:
    config = TrainConfig(model_name="m", rollout_api_key="hunter2", atropos_url="http://u:hunter3@h:1")
    assert "hunter" not in json.dumps(public(config))
    log = tmp_path / "server.log"
    child = Process(ProcessSpec("server", ("true", "--hf-token", "hunter2", "--seed", "7")), log)
    child.popen.wait(timeout=60)
    child.close()
    assert log.read_text().splitlines()[0] == "$ true --hf-token '…' --seed 7"


# properties ---------------------------------------------------------------------------------------------------

SECRET = "Pl4nted-x7Qz"
PLAIN = st.one_of(st.integers(-5, 5), st.booleans(), st.sampled_from(["m", "a b", "", "http://h:1/v1"]))
CARRIERS: Mapping[str, Any] = {
    "name": {"api_key": SECRET},
    "nested": {"password": {"of": [{"me": SECRET}]}},
    "flag": ["--seed", "7", "--hf-token", SECRET],
    "assigned": [f"--api-key={SECRET}"],
    "inside a flag": ["--extra-args=--hf-token", SECRET],
    "url": f"https://user:{SECRET}@host/v1",
    "user": f"https://{SECRET}@host/v1",
    "query": f"https://host/v1?a=b&api_key={SECRET}",
    "header": {"headers": {"Authorization": f"Bearer {SECRET}"}},
    "header line": f"Authorization: Bearer {SECRET}",
    "json": json.dumps({"a": [{"token": SECRET}]}),
    "json in json": json.dumps({"a": json.dumps({"token": SECRET})}),
    "pair": [["HF_TOKEN", SECRET]],
    "two header lines": [f"Authorization: Bearer {SECRET}", f"Cookie: a={SECRET}"],
    "key": {f"Authorization: Bearer {SECRET}": 1},
    "variable": {"env": [{"name": "HF_TOKEN", "value": SECRET}]},
}


def tables(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "lr", "max_tokens", "stop_token_ids", "judge", "headers", "0"])
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=12
    )


@example({"x": [json.dumps("--hf-token " + SECRET), 0], "y": ['{"a": [{"token": "' + SECRET + '"}]}', 0]})
@given(st.dictionaries(st.sampled_from(["x", "y", "env"]), tables(PLAIN | st.sampled_from([*CARRIERS.values()]))))
def test_planted_secrets_at_any_depth_are_hidden(value: dict[str, Any]) -> None:
    """And the rest is as it was, so the result is TOML again, and hiding twice changes nothing."""
    clean = redacted(value)
    assert SECRET not in tomli_w.dumps(clean)
    assert redacted(clean) == clean
    assert SECRET not in redacted_text(json.dumps(value))
    for drop in (False, True):
        found = redact(value, drop=drop)
        assert SECRET not in tomli_w.dumps(found.value) and SECRET not in " ".join(found.names)


@given(st.dictionaries(st.sampled_from(["x", "env"]), tables(PLAIN | st.sampled_from([*CARRIERS.values()]))))
def test_planted_secrets_are_on_no_page_and_in_no_dry_run_tracker_or_stored_run(value: dict[str, Any]) -> None:
    words = [f"--{name}={json.dumps(each)}" for name, each in value.items()]
    config = build_run(
        {"environments": [{"name": "verifiers", "env": {"env_id": "m", "env_args": value}}]},
        {
            "model_name": "m",
            "weight_bridge_mode": "lora_only",
            "vllm_api_key": SECRET,
            "server.extra_args": [*words, "--hf-token", SECRET],
        },
    )
    with TemporaryDirectory() as place:
        folder = write_run(Path(place) / "run", [row(1)])
        (folder / "config" / "env-verifiers.toml").write_text(tomli_w.dumps({"env": value}))
        assert SECRET not in html_of(folder)
    plan = plan_run(config, {"api": 1, "server": 2}, python="python", on_gpu=False)
    rows = rows_of(config, plan, on_gpu=False)
    assert SECRET not in as_json(Ahead([], [*rows], []))
    assert SECRET not in json.dumps(public(config.trainer))
    assert SECRET.encode() not in run_file(config)


@given(st.dictionaries(st.sampled_from(["x", "max_tokens", "env"]), tables(PLAIN)))
def test_values_without_secrets_stay_as_they_are(value: dict[str, Any]) -> None:
    assert redacted(value) == value and redact(value, drop=True).value == value
    assert not redact(value).names


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    assert redacted_text(redacted_text(text)) == redacted_text(text)


@pytest.mark.timeout(60)
def test_hostile_text_is_taken_in_time_that_grows_with_its_length() -> None:
    assert redacted_text("eyJ-" * 60_000) == "eyJ-" * 60_000  # begins of tokens, none of which has a second part
    names = "a:" * 8_000 + "a x"
    assert redact(names, drop=True).value == names
    for part in ('password="', "bearer ", "a ", 'a",', "\\", "?a=", "password=["):
        redacted_text(part * (64_000 // len(part)))


# foreign text --------------------------------------------------------------------------------------------------------


def test_printable_escapes_control_characters_alone() -> None:
    assert (
        printable("ünïcode 漢字 🙂\t|\x1b]0;\x07\n\u202e\x9b\udcff")
        == "ünïcode 漢字 🙂\t|\\x1b]0;\\x07\\n\\u202e\\x9b\\udcff"
    )


def test_printable_counts_what_it_cuts() -> None:
    assert printable("x" * 501) == "x" * 500 + "… (1 more characters)"
    assert printable("x" * 500) == "x" * 500
    assert printable("x" * 9000, None) == "x" * 9000


def test_record_of_a_log_is_one_line_but_for_stacks_and_its_traceback() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        args = ("\x1b", Lines("one\ntwo\x1b"))
        record = logging.LogRecord("a", logging.INFO, "f", 1, "stack of %s\n%s", args, sys.exc_info())
    shown = PrintableFormatter("%(levelname)s %(message)s")
    lines = shown.format(record).split("\n")
    assert lines[:3] == ["INFO stack of \\x1b", "one", "two\\x1b"] and lines[-1] == "ValueError: \\x1b[2J"
    plain = logging.LogRecord("a", logging.INFO, "f", 1, "named %s", ("\x1b[0m\nb",), None)
    assert shown.format(plain) == "INFO named \\x1b[0m\\nb"


@given(st.text(), st.integers(1, 50))
def test_printable_is_one_bounded_line(text: str, limit: int) -> None:
    line = printable(text, limit)
    assert all(each.isprintable() or each == "\t" for each in line)
    assert len(line) <= 10 * limit + 40  # the longest escape is \UXXXXXXXX
