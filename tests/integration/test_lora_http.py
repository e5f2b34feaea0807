"""Doors of the LoRA bridge: `/lora/load` over HTTP, what is said of a body that is none, and servers it can't use.

What the bridge promises once it is open is in `tests/bridge_contract.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.layout import AdapterLayout
from tests.bridge_contract import Trainer, contract
from tests.integration.serving import RANK, Serving, shared_server
from tests.processes import wait_for
from tests.unit.tiny_lora import fill_b
from vllm_server.protocol import SAFETENSORS_MEDIA_TYPE

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server


def adapter_bytes(server: Serving, seed: int) -> bytes:
    """The body of a publish."""
    trainer = Trainer(server)
    fill_b(trainer.model, seed)
    with trainer.swap:
        return AdapterLayout(trainer.model, torch.float32).pack_file().numpy().tobytes()


@pytest.fixture
def body() -> bytes:
    return adapter_bytes(shared_server(), seed=3)


@pytest.fixture
def unchanged() -> Iterator[None]:
    """What is refused changes nothing: the same version serves, with the same weights, and the next publish works."""
    with contract(shared_server(), "memory") as made:
        made.publish(made.first)
        loads = made.status().load_count
        yield
        assert made.status().load_count == loads
        assert made.server.get("/health").status_code == 200
        made.assert_serves(made.first)
        made.publish(made.first + 1)
        made.assert_serves(made.first + 1)


def refused(query: str, body: bytes, kind: str = SAFETENSORS_MEDIA_TYPE) -> tuple[int, str, str]:
    """Status, field and message of a refusal."""
    answer = shared_server().post(f"/lora/load{query}", body, **{"content-type": kind})
    error = answer.json()["error"]
    assert error["fix"] and error["code"] == answer.status_code
    return answer.status_code, error["param"], error["message"]


@pytest.mark.usefixtures("unchanged")
def test_what_is_wrong_with_a_body_or_a_query_is_said(body: bytes) -> None:
    header = 8 + int.from_bytes(body[:8], "little")
    for query, sent, kind, field, said in (
        ("?version=900", body[:-1], SAFETENSORS_MEDIA_TYPE, "adapter_model.safetensors", "a file that ends early"),
        ("?version=900", body[: header - 1], SAFETENSORS_MEDIA_TYPE, "adapter_model.safetensors", "ends in its header"),
        ("?version=900", b"", SAFETENSORS_MEDIA_TYPE, "adapter_model.safetensors", "0 bytes"),
        ("?version=900", b"{}" + body, SAFETENSORS_MEDIA_TYPE, "adapter_model.safetensors", "a header of"),
        ("?versoin=900", body, SAFETENSORS_MEDIA_TYPE, "query", "unknown field `versoin`"),
        ("?version=nine", body, SAFETENSORS_MEDIA_TYPE, "query", "$.version"),
        ("?version=-1", body, SAFETENSORS_MEDIA_TYPE, "version", "wanted 0 to"),
        ("?activate=perhaps", body, SAFETENSORS_MEDIA_TYPE, "query", "$.activate"),
        ("?adapter_path=/tmp", body, SAFETENSORS_MEDIA_TYPE, "adapter_path", "body and folder"),
        ("?channel=c0ffee", body, SAFETENSORS_MEDIA_TYPE, "adapter_path", "body and channel"),
        ("", body, "application/octet-stream", "content-type", f"wanted application/json or {SAFETENSORS_MEDIA_TYPE}"),
        ("", body, "application/x-tar; version=1", "content-type", "got application/x-tar"),
        ("", body, "application/json", "body", "JSON"),
        ("", b"{}", "application/json", "adapter_path", "got no adapter"),
        ("", b"[]", "application/json", "body", "object"),
        ("", b'{"adapter_path": 3}', "application/json", "body", "adapter_path"),
    ):
        status, param, message = refused(query, sent, kind)
        assert (status, param) == (422, field), message
        assert said in message


@pytest.mark.usefixtures("unchanged")
def test_a_body_that_breaks_off_publishes_nothing(body: bytes) -> None:
    """The client says how much it will send, and goes away half-way."""

    def half() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionResetError("gone")

    headers = {"content-type": SAFETENSORS_MEDIA_TYPE, "content-length": str(len(body))}
    with pytest.raises(ConnectionResetError):
        httpx.post(f"{shared_server().url}/lora/load", content=half(), headers=headers, trust_env=False)
    log = shared_server().log
    wait_for("the server to notice", lambda: "An adapter broke off on its way" in log.read_text(), log, 30)
    assert "Exception in ASGI application" not in log.read_text()


def test_content_types_are_read_as_http_writes_them(body: bytes) -> None:
    server = shared_server()
    for kind in (SAFETENSORS_MEDIA_TYPE.upper(), f"{SAFETENSORS_MEDIA_TYPE}; charset=binary"):
        answer = server.post("/lora/load", body, **{"content-type": kind})
        assert answer.status_code == 200, answer.text
        assert answer.json()["transport"] == "memory"
    _, served = server.publish()
    again = json.dumps({"adapter_path": served.adapter_path}).encode()
    answer = server.post("/lora/load", again, **{"content-type": "application/octet-stream"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "adapter_path")


# where the bridge starts: on a server that was used before, or one that can't take it -------------------------------


def test_a_trainer_that_comes_to_a_used_server_goes_on_counting() -> None:
    trainer, other = Trainer(shared_server()), Trainer(shared_server())
    with trainer.swap:
        first = trainer.swap.connect(1)
        trainer.swap.publish(first)
    with other.swap:
        assert other.swap.connect(0) == first + 1
        assert other.swap.connect(first + 50) == first + 50  # a resumed trainer that is further keeps its count
        assert other.swap.publish(first + 1).version == first + 1


@pytest.mark.parametrize(
    ("options", "field", "got", "wanted"),
    [({"lora_r": 16}, "--max-lora-rank", f"{RANK}", "16"), ({"lora_name": "other"}, "--lora-name", "other", "policy")],
)
def test_a_server_that_cannot_take_the_bridge_is_refused_before_training(
    options: dict[str, Any], field: str, got: str, wanted: str
) -> None:
    trainer = Trainer(shared_server(), **options)
    with trainer.swap, pytest.raises(BridgeError) as error:
        trainer.swap.connect(0)
    assert (error.value.field, error.value.got) == (field, got) and wanted in error.value.wanted
