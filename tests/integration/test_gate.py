"""Every route of the inference server stands behind the gate, vLLM's own among them: with a key and without."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import httpx
import pytest

from grpo_trainer.errors import ServerError
from tests.bridge_contract import Trainer, contract
from tests.integration.serving import Serving, serving, shared_server
from tests.integration.test_lora_http import adapter_bytes
from tests.routes import FOREIGN, OPEN, SIMPLE_TYPES, filled, foreign
from vllm_server.protocol import SAFETENSORS_MEDIA_TYPE

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

NO_ROUTES = [("GET", "/no/such/route"), ("POST", "/no/such/route"), ("OPTIONS", "/generate"), ("GET", "//health")]


@pytest.fixture
def server() -> Serving:
    return shared_server()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("keyed"), key="secret") as server:
        yield server


def port_of(server: Serving) -> int:
    return httpx.URL(server.url).port or 80


def endpoints(server: Serving) -> list[tuple[str, str]]:
    """Method and path of all that the server's application has."""
    lines = server.get("/bridge/list_endpoints").json()["endpoints"]
    found = [(method, filled(path)) for method, _, path in (line.partition(" ") for line in lines)]
    upstream = {("POST", "/invocations"), ("POST", "/tokenize"), ("GET", "/docs"), ("GET", "/openapi.json")}
    assert upstream | {("GET", "/metrics"), ("POST", "/bridge/pause"), ("POST", "/v1/completions")} <= set(found)
    return found


def knock(server: Serving, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    """The status; a websocket is asked for as browsers do."""
    if method == "WEBSOCKET":
        method = "GET"
        headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"} | headers
        headers["sec-websocket-key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    connection.putrequest(method, path, skip_host="host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    if body is not None:
        connection.putheader("content-length", str(len(body)))
    connection.endheaders(body)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("name", FOREIGN)
def test_no_route_answers_a_foreign_page(server: Serving, name: str) -> None:
    headers = foreign(name, port_of(server))
    for method, path in [*endpoints(server), *NO_ROUTES]:
        assert knock(server, method, path, headers) == 403, (method, path)
    assert server.get("/bridge/is_paused").json() == {"paused": False}


def test_no_write_has_a_content_type_that_any_page_can_send(server: Serving) -> None:
    for method, path in endpoints(server):
        if method not in ("GET", "WEBSOCKET"):
            for kind in SIMPLE_TYPES:
                assert knock(server, method, path, {"content-type": kind}, b"{}") == 415, (path, kind)
            assert knock(server, method, path, {}, b"{}") == 415, path


def test_what_is_refused_is_said_in_parts(server: Serving) -> None:
    for headers, status, field in (
        ({"host": "evil.example"}, 403, "Host"),
        ({"origin": "http://evil.example"}, 403, "Origin"),
        ({"content-type": "text/plain"}, 415, "Content-Type"),
    ):
        answer = server.post("/bridge/pause", b"{}", **headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, status, field)
        assert error["got"] and error["wanted"]


def test_programs_call_it_by_any_name_of_loopback(server: Serving) -> None:
    for name in ("127.0.0.1", "localhost", "[::1]"):
        host = {"host": f"{name}:{port_of(server)}"}
        assert server.get("/bridge/info", **host).status_code == 200
        assert server.post("/generate", {"prompt": "1", "max_tokens": 1}, **host).status_code == 200


def test_with_a_key_every_route_asks_for_it(keyed: Serving) -> None:
    for method, path in [*endpoints(keyed), *NO_ROUTES]:
        for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            status = knock(keyed, method, path, key)
            if path in OPEN:
                assert status in (200, 405), (method, path)
            else:
                assert status == (403 if method == "WEBSOCKET" else 401), (method, path)
    assert keyed.get("/metrics", host="machine.example").status_code == 200


def test_who_publishes_shows_the_key(keyed: Serving) -> None:
    body = adapter_bytes(keyed, seed=1)
    for key in ("", "Bearer secre", "secret2"):
        headers = {"authorization": key, "content-type": SAFETENSORS_MEDIA_TYPE}
        for route in ("/lora/load", "/channels", "/channels/close", "/lora/unload"):
            assert keyed.post(route, body, **headers).status_code == 401
    assert keyed.get("/lora/status").json()["load_count"] == 0
    trainer = Trainer(keyed, vllm_api_key=None)
    with trainer.swap, pytest.raises(ServerError, match="401"):
        trainer.swap.connect(1)
    with contract(keyed, "memory") as made:
        made.publish(made.first)
        made.assert_serves(made.first)
