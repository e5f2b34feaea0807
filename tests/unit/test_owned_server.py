"""The trainer's own server, played by small scripts: ready, dead at the start, never ready, deaf to SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import PortBusyError, ProcessFailedError, StoppedError
from grpo_trainer.launch.owned_server import OwnedServer, owned_servers
from grpo_trainer.launch.plan import ProcessSpec
from tests.processes import ROOT, alive, free_port, wait_for

SERVER = """
import http.server, signal, subprocess, sys
model, port = sys.argv[1], int(sys.argv[2])
print("serving", model, flush=True)
if "engine" in model:
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("engine", engine.pid, flush=True)
if "deaf" in model:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(401 if "locked" in model and self.headers["Authorization"] != "Bearer secret" else 200)
        self.end_headers()
        self.wfile.write(model.encode())
    def log_message(self, *arguments): pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
CAUSE = "ValueError: no such model"
DIES = f"import sys; print({CAUSE!r}, file=sys.stderr); print('giving up'); sys.exit(3)"
SLEEPS = "import time; print('loading', flush=True); time.sleep(600)"


def server(
    tmp_path: Path, script: str = SERVER, *, timeout: float = 60.0, key: str | None = None, **options: object
) -> OwnedServer:
    port = free_port()

    def launch(model: str, version: int) -> ProcessSpec:
        return ProcessSpec(
            name="server",
            argv=(sys.executable, "-c", script, f"{model}-v{version}", str(port)),
            ready_url=f"http://127.0.0.1:{port}/health",
            ready_key=key,
            ready_timeout=timeout,
            stop_seconds=0.5,
        )

    return OwnedServer(launch, tmp_path / "logs" / "server.log", tmp_path / "served", **options)  # type: ignore[arg-type]


@pytest.fixture
def engines() -> Iterator[list[int]]:
    """Pids to be ended if a test fails to."""
    pids: list[int] = []
    yield pids
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)


def engine_of(owned: OwnedServer) -> int:
    wait_for("the engine", lambda: "engine " in owned.log_path.read_text(), owned.log_path, 30)
    return int(owned.log_path.read_text().rpartition("engine ")[2].split()[0])


def test_it_serves_what_it_was_started_on_and_then_what_it_was_started_on_anew(tmp_path: Path) -> None:
    with server(tmp_path) as owned:
        pids = []
        for version in (0, 2):
            owned.stop()
            owned.start("model", version)
            owned.wait_ready()
            assert owned.pid is not None
            pids.append(owned.pid)
            line = f"serving model-v{version}"
            wait_for(
                line, lambda line=line: line in owned.log_path.read_text(), owned.log_path, 30
            )  # a thread writes the log
        assert not alive(pids[:1]) and alive(pids[1:])
        assert "serving model-v0" in owned.log_path.read_text(), "the log of the launch before is gone"
    assert not alive(pids)


def test_every_model_folder_is_served_by_one_path(tmp_path: Path) -> None:
    with server(tmp_path) as owned:
        for version, name in enumerate(("a", "b")):
            (tmp_path / name).mkdir()
            assert owned.start(str(tmp_path / name), version) == str(tmp_path / "served")
            assert (tmp_path / "served").resolve() == tmp_path / name
            owned.stop()
        assert owned.start("a-hub/name", 2) == "a-hub/name"
    assert not (tmp_path / "served").is_symlink()


@pytest.mark.parametrize(
    ("script", "timeout", "model", "got", "helps"),
    [
        (DIES, 60, "model", "exit code 3", ("logs/server.log", CAUSE, "giving up")),
        (SLEEPS, 0.5, "model", "/health", ("0 s", "--server.startup-timeout")),
        (SERVER, 3600, "locked", "401", ()),  # it refuses the key
    ],
)
def test_owned_server_that_is_not_ready_is_named_and_ended(
    tmp_path: Path, script: str, timeout: float, model: str, got: str, helps: tuple[str, ...]
) -> None:
    with server(tmp_path, script, timeout=timeout) as owned:
        owned.start(model, 0)
        pid = owned.pid
        with pytest.raises(ProcessFailedError) as error:
            owned.wait_ready()
    assert error.value.field == "server" and got in error.value.got
    assert all(each in str(error.value) for each in helps)
    assert pid is not None and not alive([pid])


def test_owned_server_readiness_has_the_key(tmp_path: Path) -> None:
    with server(tmp_path, key="secret") as owned:
        owned.start("locked", 0)
        owned.wait_ready()


def test_one_that_dies_later_is_noticed_by_whoever_asks(tmp_path: Path) -> None:
    with server(tmp_path) as owned:
        owned.start("model", 0)
        owned.wait_ready()
        owned.check()
        pid = owned.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for("its end", lambda: not alive([pid]), owned.log_path, 10)
        with pytest.raises(ProcessFailedError) as error:
            owned.check()
    assert error.value.field == "server" and "SIGKILL" in error.value.got


@pytest.mark.parametrize("kind", ["engine", "deaf-engine"])
def test_stopping_ends_the_whole_family_even_of_one_that_is_deaf(tmp_path: Path, engines: list[int], kind: str) -> None:
    with server(tmp_path) as owned:
        owned.start(kind, 0)
        owned.wait_ready()
        engines.append(engine_of(owned))
        pid = owned.pid
        owned.stop()
        assert pid is not None and not alive([pid, *engines])
        assert owned.pid is None
        owned.check()  # nothing runs: nothing is wrong


def test_a_signal_to_the_trainer_ends_the_wait(tmp_path: Path) -> None:
    def stopped() -> None:
        raise StoppedError(signal.SIGINT)

    with server(tmp_path, SLEEPS, check_stop=stopped) as owned, pytest.raises(StoppedError):
        owned.start("model", 0)
        owned.wait_ready()


def test_it_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    port = free_port()
    trainer = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from grpo_trainer.launch.owned_server import OwnedServer
        from grpo_trainer.launch.plan import ProcessSpec
        spec = ProcessSpec("server", (sys.executable, "-c", {SERVER!r}, "m", "{port}"), ready_url="http://127.0.0.1:{port}/")
        owned = OwnedServer(lambda model, version: spec, Path({str(tmp_path)!r}) / "log", Path("none"))
        owned.start("m", 0)
        owned.wait_ready()
        print(owned.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline())]
        assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text == "m"
        process.kill()
    wait_for("its end", lambda: not alive(pids), tmp_path / "log", 10)


def test_a_busy_port_is_refused(tmp_path: Path, busy_port: int) -> None:
    config = build(TrainConfig, {"model": "m", "vllm_port": busy_port, "save_path": str(tmp_path)})
    with pytest.raises(PortBusyError) as error:
        owned_servers(config, on_gpu=False, check_stop=lambda: None)
    assert error.value.field == "--server.port"
