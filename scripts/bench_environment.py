#!/usr/bin/env python
"""What an environment costs: CPU a group while it serves a trainer, and `process` with one turn, two turns and a tool.

python scripts/bench_environment.py [MODEL]             with a stand-in server, a separate process that answers at once
python scripts/bench_environment.py MODEL --server URL  a real one, for the `process` runs

MODEL is a folder with a tokenizer (default: the demo model's is made). Prints one JSON line.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from environments.arithmetic_server import ArithmeticConfig, ArithmeticEnv
from environments.base import BaseEnv
from environments.config import ServerConfig
from environments.conversation import Conversation
from environments.demo_model.model import build_tokenizer
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.rollout_api import RolloutApi
from environments.peers.roster import servers
from environments.running import cli
from environments.running.runner import serve
from environments.tokenizers import load_tokenizer
from environments.trajectory import Message
from grpo_trainer.bench.api import own_server
from grpo_trainer.launch.ports import claim_ports

GROUP = 8
GROUPS = 32  # 256 conversations
BATCH_GROUPS = 64
STEPS = 20
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SERVER = """
import sys, msgspec, uvicorn
async def app(scope, receive, send):
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    asked = msgspec.json.decode(body)
    n, prompt = asked["n"], asked["prompt"]["prompt_token_ids"]
    rows = [[20 + i % 2] + [21] * (int(sys.argv[2]) - 2) + [1] for i in range(n)]
    answer = {"text": [""] * n, "prompt": None, "finish_reasons": ["stop"] * n, "policy_version": 0, "model": "m",
              "prompt_token_ids": prompt, "token_ids": rows, "logprobs": [[[{t: -1.0}] for t in row] for row in rows]}
    out = msgspec.json.encode(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(out))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": out})
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", lifespan="off")
"""
TRAINER = """
import sys, time, httpx
url, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with httpx.Client(base_url=url, timeout=60, headers={"Accept": "application/msgpack"}) as http:
    fields = {"wandb_group": "", "wandb_project": "", "batch_size": batch, "checkpoint_dir": "",
              "max_token_len": 64 + int(sys.argv[4]),
              "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": steps}
    http.post("/register", json=fields).raise_for_status()
    done = 0
    while done < steps:
        answer = http.get("/batch?lease=60", headers={"Accept": "application/json"}).json()
        if answer["batch"]:
            http.post(f"/batch/{answer['batch_id']}/ack").raise_for_status()
            done += 1
        else:
            time.sleep(0.01)
"""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


class Talk(MultiTurnEnv[int]):
    """Conversations of two turns, in which the policy may have called a tool."""

    name = "talk"
    tool = False

    async def get_next_item(self) -> int:
        return 5

    def opening(self, item: int) -> list[Message]:
        return [{"role": "user", "content": "2+3="}]

    def tools(self) -> list[Any]:
        return [add] if self.tool else []

    async def respond(self, item: int, talk: Conversation) -> list[Message] | None:
        if talk.turns == 2:
            return None
        return await self.call_tools(CALL) if self.tool else [{"role": "user", "content": "again"}]

    async def score_conversation(self, item: int, talk: Conversation) -> float:
        return float("5" in talk.messages[-1]["content"])

    async def evaluate(self) -> dict[str, float]:
        return {}


class ToolTalk(Talk):
    tool = True


async def process_run(env: BaseEnv[Any, Any]) -> dict[str, float]:
    """Seconds and CPU seconds of `process`."""
    began, cpu = time.perf_counter(), time.process_time()
    try:
        await cli.process(env, GROUPS)
    finally:
        await env.server.close()
        await env.close()
    return {"s": round(time.perf_counter() - began, 3), "cpu_s": round(time.process_time() - cpu, 3)}


async def serve_run(env: BaseEnv[Any, Any]) -> dict[str, float]:
    """Seconds and CPU milliseconds a group of `serve`, from its first question to its leave."""
    api = RolloutApi(env.config)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        await serve(env, api, asyncio.Event())
    finally:
        await api.close()
        await env.server.close()
    groups = BATCH_GROUPS * STEPS
    seconds = time.perf_counter() - began
    return {"s": round(seconds, 3), "cpu_ms_a_group": round(1e3 * (time.process_time() - cpu) / groups, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--server")
    parser.add_argument("--only", default="")
    parser.add_argument("--tokens", type=int, default=3, help="of each completion of the stand-in server")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model) if options.model else build_tokenizer()
    port = claim_ports({"server": 0})["server"]
    quick = subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(options.tokens)])
    time.sleep(2)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, own_server(None) as api:
        own = f"http://127.0.0.1:{port}"

        def server(url: str) -> Any:
            return servers(ServerConfig(server_type="vllm", base_url=url), patience=30.0)

        def config(kind: type[Any], name: str, **more: Any) -> Any:
            file = Path(folder) / f"{name}.jsonl" if name else None
            given = {"tokenizer_name": "m", "group_size": GROUP, "data_path_to_save_groups": file}
            return kind(**(given | more))

        for name, env_cls, kind in (
            ("one_turn", ArithmeticEnv, ArithmeticConfig),
            ("two_turns", Talk, MultiTurnConfig),
            ("tool", ToolTalk, MultiTurnConfig),
        ):
            if options.only in ("", name):
                more = {} if name == "one_turn" else {"max_tokens_per_turn": 4}
                env = env_cls(config(kind, name, **more), server(options.server or own), tokenizer)
                found[name] = asyncio.run(process_run(env))
        if options.only in ("", "serve"):
            words = (api, str(GROUP * BATCH_GROUPS), str(STEPS), str(options.tokens))
            trainer = subprocess.Popen([sys.executable, "-c", TRAINER, *words])
            env = ArithmeticEnv(
                config(ArithmeticConfig, "", rollout_server_url=api, total_steps=STEPS, max_token_length=4096),
                server(own),
                tokenizer,
            )
            found["serve"] = asyncio.run(serve_run(env))
            trainer.wait()
    quick.terminate()
    quick.wait()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
