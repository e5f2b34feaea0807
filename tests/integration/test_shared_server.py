"""What a real server that shares its weights does with requests while they are written; how it starts and ends.

What a trainer is promised is in `tests/shared_contract.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from grpo_trainer.alignment.probes import probe_of
from tests.integration.serving import Serving, save_tiny_model, serving
from tests.integration.streaming import MANY, TWO_BLOCKS, Stream, paused
from tests.processes import answers, free_port, running, tail, wait_for
from tests.shared_contract import TOLERANCE, Attached, SharedContract
from vllm_server.bridge_file import FOLDER
from vllm_server.protocol import BridgeDebug, BridgeInfo, InFlight, UpdateBeginRequest, UpdateEndRequest
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile, FileHandle

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder, "--shared-weights", "--bridge-config-path", str(folder / FILE_NAME)) as server:
        yield server


@pytest.fixture
def trainer(server: Serving, tmp_path: Path) -> Iterator[Attached]:
    with SharedContract([server], tmp_path).attached() as made:
        yield made
    assert server.post("/bridge/resume", b"").status_code == 200
    assert server.get("/health").status_code == 200


def version_of(server: Serving) -> int:
    return msgspec.json.decode(server.get("/bridge/info").content, type=BridgeInfo).policy_version


@contextmanager
def writing(trainer: Attached, in_flight: InFlight = "keep", torn: bool = False) -> Iterator[None]:
    """An update, in which the block may write; the next one heals a torn one."""
    (client,) = trainer.clients
    info = client.wait_until_there()
    asked = UpdateBeginRequest(boot_id=info.boot_id, in_flight=in_flight, timeout_s=60.0)
    token = client.begin_update(asked).token
    try:
        yield
    except BaseException:
        torn = True
        raise
    finally:
        client.end_update(UpdateEndRequest(token=token, version=info.policy_version + 1, torn=torn))


@torch.no_grad()
def change(trainer: Attached) -> None:
    """Write other weights: the parameters of the trainer are the server's memory."""
    for parameter in trainer.policy.model.parameters():
        if parameter.dim() == 2:
            parameter.add_(0.05 * torch.randn(parameter.shape))


def debug_of(server: Serving) -> BridgeDebug:
    return msgspec.json.decode(server.get("/bridge/debug").content, type=BridgeDebug)


# requests in flight ----------------------------------------------------------------------------------------


def test_an_answer_that_two_versions_made_says_both(server: Serving, trainer: Attached) -> None:
    began_with = version_of(server)
    asked = {"prompt": TWO_BLOCKS, "max_tokens": MANY, "ignore_eos": True}

    def in_flight() -> int:
        debug = debug_of(server)
        return debug.in_flight[debug.info.served_model_name]

    with ThreadPoolExecutor(2) as pool, paused(server):  # so that both still run when the update comes
        plain = pool.submit(server.generate, TWO_BLOCKS, max_tokens=MANY, ignore_eos=True)
        openai = pool.submit(server.post, "/v1/completions", asked)
        wait_for("two requests", lambda: in_flight() == 2, server.log, 30)
        with writing(trainer):
            change(trainer)
        assert not plain.done() and not openai.done()
    answer = plain.result()
    assert (answer.policy_version, answer.policy_version_end) == (began_with, began_with + 1)
    headers = openai.result().headers
    both = headers["x-policy-version"], headers["x-policy-version-end"]
    assert both == (str(began_with), str(began_with + 1))


def test_new_requests_wait_while_the_weights_are_written(server: Serving, trainer: Attached) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "logprobs": 0, "seed": 5}
    server.generate(TWO_BLOCKS, **asked)  # fills the cache
    with ThreadPoolExecutor(2) as pool:
        with writing(trainer):
            asking = pool.submit(server.generate, TWO_BLOCKS, **asked)
            completing = pool.submit(server.post, "/v1/completions", {"prompt": TWO_BLOCKS, "max_tokens": 3})
            change(trainer)
            for refused in ("/bridge/pause", "/bridge/resume"):
                assert server.post(refused, b"").status_code == 409
            debug = debug_of(server)
            assert (debug.updating, debug.paused, debug.fault) == (True, True, None)
            assert server.get("/health").status_code == 200
            assert not asking.done() and not completing.done()
        answer = asking.result()
    assert (answer.policy_version, answer.policy_version_end) == (version_of(server), None)
    probe = probe_of(answer)
    assert float((probe.server_logprobs - trainer.steps.logprobs(probe)).abs().max()) < TOLERANCE
    assert completing.result().headers["x-policy-version"] == str(version_of(server))


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_vllms_other_routes_wait_too_and_use_no_cache_of_older_weights(
    server: Serving, trainer: Attached, in_flight: InFlight
) -> None:
    messages = [{"role": "user", "content": 14 * "the quick brown fox "}]  # two blocks
    body = {"model": "policy", "messages": messages, "max_tokens": 8, "temperature": 0.0}

    def say() -> httpx.Response:
        return server.post("/v1/messages", body)

    say()  # fills the cache
    with ThreadPoolExecutor(1) as pool:
        with writing(trainer, in_flight):
            asking = pool.submit(say)
            change(trainer)
            assert server.get("/health").status_code == 200
            assert not asking.done()
        answer = asking.result()
    assert answer.headers["x-policy-version"] == str(version_of(server))
    assert answer.json()["content"] == say().json()["content"]


def test_a_torn_update_ends_running_requests_with_the_reason_and_refuses_others(
    server: Serving, trainer: Attached
) -> None:
    while True:
        before = version_of(server)
        with Stream(server, TWO_BLOCKS) as stream, writing(trainer, torn=True):
            pass
        if stream.errors:
            break
        with writing(trainer):  # on a busy machine the request was over before the update
            pass
    assert "torn" in stream.errors[0]
    assert [
        server.get("/health").status_code,
        server.get("/health_generate").status_code,
        server.post("/generate", {"prompt": "1", "max_tokens": 1}).status_code,
        server.post("/v1/completions", {"prompt": "1", "max_tokens": 1}).status_code,
        server.post("/bridge/resume", b"").status_code,
    ] == [503] * 5
    assert "torn" in server.get("/health").json()["error"]["got"] and version_of(server) == before
    with writing(trainer):
        assert server.get("/health").status_code == 503


def test_a_server_that_shares_its_weights_does_not_sleep(server: Serving) -> None:
    for route in ("/bridge/sleep", "/bridge/wake_up"):
        assert server.post(route, b"").status_code == 409
    assert server.get("/bridge/is_sleeping").json() == {"sleeping": False}


# start and end ---------------------------------------------------------------------------------------------


def test_a_server_told_by_the_environment_leaves_nothing_behind(tmp_path: Path) -> None:
    """Without LoRA, and with the file where it goes by default."""
    model, log, temporary = save_tiny_model(tmp_path / "model"), tmp_path / "server.log", tmp_path / "tmp"
    temporary.mkdir()
    variables = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "TMPDIR": str(temporary), "NUM_INFERENCE_NODES": "1"}
    unset = dict.fromkeys(("LOGDIR", "VLLM_BRIDGE_CONFIG_PATH"), "")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ["-m", "vllm_server", "--model", str(model), "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    with running(*command, log=log, env=variables | unset) as process:

        def ready() -> bool:
            assert process.poll() is None, tail(log)
            return answers(f"{url}/health")

        wait_for("a healthy server", ready, log, 240)
        file = temporary / FOLDER / FILE_NAME
        config = msgspec.json.decode(file.read_bytes(), type=BridgeConfigFile)
        info = msgspec.json.decode(httpx.get(f"{url}/bridge/info", trust_env=False).content, type=BridgeInfo)
        assert (config.server_url, config.server_pid, config.boot_id) == (url, process.pid, info.boot_id)
        assert (info.shared_weights, info.bridge_config_path, info.enabled) == (True, str(file), False)
        assert (config.kind, config.tp_degree, config.num_params) == ("file", 1, len(config.param_names))
        assert f"Exported {config.num_params} IPC handles for single-copy mode" in log.read_text()
        assert log.read_text().count("NUM_INFERENCE_NODES: ") == 1
        memory = next(handle.path for handle in config.ipc_handles.values() if isinstance(handle, FileHandle))
        assert Path(memory).exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, tail(log)
    wait_for("the end of the memory", lambda: not Path(memory).exists(), log, 15)
    assert not (temporary / FOLDER).exists()
    left = [path.name for path in temporary.rglob("*") if not path.is_socket()]
    assert [name for name in left if not name.startswith("vllm_dist_")] == [], "vLLM leaves sockets and its rendezvous"
