"""The engine that `verifiers` asks, and the command's own part; the library itself is met in an integration test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from environments.config import ConfigError, ServerConfig
from environments.from_verifiers import __main__ as verifiers_venv
from environments.from_verifiers.__main__ import main, normalised
from environments.from_verifiers.engine import Engine
from environments.peers.inference import InferenceClient
from tests.stand_ins import Asked, Handle, Reply, answering

COMMAND = "grpo env verifiers"


def upstream(asked: list[dict[str, Any]]) -> Handle:
    """A server of ours that answers 46, each time as the next version; it refuses prompts that begin with 9."""

    def handle(request: Asked) -> Reply:
        body = request.json()
        asked.append(body)
        prompt = body["prompt"]["prompt_token_ids"]
        if prompt[0] == 9:
            return Reply(422, {"error": {"message": "not that one"}})
        answer = {
            "text": ["46"],
            "prompt": None,
            "finish_reasons": ["stop"],
            "policy_version": len(asked),
            "model": "m",
            "prompt_token_ids": prompt,
            "token_ids": [[6, 1]],
            "logprobs": [[[{"6": -0.5}], [{"1": -0.25}]]],
        }
        return Reply(json=answer)

    return handle


def ask(
    *requests: tuple[str, dict[str, Any]], max_length: int = 10
) -> tuple[list[httpx.Response], Engine, list[dict[str, Any]]]:
    """What the engine answers to `(trace id, body)`s, and what it asked our server."""
    asked: list[dict[str, Any]] = []

    async def scene(server: str) -> tuple[list[httpx.Response], Engine]:
        client = InferenceClient(ServerConfig(server_type="vllm", base_url=server), patience=30.0)
        engine = Engine(client, max_length)
        url = await engine.start()
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                route = url.removesuffix("/v1") + "/inference/v1/generate"
                answers = [
                    await http.post(route, json=body, headers={"X-Session-ID": trace}) for trace, body in requests
                ]
                answers.append(await http.get(f"{url}/models"))
            return answers, engine
        finally:
            await engine.close()
            await client.close()

    with answering(upstream(asked)) as server:
        answers, engine = asyncio.run(scene(server))
    return answers, engine, asked


def body(*tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": tokens, "sampling_params": sampling}


def test_a_turn_is_answered_as_vllm_would_with_the_servers_ids_and_logprobs() -> None:
    (answer, models), engine, (asked,) = ask(
        ("t", body(3, 4, temperature=0.7, max_tokens=50, stop_token_ids=[1], logprobs=1, skip_special_tokens=False))
    )
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == [6, 1] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:6", "logprob": -0.5},
        {"token": "token_id:1", "logprob": -0.25},
    ]
    assert asked["prompt"] == {"prompt_token_ids": [3, 4]} and asked["stop_token_ids"] == [1]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.7, 1.0, 8)  # 10, less the prompt
    assert models.json()["data"][0]["max_model_len"] == 9
    (turn,) = engine.turns["t"]
    assert (turn.policy_version, turn.temperature) == (1, 0.7)


def test_engine_the_turns_of_each_rollout_are_kept() -> None:
    _, engine, _ = ask(("a", body(3)), ("b", body(3)), ("a", body(3, 6)))
    assert {trace: [turn.policy_version for turn in turns] for trace, turns in engine.turns.items()} == {
        "a": [1, 3],
        "b": [2],
    }


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        (body(*range(10)), 400, "maximum context length is 10 tokens, the prompt has 10"),
        (body(9), 422, "not that one"),
        ({"model": "policy"}, 422, "missing required field `token_ids`"),
    ],
)
def test_what_can_not_be_answered_is_said(asked: dict[str, Any], status: int, says: str) -> None:
    (answer, _), *_ = ask(("t", asked))
    assert answer.status_code == status and says in answer.json()["error"]["message"]


def test_command_line_may_be_short() -> None:
    short = ["--env-id", "x", "--env.group_size", "4"]
    assert normalised(short) == ["serve", "--env.env_id", "x", "--env.group_size", "4"]
    assert normalised(["process", "--env-id=x"]) == ["process", "--env.env_id=x"]
    assert normalised(["--help"]) == ["--help"] and normalised([]) == []


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["install", "-h"], 0), ([], 2)])
def test_help_needs_no_installation_and_names_it(
    arguments: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(verifiers_venv.FOLDER_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().out
    assert ended.value.code == status and not (tmp_path / "none").exists()
    assert f"{COMMAND} install [PACKAGE" in said and f"into {tmp_path}/none" in said and "--env-id ID" in said


def test_this_package_is_linked_into_the_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verifiers_venv.FOLDER_VARIABLE, str(tmp_path))
    site = tmp_path / "lib" / "python3" / "site-packages"
    (site / "environments").mkdir(parents=True)  # of an older way to install it
    verifiers_venv.link(tmp_path)
    verifiers_venv.link(tmp_path)
    assert (site / "environments" / "from_verifiers" / "env.py").is_file() and (
        site / "vllm_server" / "protocol"
    ).is_dir()
    assert (site / "grpo_common" / "errors.py").is_file()
    with pytest.raises(ConfigError) as error:
        verifiers_venv.become("environments.from_verifiers", [])
    assert error.value.field == f"verifiers {verifiers_venv.VERSION}" and f"`{COMMAND} install`" in error.value.fix
