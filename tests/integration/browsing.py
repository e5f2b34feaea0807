"""A real headless browser for tests of pages, driven by its debugging protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_BROWSER = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("GRPO_REQUIRE_BROWSER"),
    reason="needs a headless browser: apt-get install chromium",
)
PHONE_WIDTH = 390
FOREIGN_NAME = "page.example"
"""Resolves to 127.0.0.1 in the browser, as any web page can make its own name do."""
NAVIGATED = "Inspected target navigated"
"""What the browser says of an expression that was being evaluated when a link was followed."""


class Page:
    """A page that is open; calling it evaluates an expression there."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, expression: str) -> Any:
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Of the visible part, as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))


class Browser:
    """Calling it opens a URL, in a phone-sized page unless said otherwise.

    Attributes:
        errors: what the console has shown of them since the start.
    """

    def __init__(self, call: Callable[..., Any], errors: list[str]) -> None:
        self._call, self.errors = call, errors

    def __call__(self, url: str, *, width: int = PHONE_WIDTH, height: int = 844, scheme: str = "light") -> Page:
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width <= PHONE_WIDTH}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page = Page(self._call)
        page("window.left = true")  # the page before, which may answer for a moment longer
        self._call("Page.navigate", url=url)
        wait_for(lambda: page("!window.left && document.body && document.body.dataset.ready === 'yes'"))
        return page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests of a module."""
    sync_client = pytest.importorskip("websockets.sync.client", reason="needs websockets to drive the browser")
    port = free_port()
    profile = tmp_path_factory.mktemp("profile")
    assert BROWSER is not None
    process = subprocess.Popen(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--remote-debugging-port={port}", f"--user-data-dir={profile}", f"--window-size={PHONE_WIDTH},844"),
            f"--host-resolver-rules=MAP {FOREIGN_NAME} 127.0.0.1",
            "about:blank",
        ],
        stderr=subprocess.DEVNULL,
    )
    numbers, errors = itertools.count(1), list[str]()
    try:
        target = wait_for(lambda: targets(port))[0]
        with sync_client.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:

            def call(method: str, **parameters: Any) -> Any:
                number = next(numbers)
                socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
                while (answer := json.loads(socket.recv(timeout=60))).get("id") != number:
                    errors.extend(errors_in(answer))
                if NAVIGATED in answer.get("error", {}).get("message", ""):
                    return call(method, **parameters)  # the page that comes is asked
                assert "error" not in answer, answer
                return answer["result"]

            call("Runtime.enable")
            call("Log.enable")
            yield Browser(call, errors)
    finally:
        process.terminate()
        process.wait()


def errors_in(event: dict[str, Any]) -> Iterator[str]:
    """What an event of the debugging protocol says of errors on the console."""
    match event:
        case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
            yield str(details)
        case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
            yield str(entry)
        case {"method": "Runtime.consoleAPICalled", "params": {"type": "error", "args": said}}:
            yield str(said)


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
