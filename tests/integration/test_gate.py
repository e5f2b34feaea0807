"""Every route of both servers stands behind the gate: the inference server's, and in a real browser also the API's."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from environments.api.app import ROUTES
from grpo_trainer.errors import ServerError
from tests.bridge_contract import Trainer, contract
from tests.foreign import (
    FOREIGN,
    assert_every_route_asks_for_the_key,
    assert_no_route_answers,
    assert_no_write_has_a_simple_type,
    filled,
    foreign,
)
from tests.integration.browsing import FOREIGN_NAME, NEEDS_BROWSER, Browser, browser
from tests.integration.serving import Serving, serving, shared_server
from tests.rollout_api import running_server
from tests.stand_ins import registration

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server


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


def knock(server: Serving, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> int:
    """The status; a websocket is asked for as browsers do."""
    if method == "WEBSOCKET":
        method = "GET"
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        headers = {**upgrade, **headers, "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
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


def test_no_route_answers_a_foreign_page(server: Serving) -> None:
    for name in FOREIGN:
        assert_no_route_answers(partial(knock, server), endpoints(server), foreign(name, port_of(server)))
    assert server.get("/bridge/is_paused").json() == {"paused": False}


def test_no_write_has_a_content_type_that_any_page_can_send(server: Serving) -> None:
    assert_no_write_has_a_simple_type(partial(knock, server), endpoints(server))


def test_with_a_key_every_route_asks_for_it(keyed: Serving) -> None:
    assert_every_route_asks_for_the_key(partial(knock, keyed), endpoints(keyed))
    assert keyed.get("/metrics", host="machine.example").status_code == 200


def test_who_publishes_shows_the_key(keyed: Serving) -> None:
    trainer = Trainer(keyed, vllm_api_key=None)
    with trainer.swap, pytest.raises(ServerError, match="401"):
        trainer.swap.connect(1)
    with contract(keyed, "memory") as made:
        made.publish(made.first)
        made.assert_serves(made.first)


# pages of another site in a real browser ---------------------------------------------------------------------

PAGE = b"""<!doctype html><body><script>
const asked = JSON.parse(decodeURIComponent(location.hash.slice(1)));
window.read = []; window.sent = 0;
const ask = async (method, url, mode, type) => {
  try {
    const body = method === "GET" ? undefined : "{}";
    const answer = await fetch(url, {method, mode, body, headers: type && body ? {"Content-Type": type} : {}});
    window.sent += 1;
    if (answer.type !== "opaque") window.read.push(method + " " + url + " " + answer.status);
  } catch (error) { window.sent += 1; }
};
const open = url => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.onload = frame.onerror = done;
  frame.src = url;
  document.body.append(frame);
});
(async () => {
  for (const [method, url] of asked) {
    await ask(method, url, "no-cors", "text/plain");
    await ask(method, url, "no-cors", "application/x-www-form-urlencoded");
    await ask(method, url, "cors", "application/json");
    if (method === "GET") await open(url);
  }
  document.body.dataset.ready = "yes";
})();
</script>"""


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    """Where another program of the machine serves the page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def attack(browser: Browser, port: int, url: str, routes: list[tuple[str, str]]) -> None:
    """Open the page under two names and have it ask for all routes, by the server's name and by its own."""
    own_port = httpx.URL(url).port
    for page in (f"http://{FOREIGN_NAME}:{port}", f"http://127.0.0.1:{port}"):
        for target in (url, f"http://{FOREIGN_NAME}:{own_port}"):
            asked = [[method, target + filled(path)] for method, path in routes]
            ask = browser(f"{page}/?{target}#{json.dumps(asked)}")
            assert ask("window.sent") == 3 * len(asked)
            assert ask("JSON.stringify(window.read)") == "[]"


@NEEDS_BROWSER
def test_foreign_pages_change_and_read_nothing_of_the_rollout_api(browser: Browser, page_port: int) -> None:
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        trainer = msgspec.to_builtins(registration(2, starting_step=3))
        assert api.post("/register", json=trainer).status_code == 200
        api.get("/batch")
        group = {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}
        assert api.post("/scored_data", json=group).status_code == 200
        before = api.get("/status").json()
        routes = [(method, route.path) for route in ROUTES for method in (route.methods or set()) - {"HEAD"}]
        assert ("GET", "/reset_data") in routes
        attack(browser, page_port, server.url, routes)
        after = api.get("/status").json()
        assert (after["queue_size"], after["current_step"]) == (before["queue_size"], before["current_step"]) == (1, 3)
        assert api.get("/reset_data").text == "Reset successful"
        assert api.get("/status").json()["queue_size"] == 0, "a program may"
