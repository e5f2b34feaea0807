"""The environment client of Atropos itself, unmodified, against our rollout API: it registers, paces itself by
/status-env, posts gzipped groups, and ends by itself when the run is over. (Its answers come from no model here.)"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from environments.api import wire
from tests.processes import ROOT
from tests.rollout_api import running_server

STEPS = 3
GROUP_SIZE = 4
BATCH_SIZE = 8
TOKENS = 600


def run_environment(url: str, tokenizer: str) -> None:
    """The environment's process: a subclass of the original's BaseEnv with its own main loop."""
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    class Numbers(BaseEnv):
        """Sends groups whose number is their first token."""

        number = 0

        async def setup(self) -> None: ...

        async def get_next_item(self) -> int:
            self.number += 1
            return self.number

        async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
            group: dict[str, Any] = {}
            group["tokens"] = [[item, i, *range(TOKENS - 2)] for i in range(GROUP_SIZE)]
            group["masks"] = [[-100, *row[1:]] for row in group["tokens"]]
            group["scores"] = [float(i) for i in range(GROUP_SIZE)]
            group["group_overrides"] = {}
            await asyncio.sleep(0.02)
            return group, []

        async def evaluate(self, *_: Any, **__: Any) -> None: ...

    config = BaseEnvConfig(
        group_size=GROUP_SIZE,
        tokenizer_name=tokenizer,
        rollout_server_url=url,
        use_wandb=False,
        wandb_name="numbers",
        max_token_length=1024,
        total_steps=-1,
        batch_size=-1,
        max_batches_offpolicy=2,
        include_messages=True,
    )
    nowhere = APIServerConfig(base_url="http://127.0.0.1:9/v1", api_key="x", model_name="none", health_check=False)
    environment = Numbers(config, [nowhere])
    asyncio.run(environment.env_manager())


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of a few hundred made-up words: the client wants one, and no hub is asked."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_the_original_client_delivers_and_ends_by_itself(tmp_path: Path):
    pytest.importorskip("atroposlib", reason="needs the original's client: pip install atroposlib==0.4.0")
    save_tokenizer(tmp_path / "tokenizer")
    with running_server(log=tmp_path / "api.log") as server, httpx.Client(base_url=server.url) as api:
        trainer = wire.Register(
            wandb_group="g",
            wandb_project="p",
            batch_size=BATCH_SIZE,
            max_token_len=1024,
            checkpoint_dir=str(tmp_path),
            save_checkpoint_interval=0,
            starting_step=0,
            num_steps=STEPS,
        )
        headers = {"Content-Type": wire.JSON}
        assert api.post("/register", content=wire.encode(trainer), headers=headers).status_code == 200
        command = [sys.executable, "-m", "tests.integration.test_rollout_api_atropos", server.url]
        with (tmp_path / "env.log").open("wb") as log:
            environment = subprocess.Popen(
                [*command, str(tmp_path / "tokenizer")], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        numbers: list[int] = []
        try:
            deadline = time.monotonic() + 240
            while environment.poll() is None:
                assert time.monotonic() < deadline, (tmp_path / "env.log").read_text()[-3000:]
                if len(numbers) == STEPS * BATCH_SIZE // GROUP_SIZE:  # trained to the end: it asks for no more
                    time.sleep(0.05)
                    continue
                answer = api.get("/batch?lease=600", headers={"Accept": wire.MSGPACK})
                batch = wire.decode_batch(answer.content, answer.headers["content-type"])
                if batch.batch is None:
                    time.sleep(0.05)
                    continue
                assert sum(len(group.tokens) for group in batch.batch) == BATCH_SIZE
                numbers += [group.tokens[0][0] for group in batch.batch]
                assert all(group.messages and group.env_id == 0 for group in batch.batch)
                api.post(f"/batch/{batch.batch_id}/ack")
        finally:
            environment.terminate()
            environment.wait()
        assert environment.returncode == 0, (tmp_path / "env.log").read_text()[-3000:]
        status = api.get("/status").json()
        refused = [line for line in api.get("/metrics").text.splitlines() if 'status="4' in line or 'status="5' in line]
    assert numbers == sorted(set(numbers)), "not in the order in which they came, each once"
    assert status["current_step"] == STEPS
    assert status["environments"][0]["name"] == "numbers_0"
    assert not refused


def test_the_original_client_survives_a_full_queue() -> None:
    original = pytest.importorskip("atroposlib.envs.base", reason="needs the original's client").BaseEnv
    row = list(range(8192))
    with running_server("--max-queued-mb", "1") as server, httpx.Client(base_url=server.url) as api:
        client: Any = SimpleNamespace(config=SimpleNamespace(rollout_server_url=server.url), env_id=None)
        client._post_json_with_compression = functools.partial(original._post_json_with_compression, client)

        def queued_after_sending() -> int:
            group = {"tokens": [row, row], "masks": [row, row], "scores": [0.0, 1.0]}
            asyncio.run(original._send_scored_data_to_api(client, group))
            asyncio.run(original._send_scored_data_to_api(client, [group]))
            return api.get("/status").json()["queue_size"]

        sizes = [queued_after_sending() for _ in range(6)]
        assert sizes == [2, 4, 6, 8, 8, 8]  # of 128 KiB each and a little: the eighth fills the queue
        api.post("/reset_data", headers={"Content-Type": wire.JSON})
        assert queued_after_sending() == 2


if __name__ == "__main__":
    run_environment(*sys.argv[1:])
