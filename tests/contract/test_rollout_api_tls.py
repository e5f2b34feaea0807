"""Clients of the rollout API reach it over TLS, as behind a proxy, with a certificate that SSL_CERT_FILE names."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.processes import ROOT, free_port, running, wait_for

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificate")

PROXIED = """
import sys, uvicorn
from environments.api.app import build_app
from environments.api.service import Service
from environments.api.settings import Settings

port, certificate, key = sys.argv[1:]
app = build_app(Service(Settings()))
uvicorn.run(app, port=int(port), ssl_certfile=certificate, ssl_keyfile=key, log_level="warning")
"""
CLIENTS = """
import asyncio, sys
from environments.config import BaseEnvConfig
from environments.peers.rollout_api import RolloutApi
from grpo_trainer.config.train import RolloutConfig
from grpo_trainer.rollouts.client import RolloutClient
from tests.contract.test_rollout_client import do_nothing, registration

async def told(url):
    api = RolloutApi(BaseEnvConfig(tokenizer_name="none", rollout_server_url=url, retry_timeout=1))
    try:
        await api.register("sums")
        return (await api.info()).batch_size
    finally:
        await api.close()

asyncio.run(told(sys.argv[1]))
RolloutClient(RolloutConfig(url=sys.argv[1]), registration(batch_size=7), do_nothing).register()
print(asyncio.run(told(sys.argv[1])))
"""
"""An environment and a trainer register. Then the program prints the trainer's batch size, as the environment reads it.

Each case starts its own process, because a process reads certificates when it starts."""


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, and its key."""
    made, key = tmp_path / "api.pem", tmp_path / "api.key"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=grpo -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-out", made, "-keyout", key], check=True, capture_output=True, timeout=60)
    return made, key


def test_environment_and_trainer_reach_it(certificate: tuple[Path, Path], tmp_path: Path) -> None:
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
        command = [sys.executable, "-c", CLIENTS, url]
        clients = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        unknown = clients()
        assert unknown.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in unknown.stderr
        known = clients(env={**os.environ, "SSL_CERT_FILE": str(made)})
        assert (known.returncode, known.stdout) == (0, "7\n"), known.stderr
