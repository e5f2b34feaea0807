"""Training in a server's own memory, with a real vLLM: on a CPU its weights lie in a file that both processes map."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.alignment.proof import Probe, probe_of, trainer_logprobs
from grpo_trainer.config.bridge import SharedVllm
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.policy import SharedWeights, build_policy
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.server_client import ServerClient
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights.shared_weights import SharedBridge
from tests.bridge_contract import PROMPT
from tests.integration.serving import Serving, serving
from tests.processes import answers, free_port, running, tail, wait_for
from tests.runs import arguments, finished, of_mode, rows, wait_for_step
from tests.unit.factories import batch, sample
from vllm_server.protocol import UpdateBeginRequest

pytestmark = pytest.mark.timeout(600)

ROLLOUTS = batch([sample([4, 5], [6, 7], 1.0), sample([4, 5], [8], 0.0)])
POISONED = batch([sample([4], [5], 1.0, logprobs=[float("nan")]), sample([4], [6], 0.0)])
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder, "--shared-weights", "--bridge-config-path", str(folder / "bridge.json")) as running_server:
        yield running_server


class Attached:
    """A trainer on the server's weights; its logprobs and the server's may differ by `tolerance` nats a token."""

    def __init__(self, server: Serving, folder: Path, tolerance: float = TOLERANCE, **options: Any) -> None:
        self.tolerance = tolerance
        port = server.url.rpartition(":")[2]
        values = {"model": str(server.model_folder), "weight_bridge_mode": "shared_vllm", "vllm_port": port}
        values |= {"seq_len": 128, "lr": 1e-2, "save_path": str(folder)}
        self.config = build(TrainConfig, values | options)
        policy = build_policy(self.config)
        assert isinstance(policy, SharedWeights) and isinstance(self.config.bridge, SharedVllm)
        self.policy = policy
        self.trainer = Trainer(policy.model, self.config)
        self.checkpoints = Checkpoints(self.config.checkpoints, policy, self.trainer.optimizer)
        self.client = ServerClient(self.config.vllm)
        self.bridge = SharedBridge(self.config.bridge, policy, self.client, 128)

    def ask(self) -> tuple[Probe, int]:
        answer = self.client.generate(PROMPT, max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True, seed=7)
        return probe_of(answer), answer.policy_version

    def assert_serves(self, version: int) -> Probe:
        """The server's logprobs are those of the weights that the trainer has now."""
        probe, answered = self.ask()
        assert answered == version
        assert float((probe.server_logprobs - trainer_logprobs(self.policy.model, probe)).abs().mean()) < self.tolerance
        return probe

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.policy.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_each_step_is_served_at_once_and_old_bits_are_the_old_policy(server: Serving, tmp_path: Path) -> None:
    made = Attached(server, tmp_path)
    first = made.bridge.connect(0)
    noise = made.bridge.prove()
    assert noise is not None and noise < TOLERANCE
    assert made.bridge.publish(first).version == first
    before, probe = made.weights(), made.assert_serves(first)
    for version in range(first + 1, first + 4):
        assert made.trainer.step(ROLLOUTS, 0, made.bridge.updating).updated
        assert made.bridge.publish(version).version == version
        assert made.assert_serves(version).server_logprobs.tolist() != probe.server_logprobs.tolist()
    with torch.no_grad(), made.bridge.updating():
        for parameter, bits in zip(made.policy.model.parameters(), before, strict=True):
            parameter.copy_(bits)
    again = made.assert_serves(first + 4)
    assert (again.tokens, again.server_logprobs.tolist()) == (probe.tokens, probe.server_logprobs.tolist())


def test_a_gradient_that_is_not_finite_touches_neither_weights_nor_version(server: Serving, tmp_path: Path) -> None:
    made = Attached(server, tmp_path)
    version = made.bridge.connect(0)
    before, probe = made.weights(), made.assert_serves(version)
    assert not made.trainer.step(POISONED, 0, made.bridge.updating).updated
    assert same(made.weights(), before)
    assert made.assert_serves(version).server_logprobs.tolist() == probe.server_logprobs.tolist()


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adafactor"])
@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
def test_every_optimizer_writes_in_place(server: Serving, tmp_path: Path, optimizer: str, in_flight: str) -> None:
    made = Attached(server, tmp_path, optimizer=optimizer, in_flight=in_flight, train_layer_indices="1")
    version = made.bridge.connect(0)
    made.trainer.step(ROLLOUTS, 0, made.bridge.updating)
    made.assert_serves(version + 1)


@pytest.mark.parametrize("died", [False, True])
def test_torn_weights_are_refused_until_a_checkpoint_is_written_over_them(
    server: Serving, tmp_path: Path, died: bool
) -> None:
    made = Attached(server, tmp_path)
    version = made.bridge.connect(0)
    made.checkpoints.save(Progress(1, version))
    probe = made.assert_serves(version)
    if died:
        boot = made.policy.source.boot_id
        made.client.begin_update(UpdateBeginRequest(boot_id=boot, timeout_s=3.0))  # and nothing more is heard of it
    else:
        with pytest.raises(ZeroDivisionError), made.bridge.updating():
            next(made.policy.model.parameters()).data.zero_()
            raise ZeroDivisionError
        assert server.get("/health").status_code == 503
    with pytest.raises(BridgeError) as refused:
        Attached(server, tmp_path).bridge.connect(0)
    assert "torn" in refused.value.got and "--resume auto" in refused.value.fix
    healed = Attached(server, tmp_path, resume="auto")
    assert healed.checkpoints.resume() == Progress(1, version)
    assert healed.bridge.connect(version) == version + 1
    again = healed.assert_serves(version + 1)
    assert again.server_logprobs.tolist() == probe.server_logprobs.tolist()
    assert server.get("/health").status_code == 200


def test_a_server_that_shares_nothing_is_told_how_to(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    port = free_port()
    words = ["--model", str(demo_model), "--port", str(port), "--kv-cache-memory-bytes", str(64 << 20)]
    with running("-m", "vllm_server", *words, log=log):
        wait_for("a healthy server", lambda: answers(f"http://127.0.0.1:{port}/health"), log, 240)
        values = {"model": str(demo_model), "weight_bridge_mode": "shared_vllm", "vllm_port": port}
        with pytest.raises(BridgeError) as refused:
            build_policy(build(TrainConfig, values))
        assert str(port) in refused.value.field and "--shared-weights" in refused.value.fix


# ---------------------------------------------------------------- whole runs


def test_an_adapter_is_trained_over_the_servers_own_base(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = arguments(demo_model, run_dir, **of_mode("lora_only", **{"training-steps": 4}))
    with running(*words, "--share-base", log=log) as process:
        assert finished(process, log, 300) == 0, tail(log)
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3, 4]
    fresh = [row for row in done if row.get("rollout/staleness_max") == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)
    said = (run_dir / "logs" / "trainer.log").read_text()
    assert "Single-copy mode active" in said and "bridge proved" in said
    assert (run_dir / "checkpoints" / "adapter_final" / "adapter_model.safetensors").exists()


def test_a_trainer_that_was_killed_attaches_anew_to_the_server_that_lived_on(demo_model: Path, tmp_path: Path) -> None:
    api, port = free_port(), free_port()
    run_dir = tmp_path / "run"
    logs = {name: tmp_path / f"{name}.log" for name in ("api", "server", "env", "train")}
    model = str(demo_model)
    served = ["--model", model, "--port", str(port), "--max-model-len", "64", "--kv-cache-memory-bytes", str(64 << 20)]
    environment = ["--env.tokenizer_name", model, "--env.rollout_server_url", f"http://127.0.0.1:{api}"]
    environment += ["--openai.base_url", f"http://127.0.0.1:{port}/v1", "--openai.model_name", model]
    environment += ["--openai.server_type", "vllm", "--openai.api_key", "x", "--env.group_size", "8"]
    words = ["-m", "grpo_trainer", "train", "--model", model, "--single-copy", "--vllm-port", str(port)]
    words += ["--atropos-url", f"http://127.0.0.1:{api}", "--save-path", str(run_dir), "--batch-size", "32"]
    words += ["--gradient-accumulation-steps", "1", "--lr", "1e-4", "--seq-len", "64", "--checkpoint-interval", "2"]
    with ExitStack() as stack:
        stack.enter_context(running("-m", "environments.api", "--port", str(api), log=logs["api"]))
        server = stack.enter_context(running("-m", "vllm_server", *served, "--shared-weights", log=logs["server"]))
        stack.enter_context(running("-m", "environments.arithmetic_server", "serve", *environment, log=logs["env"]))
        with running(*words, "--training-steps", "500", log=logs["train"]) as trainer:
            wait_for_step(run_dir, 5, trainer, logs["train"])
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.wait()
        assert server.poll() is None and answers(f"http://127.0.0.1:{port}/health")
        saved = max(int(path.name.split("_")[1]) for path in run_dir.glob("step_*"))
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        steps = str(saved + 3)
        with running(*words, "--training-steps", steps, "--resume", "auto", log=logs["train"]) as trainer:
            assert finished(trainer, logs["train"]) == 0, tail(logs["train"])
    done = rows(run_dir)
    assert [row["step"] for row in done] == list(range(1, saved + 4))
    assert done[-1]["publish/version"] > last["publish/version"], "a version is never used twice"
    said = logs["train"].read_text()
    (written,) = re.findall(r"wrote the checkpoint's weights into the server's memory, as version (\d+)", said)
    assert int(written) > last["publish/version"]
    assert said.count("bridge proved") == 2 and "WARNING grpo_trainer.alignment.drift" not in said
