"""How the server starts, refuses to start, and ends: nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from grpo_trainer.bench.load import counter_total
from tests.integration.serving import Serving, save_tiny_model, serving
from tests.processes import ROOT, alive, family, tail, wait_for

pytestmark = pytest.mark.timeout(400)


def running_requests(server: Serving) -> int:
    return sum(version["in_flight"] for version in server.get("/lora/status").json()["versions"])


def test_the_key_is_asked_for_and_sigterm_ends_the_whole_of_it_with_requests_running(tmp_path: Path) -> None:
    with serving(tmp_path, key="secret") as server:
        assert server.get("/health", authorization="").status_code == 200
        for key in ("", "Bearer secre", "secret2"):
            assert server.get("/lora/status", authorization=key).status_code == 401
            assert server.post("/generate", {"prompt": "1"}, authorization=key).status_code == 401
        assert server.post("/generate", {"prompt": "1", "max_tokens": 1}).status_code == 200
        assert server.url in server.log.read_text()
        of_base = server.post("/v1/completions", {"prompt": "1", "max_tokens": 1, "model": "policy"})
        assert (of_base.headers["x-policy-version"], of_base.json()["model"]) == ("0", str(server.model_folder))

        server.publish()
        assert server.post("/bridge/pause", b"").status_code == 200  # so that they still run when the signal comes

        def ask_in_vain(stream: bool) -> None:
            with contextlib.suppress(httpx.HTTPError):
                server.post("/generate", {"prompt": "1", "max_tokens": 200, "stream": stream})

        waiting = [threading.Thread(target=ask_in_vain, args=(stream,)) for stream in (True, False)]
        for thread in waiting:
            thread.start()

        wait_for("both requests to run", lambda: running_requests(server) == 2, server.log, 60)
        everyone = [server.process.pid, *family(server.process.pid)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, tail(server.log)
        wait_for("all processes to end", lambda: not alive(everyone), server.log, 15)
        for thread in waiting:
            thread.join(10)
            assert not thread.is_alive()


def test_a_server_killed_while_it_starts_leaves_no_engine(tmp_path: Path) -> None:
    with serving(tmp_path, wait=False) as server:
        engine: list[int] = []

        def has_engine() -> bool:
            assert server.process.poll() is None
            engine[:] = [pid for pid, name in family(server.process.pid).items() if "EngineCore" in name]
            return bool(engine)

        wait_for("the engine's process", has_engine, server.log, 120)
        everyone = [server.process.pid, *family(server.process.pid)]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_for("all processes to end", lambda: not alive(everyone), server.log, 60)


def kill_engine(server: Serving) -> None:
    engine = next(pid for pid, name in family(server.process.pid).items() if "EngineCore" in name)
    os.kill(engine, signal.SIGKILL)


def send_malformed_output(server: Serving) -> None:
    """Send a byte that MessagePack never uses to all of the server's sockets. One receives the engine's outputs."""
    places = {each.laddr for each in psutil.Process(server.process.pid).net_connections("unix") if each.laddr}
    with zmq.Context() as context, contextlib.ExitStack() as held:
        context.linger = 0  # the other sockets accept nothing from this kind
        for place in places:
            pushing = held.enter_context(context.socket(zmq.PUSH))
            pushing.connect(f"ipc://{place}")
            pushing.send(b"\xc1", zmq.NOBLOCK)
        wait_for("the failure", lambda: "output_handler failed" in server.log.read_text(), server.log, 60)


@pytest.mark.parametrize("fail", [kill_engine, send_malformed_output])
def test_an_engine_that_fails_is_told_and_ends_the_server(tmp_path: Path, fail: Callable[[Serving], None]) -> None:
    with serving(tmp_path) as server, ThreadPoolExecutor() as threads:
        server.publish()
        assert server.post("/bridge/pause", b"").status_code == 200  # so that requests run when the engine fails
        routes = ("/generate", "/v1/completions")
        waiting = [threads.submit(server.post, route, {"prompt": "1"}) for route in routes]
        wait_for("both requests to run", lambda: running_requests(server) == 2, server.log, 60)
        fail(server)
        assert [request.result().status_code for request in waiting] == [503, 503]
        with contextlib.suppress(httpx.HTTPError):  # it may be gone already
            wait_for("bad health", lambda: server.get("/health").status_code == 503, server.log, 30)
            assert server.post("/generate", {"prompt": "1"}).status_code == 503
        assert server.process.wait(30) == 1
        assert "vllm_server: the engine" in server.log.read_text()


@pytest.mark.parametrize("killed", ["server", "worker"])
def test_a_worker_in_its_own_process_serves_and_none_outlives_another(tmp_path: Path, killed: str) -> None:
    with serving(tmp_path, "--distributed-executor-backend", "mp") as server:
        server.publish()
        answer = server.post("/generate", {"prompt": "1", "max_tokens": 40, "ignore_eos": True, "logprobs": 0}).json()
        assert [len(answer[key][0]) for key in ("token_ids", "logprobs")] == [40, 40]
        waits = counter_total(server.get("/metrics").text, "vllm:inter_token_latency_seconds_count")
        assert waits == 3, "the engine sends the first token, two blocks of 16 and the rest"
        everyone = [server.process.pid, *family(server.process.pid)]
        (worker,) = [pid for pid, name in family(server.process.pid).items() if "Worker" in name]
        starts = [Path(f"/proc/{pid}/auxv").read_bytes() for pid in (worker, psutil.Process(worker).ppid())]
        assert starts[0] == starts[1], "forked: a spawned process has got other addresses from the kernel"
        os.kill(worker if killed == "worker" else server.process.pid, signal.SIGKILL)
        assert server.process.wait(60) == (1 if killed == "worker" else -signal.SIGKILL)
        wait_for("all processes to end", lambda: not alive(everyone), server.log, 60)
        assert killed == "server" or "vllm_server: the engine" in server.log.read_text()


def test_a_length_that_the_model_has_not_ends_with_a_line_that_says_why(tmp_path: Path) -> None:
    """vLLM refuses it when it makes the engine. `tests/unit/test_server_flags.py` has what is refused before that."""
    command = [sys.executable, "-m", "vllm_server", "--model", str(save_tiny_model(tmp_path / "model")), "--port", "0"]
    command += ["--max-model-len", "100000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    refused = "vllm_server: User-specified max_model_len (100000) is greater"
    assert refused in done.stderr.splitlines()[-1]
