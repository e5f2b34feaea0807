"""A real server on the CPU that shares its weights: another process (this one) writes them within a fence."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from tests.integration.serving import Serving, forward, sampled, save_tiny_model, serving
from tests.integration.streaming import MANY, TWO_BLOCKS, Stream, paused
from tests.processes import ROOT, answers, free_port, running, tail, wait_for
from vllm_server.bridge_file import FOLDER
from vllm_server.protocol import (
    BridgeDebug,
    BridgeInfo,
    GenerateRequest,
    GenerateResponse,
    InFlight,
    StateDictInfo,
    TokenPrompt,
    UpdateBeginResponse,
    UpdateEndResponse,
)
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile, FileHandle

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-4  # of a logprob in float32, between vLLM and transformers


def open_weights(path: Path) -> dict[str, Tensor]:
    """The server's parameters by vLLM's names, in this process."""
    config = msgspec.json.decode(path.read_bytes(), type=BridgeConfigFile)
    memories: dict[str, Tensor] = {}
    found = {}
    for name, handle in config.ipc_handles.items():
        assert isinstance(handle, FileHandle)
        if handle.path not in memories:
            storage = torch.UntypedStorage.from_file(handle.path, True, Path(handle.path).stat().st_size)
            memories[handle.path] = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore
        dtype = getattr(torch, handle.dtype)
        start = handle.offset // dtype.itemsize
        found[name] = torch.as_strided(memories[handle.path].view(dtype), handle.shape, handle.stride, start)
    return found


@dataclass
class Trainer:
    """Writes the weights of a server that it is attached to."""

    server: Serving
    weights: dict[str, Tensor]
    boot_id: str
    version: int
    client: httpx.Client
    original: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.original = {name: weight.clone() for name, weight in self.weights.items()}

    @property
    def info(self) -> BridgeInfo:
        return msgspec.json.decode(self.server.get("/bridge/info").content, type=BridgeInfo)

    def begin(self, in_flight: InFlight = "keep", timeout_s: float = 60.0) -> str:
        body = {"boot_id": self.boot_id, "in_flight": in_flight, "timeout_s": timeout_s}
        response = self.client.post("/bridge/update/begin", json=body)
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=UpdateBeginResponse).token

    def end(self, token: str, *, torn: bool = False) -> UpdateEndResponse:
        self.version += 1
        body = {"token": token, "version": self.version, "torn": torn}
        response = self.client.post("/bridge/update/end", json=body)
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=UpdateEndResponse)

    @contextmanager
    def fence(self, in_flight: InFlight = "keep") -> Iterator[None]:
        token = self.begin(in_flight)
        try:
            yield
        except BaseException:
            self.end(token, torn=True)  # the fixture's next update heals it
            raise
        self.end(token)

    def change(self) -> None:
        """Other weights, in all matrices: the same ones each time."""
        generator = torch.Generator().manual_seed(1)
        for name, weight in self.weights.items():
            if weight.dim() == 2 and name != "lm_head.weight":
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(self.original[name] + 0.05 * noise)

    def restore(self) -> None:
        """The old bits."""
        for name, weight in self.weights.items():
            weight.copy_(self.original[name])

    def reference(self) -> Qwen2ForCausalLM:
        """The model as transformers computes it, with the weights as they are now."""
        model = Qwen2ForCausalLM.from_pretrained(self.server.model_folder, dtype=torch.float32)
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self._part(name)[: len(parameter)])
        return model.eval()

    def _part(self, name: str) -> Tensor:
        """vLLM has q, k and v in one, and gate and up."""
        parts = {
            "q_proj": (0, 64),
            "k_proj": (64, 96),
            "v_proj": (96, 128),
            "gate_proj": (0, 128),
            "up_proj": (128, 256),
        }
        for part, (start, end) in parts.items():
            if part in name:
                fused = "gate_up_proj" if "mlp" in name else "qkv_proj"
                return self.weights[name.replace(part, fused)][start:end]
        return self.weights[name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder, "--shared-weights", "--bridge-config-path", str(folder / FILE_NAME)) as server:
        yield server


@pytest.fixture
def trainer(server: Serving) -> Iterator[Trainer]:
    """Attach for each test, and restore the weights after it."""
    info = msgspec.json.decode(server.get("/bridge/info").content, type=BridgeInfo)
    weights = open_weights(Path(info.bridge_config_path or ""))
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        client.get("/bridge/info")  # connected: an update begins at once
        trainer = Trainer(server, weights, info.boot_id, info.policy_version, client)
        yield trainer
        with trainer.fence():
            trainer.restore()
    # A test that fails while generation is paused cannot resume it if its update is torn.
    assert server.post("/bridge/resume", b"").status_code == 200
    assert server.get("/health").status_code == 200


def close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool(((ours - theirs).abs() < TOLERANCE).all())


def ask(server: Serving) -> GenerateResponse:
    """A few tokens after a prompt that fills the cache."""
    return server.generate(TWO_BLOCKS, max_tokens=6, logprobs=0, seed=5)


# writing ---------------------------------------------------------------------------------------------------


def test_what_another_process_writes_is_served_at_once_and_old_bits_bring_the_old_answers(trainer: Trainer) -> None:
    server = trainer.server
    first = ask(server)
    again = ask(server)  # out of the prefix cache
    assert close(sampled(first), forward(trainer.reference(), TWO_BLOCKS, first.token_ids[0]))
    assert close(sampled(again), sampled(first))

    before = trainer.info
    with trainer.fence():
        trainer.change()
    changed = ask(server)
    assert (changed.policy_version, changed.policy_version_end) == (trainer.version, None)
    assert close(sampled(changed), forward(trainer.reference(), TWO_BLOCKS, changed.token_ids[0]))
    same_tokens = forward(trainer.reference(), TWO_BLOCKS, first.token_ids[0])
    assert not close(sampled(first), same_tokens), "the change is large enough to be seen"
    after = trainer.info
    assert (after.policy_version, after.update_count) == (trainer.version, before.update_count + 1)
    assert after.last_update_time > before.last_update_time

    with trainer.fence():
        trainer.restore()
    restored = ask(server)
    assert (restored.token_ids, restored.logprobs) == (first.token_ids, first.logprobs)
    assert restored.policy_version == trainer.version == changed.policy_version + 1


def test_parameters_are_told_by_vllms_plain_names(trainer: Trainer, server: Serving) -> None:
    starts = {name: weight.data_ptr() for name, weight in trainer.weights.items()}
    assert len(set(starts.values())) == len(starts), "nothing is tied in this model"
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.gate_up_proj.weight"} <= set(starts)
    assert not [name for name in starts if "base_layer" in name], "plain names, although the server has LoRA"
    found = msgspec.json.decode(server.get("/bridge/state_dict_info").content, type=StateDictInfo)
    assert found.num_params == len(starts)
    assert {name: tuple(info.shape) for name, info in found.params.items()} == {
        name: tuple(weight.shape) for name, weight in trainer.weights.items()
    }
    assert {info.dtype for info in found.params.values()} == {"float32"}


# requests in flight ----------------------------------------------------------------------------------------


def test_an_answer_that_two_versions_made_says_both(trainer: Trainer) -> None:
    server, began_with = trainer.server, trainer.version
    asked = {"prompt": TWO_BLOCKS, "max_tokens": MANY, "ignore_eos": True}

    def in_flight() -> int:
        debug = msgspec.json.decode(server.get("/bridge/debug").content, type=BridgeDebug)
        return debug.in_flight[debug.info.served_model_name]

    with ThreadPoolExecutor(2) as pool, paused(server):  # so that both still run when the update comes
        plain = pool.submit(server.generate, TWO_BLOCKS, max_tokens=MANY, ignore_eos=True)
        openai = pool.submit(server.post, "/v1/completions", asked)
        wait_for("two requests", lambda: in_flight() == 2, server.log, 30)
        with trainer.fence():
            trainer.change()
        assert not plain.done() and not openai.done()
    answer = plain.result()
    assert (answer.policy_version, answer.policy_version_end) == (began_with, trainer.version)
    headers = openai.result().headers
    assert headers["x-policy-version"], headers["x-policy-version-end"] == (str(began_with), str(trainer.version))


def test_new_requests_wait_while_the_weights_are_written(trainer: Trainer) -> None:
    server = trainer.server
    with ThreadPoolExecutor(2) as pool:
        with trainer.fence():
            asking = pool.submit(ask, server)
            completing = pool.submit(server.post, "/v1/completions", {"prompt": TWO_BLOCKS, "max_tokens": 3})
            trainer.change()
            for refused in ("/bridge/pause", "/bridge/resume"):
                assert server.post(refused, b"").status_code == 409
            debug = msgspec.json.decode(server.get("/bridge/debug").content, type=BridgeDebug)
            assert (debug.updating, debug.paused, debug.fault) == (True, True, None)
            assert server.get("/health").status_code == 200
            assert not asking.done() and not completing.done()
        answer = asking.result()
    assert (answer.policy_version, answer.policy_version_end) == (trainer.version, None)
    assert close(sampled(answer), forward(trainer.reference(), TWO_BLOCKS, answer.token_ids[0]))
    assert completing.result().headers["x-policy-version"] == str(trainer.version)


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_vllms_other_routes_wait_too_and_use_no_cache_of_older_weights(trainer: Trainer, in_flight: InFlight) -> None:
    server, messages = trainer.server, [{"role": "user", "content": 14 * "the quick brown fox "}]  # two blocks
    body = {"model": "policy", "messages": messages, "max_tokens": 8, "temperature": 0.0}

    def say() -> httpx.Response:
        return server.post("/v1/messages", body)

    say()  # fills the cache
    with ThreadPoolExecutor(1) as pool:
        with trainer.fence(in_flight):
            asking = pool.submit(say)
            trainer.change()
            assert server.get("/health").status_code == 200
            assert not asking.done()
        answer = asking.result()
    assert answer.headers["x-policy-version"] == str(trainer.version)
    assert answer.json()["content"] == say().json()["content"]


def test_fifty_requests_over_thirty_updates_are_each_answered_by_a_version_that_was(trainer: Trainer) -> None:
    server, prompt = trainer.server, TWO_BLOCKS[:140]
    references = {}
    old_is_even = trainer.version % 2
    references[old_is_even] = trainer.reference()
    stop = threading.Event()

    first = trainer.version
    client = httpx.Client(base_url=server.url, timeout=120, trust_env=False, limits=httpx.Limits(max_connections=50))

    def keep_asking(seed: int) -> list[GenerateResponse]:
        given: list[GenerateResponse] = []
        sampling = {"max_tokens": 8, "logprobs": 0, "seed": seed}
        body = GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling).to_body()
        while not (stop.is_set() and given):
            response = client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            given.append(msgspec.json.decode(response.content, type=GenerateResponse))
        return given

    with client, ThreadPoolExecutor(50) as pool:
        asking = [pool.submit(keep_asking, seed) for seed in range(50)]
        for update in range(30):
            with trainer.fence("recompute" if update % 3 == 2 else "keep"):
                trainer.restore() if update % 2 else trainer.change()
            references.setdefault(trainer.version % 2, trainer.reference())
        stop.set()
        given = [answer for future in asking for answer in future.result()]
    assert len(given) >= 50
    pure = [answer for answer in given if answer.policy_version_end is None]
    assert len({answer.policy_version for answer in pure}) >= 2
    for answer in given:
        last = answer.policy_version if answer.policy_version_end is None else answer.policy_version_end
        assert first <= answer.policy_version <= last <= trainer.version
    by_transformers = cache(lambda parity, tokens: forward(references[parity], prompt, list(tokens)))
    for answer in pure:
        theirs = by_transformers(answer.policy_version % 2, tuple(answer.token_ids[0]))
        assert close(sampled(answer), theirs), answer.policy_version


# torn ------------------------------------------------------------------------------------------------------


def refusals(server: Serving) -> list[int]:
    return [
        server.get("/health").status_code,
        server.get("/health_generate").status_code,
        server.post("/generate", {"prompt": "1", "max_tokens": 1}).status_code,
        server.post("/v1/completions", {"prompt": "1", "max_tokens": 1}).status_code,
        server.post("/bridge/resume", b"").status_code,
    ]


def test_a_torn_update_refuses_generation_until_a_good_one(trainer: Trainer) -> None:
    server = trainer.server
    first = ask(server)
    while True:
        before = trainer.info.policy_version
        with Stream(server, TWO_BLOCKS) as stream:
            token = trainer.begin()
            trainer.change()
            trainer.end(token, torn=True)
        if stream.errors:
            break
        with trainer.fence():  # on a busy machine the request was over before the update
            trainer.restore()
    assert stream.errors and "torn" in stream.errors[0], "a running request gets the reason"
    assert refusals(server) == [503] * 5
    assert "torn" in server.get("/health").json()["error"]["got"]
    assert trainer.info.policy_version == before
    with trainer.fence():
        assert server.get("/health").status_code == 503
        trainer.restore()
    restored = ask(server)
    assert (restored.token_ids, restored.logprobs) == (first.token_ids, first.logprobs)


DYING_WRITER = """
import os, signal, sys
from pathlib import Path
import httpx
from tests.integration.test_shared_server import open_weights
url, path = sys.argv[1:]
info = httpx.get(url + "/bridge/info", trust_env=False).json()
weights = open_weights(Path(path))
asked = {"boot_id": info["boot_id"], "timeout_s": 1.0}
httpx.post(url + "/bridge/update/begin", json=asked, trust_env=False).raise_for_status()
weights["model.norm.weight"].zero_()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_killed_while_it_writes_is_found_out_and_another_makes_it_good(trainer: Trainer) -> None:
    server = trainer.server
    first = ask(server)
    command = [sys.executable, "-c", DYING_WRITER, server.url, trainer.info.bridge_config_path or ""]
    died = subprocess.run(command, cwd=ROOT, check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    assert trainer.weights["model.norm.weight"].abs().max() == 0
    wait_for("the fault", lambda: server.get("/health").status_code == 503, server.log, 30)
    assert "1 s" in server.get("/health").json()["error"]["got"]
    assert refusals(server) == [503] * 5
    with trainer.fence():
        trainer.restore()
    assert ask(server).logprobs == first.logprobs


def test_updates_that_cannot_be_are_refused(trainer: Trainer) -> None:
    server, boot = trainer.server, trainer.info.boot_id

    def begin(**body: object) -> httpx.Response:
        return server.post("/bridge/update/begin", {"boot_id": boot} | body)

    refused = begin(boot_id="another")
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "boot_id")
    assert begin(in_flight="drop").status_code == 422
    assert begin(timeout_s=0).status_code == 422
    assert server.post("/bridge/update/end", {"token": "x", "version": 1}).status_code == 409
    with trainer.fence():
        assert begin().status_code == 409
    for route in ("/bridge/sleep", "/bridge/wake_up"):
        assert server.post(route, b"").status_code == 409
    assert server.get("/bridge/is_sleeping").json() == {"sleeping": False}
    assert {"POST /bridge/update/begin", "POST /v1/completions", "GET /health"} <= set(
        server.get("/bridge/list_endpoints").json()["endpoints"]
    )
    with paused(server):
        with trainer.fence():
            pass
        assert server.get("/bridge/is_paused").json() == {"paused": True}, "an update leaves it as it was"


# with adapters ---------------------------------------------------------------------------------------------


def test_adapters_are_served_over_weights_that_are_shared(trainer: Trainer) -> None:
    server = trainer.server
    base = ask(server)
    adapter, published = server.publish()
    answer = ask(server)
    assert answer.policy_version == published.policy_version
    model = adapter.get_base_model()
    assert isinstance(model, Qwen2ForCausalLM)
    assert close(sampled(answer), forward(model, TWO_BLOCKS, answer.token_ids[0]))
    assert server.post("/lora/unload", {}).status_code == 200
    assert ask(server).logprobs == base.logprobs


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


def test_what_cannot_work_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    words = ["--model", str(model), "--port", str(free_port()), "--shared-weights"]
    words += ["--bridge-config-path", str(tmp_path / "b.json")]
    command = [sys.executable, "-m", "vllm_server", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    said = "--shared-weights: got a model with quantization_config (awq) in its config.json"
    assert said in done.stderr.splitlines()[-1] and "Loading" not in done.stderr
