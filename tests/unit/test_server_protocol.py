"""The server's contract: names, ranks, and bodies as they go over the wire."""

import json
import re
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_server import protocol
from vllm_server.__main__ import main
from vllm_server.protocol import GenerateRequest, GenerateResponse, LoraLoadRequest, TokenPrompt


@given(st.text(min_size=1), st.integers(min_value=0, max_value=10**9))
def test_version_name_round_trips(lora_name: str, version: int) -> None:
    name = protocol.version_name(lora_name, version)
    assert protocol.parse_version(name, lora_name) == version


@pytest.mark.parametrize("name", ["policy", "policy-v", "policy-v03", "policy-v-1", "policy-v²", "other-v3", ""])
def test_other_names_have_no_version(name: str) -> None:
    assert protocol.parse_version(name, "policy") is None


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (24, 32), (129, 256), (512, 512)])
def test_servable_rank_is_the_next_legal_one(rank: int, served: int) -> None:
    assert protocol.servable_rank(rank) == served


@pytest.mark.parametrize("rank", [0, -1, 513])
def test_unservable_rank_names_the_legal_ones(rank: int) -> None:
    with pytest.raises(ValueError) as error:
        protocol.servable_rank(rank)
    numbers = [int(number) for number in re.findall(r"-?\d+", str(error.value))]
    assert numbers == [rank, 1, 512, *protocol.LEGAL_LORA_RANKS]


def test_generate_body_is_flat_and_leaves_unset_routing_out() -> None:
    request = GenerateRequest(prompt=TokenPrompt([1, 2]), sampling={"n": 2, "logprobs": 0})
    assert request.to_body() == {"prompt": {"prompt_token_ids": [1, 2]}, "n": 2, "logprobs": 0}


def test_generate_body_round_trips() -> None:
    request = GenerateRequest(
        prompt="2+2=", stream=True, model="policy-v3", policy_version=3, sampling={"stop": ["\n"]}
    )
    assert GenerateRequest.from_body(json.loads(json.dumps(request.to_body()))) == request


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 1}, "`prompt`"),
        ({"prompt": 5}, r"`int` .*`\$.prompt`"),
        ({"prompt": {"prompt_tokens": [1]}}, "prompt_token"),
        ({"prompt": "x", "policy_version": "new"}, r"`\$.policy_version`"),
    ],
)
def test_a_wrong_routing_key_is_named(body: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        GenerateRequest.from_body(body)


def test_logprobs_on_the_wire_are_keyed_by_text_and_keep_their_order() -> None:
    answer = GenerateResponse(
        text=["a"],
        prompt="q",
        finish_reasons=["stop"],
        policy_version=3,
        model="policy-v3",
        prompt_token_ids=[9],
        token_ids=[[7]],
        logprobs=[[[{7: -0.5, 3: -0.25}]]],
    )
    wire = msgspec.json.encode(answer)
    assert b'"logprobs":[[[{"7":-0.5,"3":-0.25}]]]' in wire
    assert b"prompt_logprobs" not in wire
    assert msgspec.json.decode(wire, type=GenerateResponse) == answer


def test_a_load_request_with_a_typo_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="`adapter_nmae`"):
        msgspec.json.decode(b'{"adapter_path": "/a", "adapter_nmae": "x"}', type=LoraLoadRequest)


def test_protocol_is_a_light_edge() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'pydantic'}"
    code = f"import sys, vllm_server.protocol; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_vllm_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_server.checks.find_spec", lambda name: None)
    assert main(["--port", "0"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("vllm_server: ") and "'grpo-trainer[gpu]'" in said


@pytest.mark.parametrize(
    ("installed", "refused", "warned"),
    [("0.31.9", True, False), ("0.32.0", False, False), ("0.32.4+cu130", False, False), ("0.33.0", False, True)],
)
def test_older_versions_of_vllm_are_refused_and_newer_ones_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: str, refused: bool, warned: bool
) -> None:
    monkeypatch.setattr("vllm_server.checks.metadata.version", lambda name: installed)
    monkeypatch.setattr("vllm_server.flags.set_environment", lambda: None)
    monkeypatch.setattr("vllm_server.forking.start", lambda: None)
    monkeypatch.setattr("vllm_server.__main__._serve", lambda argv: 0)
    assert main(["--port", "0"]) == refused
    said = capsys.readouterr().err
    assert (installed in said) is (refused or warned)
