"""How errors of the environments, of the rollout API and of the inference server read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from environments.api import intake, wire
from environments.api.__main__ import parse as parse_api
from environments.api.records import ApiError
from environments.config import ConfigError
from environments.data_config import DataConfig
from environments.dataset.columns import Columns
from environments.dataset.data import read_data
from environments.peers.http import PeerRefused
from tests.stand_ins import Reply, answering
from tests.unit import test_environment_runner as runner
from tests.unit.test_environment_options import parse
from tests.unit.test_environment_peers import ask
from vllm_server import seams
from vllm_server.errors import IncompatibleError, ServeError
from vllm_server.http import parse_body
from vllm_server.protocol import LoraLoadRequest

# settings ----------------------------------------------------------------------------------------------------


def test_settings_are_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text("[env]\ngroup_sise = 3\n")
    with pytest.raises(ConfigError) as error:
        parse("--config", str(file), "--env.group_size", "0", "--env.seed", "x", "--env.operation", "?")
    assert str(error.value).splitlines() == [
        "--env.tokenizer_name: required, but not given",
        "--env.group_size: got '0', wanted a number greater than or equal to 1",
        "--env.seed: got 'x', wanted a valid integer",
        "--env.operation: got '?', wanted '+', '-' or '*'",
        "env.group_sise: no such setting; did you mean env.group_size?",
    ]


# what peers answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(422, {"detail": "scores[0]: nan", "field": "scores"}), "got 422: scores[0]: nan"),
        (Reply(404), "got 404: no reason given"),
    ],
)
def test_a_peer_that_refuses(reply: Reply, said: str) -> None:
    with answering(lambda _: reply) as url, pytest.raises(PeerRefused) as error:
        ask(url, "POST", "/scored_data")
    assert str(error.value) == f"the oracle at {url}: refused POST /scored_data; {said}"


# what the rollout API answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"masks": [[-100], [-100, 3]]}, "masks[0]: 1 entries, tokens[0] has 2; expected one entry per token"),
        (
            {"tokens": [[1, -2], [1, 3]]},
            "tokens[0][1]: -2, expected a token id of the model, 0 or more; mark what is not trained in `masks`",
        ),
        ({"scores": [1.0]}, "scores: 1 for 2 sequences, expected one each"),
        ({"scores": [None, 1.0]}, "scores[0]: Expected `float`, got `null`"),
        ({"env_id": 99}, "env_id: never registered; got 99; take the id that POST /register-env answers with"),
    ],
)
def test_a_group_that_is_refused(fields: dict[str, Any], text: str) -> None:
    group = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0], **fields}
    service = asyncio.run(runner.started())
    with pytest.raises(ApiError) as error:
        intake.take_one(service, intake.read_one(msgspec.json.encode(group), wire.JSON), None)
    assert error.value.response() == wire.ErrorResponse(detail=text, field=next(iter(fields)))


def test_a_body_that_is_cut_short() -> None:
    with pytest.raises(ApiError) as error:
        intake.read_one(b"{", wire.JSON)
    assert error.value.response().detail == "body: Input data was truncated; wanted JSON"


@pytest.mark.parametrize("flag", ["--ssl-certfile", "--ssl-keyfile"])
def test_an_api_with_a_certificate(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        parse_api([flag, "api.pem"])
    assert "grpo api does not serve TLS; put a proxy that does before it (SECURITY.md)" in capsys.readouterr().err


# the inference server ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "symbol"), [("json", "json.gone"), ("jsonx", "jsonx")])
def test_a_vllm_without_what_is_used(monkeypatch: pytest.MonkeyPatch, module: str, symbol: str) -> None:
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.40.0")
    with pytest.raises(IncompatibleError) as error:
        seams.require(module, "gone")
    assert str(error.value) == f"vLLM 0.40.0: has no {symbol}; wanted vLLM 0.32; install it"


def test_a_request_that_the_server_refuses() -> None:
    with pytest.raises(ServeError) as error:
        parse_body(b'{"version": "newest"}', LoraLoadRequest)
    answer = error.value.response().error
    assert answer.message == (
        "body: got a misfit (Expected `int | null`, got `str` - at `$.version`), "
        "wanted the JSON that docs/server.md describes; correct it"
    )
    assert (answer.code, answer.type, answer.param) == (422, "UnprocessableEntityError", "body")
    assert answer.message == f"{answer.param}: got {answer.got}, wanted {answer.wanted}; {answer.fix}"


# data sets and rewards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "rows.jsonl",
            '{"prompt": "a"}\n{"prompt": \n',
            '--data FILE, line 2: got {"prompt": (Expecting value, (byte 11)), wanted one JSON object; correct or '
            "remove the line",
        ),
        ("rows.csv", "", "--data FILE: got an empty file, wanted one row or more"),
        (
            "rows.txt",
            "a",
            "--data FILE: not a kind of file that can be read; got the ending .txt, wanted a .jsonl, .json, .csv, "
            ".tsv or .parquet file; rename or convert it",
        ),
        (
            "rows.json",
            '[{"text": "a"}]',
            "--data.prompt_column: got the columns text in FILE, wanted one of prompt, question, problem, messages; "
            "name the column with the prompt, or write --data.prompt_template",
        ),
    ],
)
def test_data_that_cannot_be_used(tmp_path: Path, name: str, content: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    config = DataConfig(path=str(file))
    with pytest.raises(ConfigError) as error:
        Columns.of(config, read_data(config)[0])
    assert str(error.value) == text.replace("FILE", str(file))
