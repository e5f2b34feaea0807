"""Every route of the rollout API stands behind the gate; clients also reach it over TLS, as behind a proxy."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from environments.api.app import build_app
from environments.api.errors import SettingsError
from environments.api.service import Service
from environments.api.settings import Settings
from grpo_trainer.config.train import RolloutConfig
from grpo_trainer.rollouts.client import RolloutClient
from tests.foreign import (
    FOREIGN,
    assert_every_route_asks_for_the_key,
    assert_no_route_answers,
    assert_no_write_has_a_simple_type,
    endpoints,
    foreign,
    innermost,
)
from tests.processes import ROOT, free_port, running, wait_for
from tests.stand_ins import registration
from tests.unit.factories import refusing

PORT = 8000
TRAINER = msgspec.to_builtins(registration(2))
PAGE = {"origin": "https://dashboard.example", "sec-fetch-site": "cross-site"}


class Knocking:
    """The application in this process, called as uvicorn would call it."""

    def __init__(self, **settings: Any) -> None:
        self.service = Service(Settings(**settings))
        self.app = build_app(self.service)
        self.endpoints = sorted(set(endpoints(innermost(self.app).routes)))

    def __call__(self, method: str, path: str, **sent: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}") as client:
                return await client.request(method, path, **sent)

        return asyncio.run(ask())

    def knock(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> int:
        return self(method, path, headers=headers, content=body).status_code


@pytest.fixture
def api() -> Iterator[Knocking]:
    knocking = Knocking()
    yield knocking
    knocking.service.close()


def test_the_list_of_routes_is_the_applications_own(api: Knocking) -> None:
    assert {("GET", "/reset_data"), ("POST", "/register"), ("POST", "/batch/1/ack"), ("GET", "/overview")} <= set(
        api.endpoints
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_no_route_answers_a_foreign_page(api: Knocking, name: str) -> None:
    assert api("POST", "/register", json=TRAINER).status_code == 200
    assert_no_route_answers(api.knock, api.endpoints, foreign(name, PORT))
    assert api.service.queue.run is not None, "nothing was reset"


def test_no_write_has_a_content_type_that_any_page_can_send(api: Knocking) -> None:
    assert_no_write_has_a_simple_type(api.knock, api.endpoints)


def test_reset_by_get_is_for_programs_alone(api: Knocking) -> None:
    own_page = {"origin": f"http://127.0.0.1:{PORT}", "sec-fetch-site": "same-origin"}
    for headers in (own_page, {"sec-fetch-site": "none"}, {"sec-fetch-mode": "navigate"}):
        assert api("POST", "/register", json=TRAINER).status_code == 200
        assert api("GET", "/reset_data", headers=headers).status_code == 403
        assert api.service.queue.run is not None
        assert api("POST", "/reset_data", headers=headers).text == "Reset successful"
        assert api.service.queue.run is None
    assert api("POST", "/register", json=TRAINER).status_code == 200
    assert api("GET", "/reset_data").text == "Reset successful"
    assert api.service.queue.run is None


@pytest.mark.parametrize("path", ["/batch", "/reset_data"])
def test_a_request_for_headers_alone_changes_nothing(api: Knocking, path: str) -> None:
    assert api("POST", "/register", json=TRAINER).status_code == 200
    assert api("HEAD", path).status_code == 405
    assert api.service.queue.run is not None


def test_origins_that_the_user_named_may_call() -> None:
    knocking = Knocking(cors_origins=("https://dashboard.example",))
    preflight = {**PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    assert knocking("OPTIONS", "/register", headers=preflight).status_code == 200
    answer = knocking("POST", "/register", json=TRAINER, headers=PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://dashboard.example"
    assert knocking("GET", "/status", headers=PAGE | {"host": "evil.example"}).status_code == 403
    assert knocking("GET", "/status", headers=PAGE | {"origin": "https://other.example"}).status_code == 403
    knocking.service.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_key_every_route_asks_for_it(host: str) -> None:
    knocking = Knocking(host=host, api_key="secret", cors_origins=("https://dashboard.example",))
    assert_every_route_asks_for_the_key(knocking.knock, knocking.endpoints)
    assert knocking("GET", "/status").headers["www-authenticate"] == "Bearer"
    shown = {"authorization": "Bearer secret", "host": "trainer.example"}
    assert knocking("GET", "/status", headers=shown).status_code == 200
    assert knocking("GET", "/status", headers=shown | {"sec-fetch-site": "cross-site"}).status_code == 403
    preflight = {**PAGE, "access-control-request-method": "POST"}
    assert knocking("OPTIONS", "/register", headers=preflight).status_code == 200
    assert knocking("OPTIONS", "/register", headers=preflight | {"origin": "http://127.0.0.1:8000"}).status_code == 403
    assert knocking("POST", "/register", json=TRAINER, headers=shown | PAGE).status_code == 200
    knocking.service.close()


def test_a_browser_without_the_key_gets_the_page_that_asks_for_it() -> None:
    knocking = Knocking(api_key="secret")
    answer = knocking("GET", "/", headers={"accept": "text/html"})
    assert (answer.status_code, answer.text.startswith("<!doctype html>")) == (401, True)
    assert knocking("GET", "/status", headers={"accept": "text/html"}).json()["detail"]
    knocking.service.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "machine.example"])
def test_beyond_loopback_there_are_no_settings_without_a_key(host: str) -> None:
    with refusing(SettingsError, "--host"):
        Settings(host=host)
    assert Settings(host=host, api_key="secret").host == host


pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificate")

PROXIED = """
import sys, uvicorn
from environments.api.app import build_app
from environments.api.errors import SettingsError
from environments.api.service import Service
from environments.api.settings import Settings

port, certificate, key = sys.argv[1:]
app = build_app(Service(Settings()))
uvicorn.run(app, port=int(port), ssl_certfile=certificate, ssl_keyfile=key, log_level="warning")
"""
ENVIRONMENT = """
import asyncio, sys
from environments.config import BaseEnvConfig
from environments.peers.rollout_api import RolloutApi

async def told(url, patience):
    api = RolloutApi(BaseEnvConfig(tokenizer_name="none", rollout_server_url=url, retry_timeout=float(patience)))
    try:
        await api.register("sums")
        return (await api.info()).batch_size
    finally:
        await api.close()

print(asyncio.run(told(*sys.argv[1:])))
"""
"""An environment registers, and prints the trainer's batch size. It reads certificates when it is imported."""


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, and its key."""
    made, key = tmp_path / "api.pem", tmp_path / "api.key"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=grpo -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-out", made, "-keyout", key], check=True, capture_output=True, timeout=250)
    return made, key


def test_environment_and_trainer_reach_it(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, key = certificate
    log, port = tmp_path / "log", free_port()
    url = f"https://127.0.0.1:{port}"
    context = ssl.create_default_context(cafile=made)

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/status", verify=context, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    with running("-c", PROXIED, str(port), str(made), str(key), log=log) as process:
        wait_for("an answer", lambda: process.poll() is not None or answers(), log)
        environment = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        unknown = environment([sys.executable, "-c", ENVIRONMENT, url, "0.1"])
        assert unknown.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in unknown.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
        config = RolloutConfig(atropos_url=url)
        with closing(RolloutClient(config, registration(batch_size=7), lambda: None)) as trainer:  # else the API waits
            trainer.register()
        known = environment([sys.executable, "-c", ENVIRONMENT, url, "30"])
        assert (known.returncode, known.stdout) == (0, "7\n"), known.stderr
