"""Pages of another site in a real browser: whatever they send, and to whatever route, changes and reveals nothing."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from environments.api.app import ROUTES
from tests.integration.browsing import FOREIGN_NAME, NEEDS_BROWSER, Browser, browser
from tests.integration.serving import shared_server
from tests.rollout_api import running_server
from tests.routes import filled

__all__ = ["browser"]  # a fixture

pytestmark = [NEEDS_BROWSER, pytest.mark.timeout(400)]

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
def port() -> Iterator[int]:
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


def test_the_rollout_api(browser: Browser, port: int) -> None:
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        trainer = {"wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 8, "num_steps": 9}
        trainer |= {"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 3}
        assert api.post("/register", json=trainer).status_code == 200
        api.get("/batch")
        group = {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}
        assert api.post("/scored_data", json=group).status_code == 200
        before = api.get("/status").json()
        routes = [(method, route.path) for route in ROUTES for method in (route.methods or set()) - {"HEAD"}]
        assert ("GET", "/reset_data") in routes
        attack(browser, port, server.url, routes)
        after = api.get("/status").json()
        assert (after["queue_size"], after["current_step"]) == (before["queue_size"], before["current_step"]) == (1, 3)
        assert api.get("/reset_data").text == "Reset successful"
        assert api.get("/status").json()["queue_size"] == 0, "a program may"


def test_the_inference_server(browser: Browser, port: int) -> None:
    server = shared_server()
    lines = (line.partition(" ") for line in server.get("/bridge/list_endpoints").json()["endpoints"])
    routes = [(method, path) for method, _, path in lines if method in ("GET", "POST")]
    before = server.get("/lora/status").json()["load_count"]
    attack(browser, port, server.url, routes)
    assert server.get("/bridge/is_paused").json() == {"paused": False}
    assert server.get("/lora/status").json()["load_count"] == before
    assert server.post("/bridge/pause", {}).status_code == 200, "a program may"
    assert server.post("/bridge/resume", {}).status_code == 200
