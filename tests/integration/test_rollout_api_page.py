"""The status page in a real headless browser."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from environments.api.testing import free_port, running_server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=\"document.title='pwned'\"></pre><script>document.title='pwned'</script>&amp;"
PHONE_WIDTH = 390

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a headless browser: apt-get install chromium")

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ask]]:
    """Opens a URL in a phone-sized page; the function that it gives evaluates an expression there."""
    sync_client = pytest.importorskip("websockets.sync.client", reason="needs websockets to drive the browser")
    port = free_port()
    profile = tmp_path_factory.mktemp("profile")
    assert BROWSER is not None
    process = subprocess.Popen(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--remote-debugging-port={port}", f"--user-data-dir={profile}", f"--window-size={PHONE_WIDTH},844"),
            "about:blank",
        ],
        stderr=subprocess.DEVNULL,
    )
    numbers = itertools.count(1)
    try:
        target = wait_for(lambda: targets(port))[0]
        with sync_client.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:

            def call(method: str, **parameters: Any) -> Any:
                number = next(numbers)
                socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
                while (answer := json.loads(socket.recv(timeout=60))).get("id") != number:
                    pass
                assert "error" not in answer, answer
                return answer["result"]

            def ask(expression: str) -> Any:
                return call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

            def open_page(url: str) -> Ask:
                phone = {"width": PHONE_WIDTH, "height": 844, "deviceScaleFactor": 2, "mobile": True}
                call("Emulation.setDeviceMetricsOverride", **phone)
                call("Page.navigate", url=url)
                wait_for(lambda: ask("document.body && document.body.dataset.ready === 'yes'"))
                return ask

            yield open_page
    finally:
        process.terminate()
        process.wait()


def targets(port: int) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
            return [each for each in json.load(answer) if each["type"] == "page"]
    except OSError:
        return []


def wait_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        trainer = {
            **{"wandb_group": "g", "wandb_project": EVIL, "batch_size": 12, "max_token_len": 64, "num_steps": 9},
            **{"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 2},
        }
        assert api.post("/register", json=trainer).status_code == 200
        api.get("/batch")
        env = {"max_token_length": 64, "desired_name": EVIL, "weight": 1.0, "group_size": 8}
        assert api.post("/register-env", json=env).status_code == 200
        for score in (0.0, 0.5, 1.0):
            group = {
                "tokens": [[1, 2]] * 8,
                "masks": [[1, 2]] * 8,
                "scores": [score] * 8,
                "messages": [[{"role": "assistant", "content": EVIL + "x" * 500}]] * 8,
                "env_id": 0,
                "policy_versions": [1] * 8,
            }
            assert api.post("/scored_data", json=group).status_code == 200
        yield server.url


def test_the_page_tells_what_happens(browser: Callable[[str], Ask], url: str):
    ask = browser(url)
    text = ask("document.body.innerText")
    for said in ("of 9", "24 sequences", "not ready", "Group 2", "score 1.000", "policy version 1", "alive"):
        assert said in text, (said, text)
    assert "batch_size 12 is no sum of groups of 8" in text
    assert ask("document.querySelectorAll('#chart polyline').length") == 1
    assert "3 groups, mean scores from 0.000 to 1.000" in text


def test_what_models_and_environments_write_is_text_and_nothing_else(browser: Callable[[str], Ask], url: str):
    ask = browser(url)
    assert EVIL in ask("document.querySelector('#samples pre').textContent")
    assert EVIL in ask("document.getElementById('run').textContent")
    assert ask("document.title") == "Rollout API"
    assert ask("document.querySelectorAll('img').length") == 0


def test_the_page_asks_nobody_else_and_fits_a_phone(browser: Callable[[str], Ask], url: str):
    ask = browser(url)
    asked = ask("JSON.stringify(performance.getEntriesByType('resource').map(each => each.name))")
    assert {each.split("?")[0] for each in json.loads(asked)} <= {f"{url}/overview", f"{url}/favicon.ico"}
    assert ask("document.documentElement.scrollWidth") <= PHONE_WIDTH


def test_the_reference_lists_every_operation(browser: Callable[[str], Ask], url: str):
    ask = browser(f"{url}/docs")
    text = ask("document.body.innerText")
    described = httpx.get(f"{url}/openapi.json").json()
    assert all(path in text for path in described["paths"])
    assert all(name in text for name in described["components"]["schemas"])
