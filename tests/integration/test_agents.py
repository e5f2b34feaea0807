"""Agents with real clients against the real server: what is recorded is what the engine sampled; and a whole run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from environments.agent.episode import load_command, load_function
from environments.agent.front import Front
from environments.config import ServerConfig
from environments.demo_model.model import END, build_model, build_tokenizer
from environments.peers.inference import InferenceClient
from tests.integration.serving import Serving, serve
from tests.runs import trained

pytestmark = pytest.mark.timeout(500)

TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% for message in messages %}{{ message.role }}: "
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% else %}{{ message.content }}{% endif %}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ADD: Any = {"type": "function", "function": {"name": "add", "strict": True, "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
CALLS = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>' for number in (1, 2))
QUESTION: Any = [{"role": "user", "content": "add!"}]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt by heart to call a tool twice at once, and to say `3` when a tool has answered."""
    folder = tmp_path_factory.mktemp("agents") / "talker"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model: Qwen2ForCausalLM = build_model(tokenizer, 0)
    learnt = [
        ("1 tools\nuser: add!<|endoftext|>\nassistant: ", CALLS),
        (f"1 tools\nuser: add!{END}\nassistant: {CALLS}{END}\ntool: 1{END}\ntool: 2{END}\nassistant: ", "3"),
        (f"user: hello{END}\nassistant: ", "hi"),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = [(tokenizer(prompt).input_ids, tokenizer(answer + END).input_ids) for prompt, answer in learnt]
    for _ in range(400):
        losses = []
        for prompt, answer in rows:
            ids = torch.tensor([prompt + answer])
            losses.append(model(input_ids=ids, labels=ids.where(torch.arange(ids.shape[1]) >= len(prompt), -100)).loss)
        loss = torch.stack(losses).max()
        if loss < 1e-3:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise AssertionError("not learnt")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(talker: Path) -> Iterator[Serving]:
    flags = ["--max-model-len", "512", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serve(talker, talker.parent, *flags) as server:
        yield server


def assert_as_the_engine_had_them(server: Serving, front_calls: list[Any]) -> None:
    """The recorded ids and logprobs of each call are those of the server's own pass over them."""
    for call in front_calls:
        found = server.generate(call.prompt_ids + call.token_ids, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        assert found is not None
        for place, (token, logprob) in enumerate(zip(call.token_ids, call.logprobs, strict=True), len(call.prompt_ids)):
            assert abs((found[place] or {})[token] - logprob) <= 1e-3


AGENTS = '''
import json, os, sys
QUESTION, ADD = json.loads({question!r}), json.loads({add!r})
def adds(said):
    return [json.loads(call.function.arguments)["a"] for call in said.tool_calls]
async def parallel(task, client):
    messages = [*QUESTION]
    said = (await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])).choices[0].message
    assert adds(said) == [1, 2], said
    messages += [said.model_dump(exclude_none=True)]
    for call, number in zip(said.tool_calls, adds(said)):
        messages += [{{"role": "tool", "tool_call_id": call.id, "content": str(number)}}]
    async with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
        final = await stream.get_final_completion()
    return final.choices[0].message.content
def plain(task, client):
    messages = [{{"role": "user", "content": "hello"}}]
    pieces = client.chat.completions.create(model="policy", messages=messages, stream=True)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)
async def framework(task, client):
    import agents
    agents.set_tracing_disabled(True)
    @agents.function_tool
    def add(a: int) -> str:
        """Add."""
        return str(a)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = agents.Agent(name="adder", model=model, tools=[add])
    return (await agents.Runner.run(agent, "add!")).final_output
if __name__ == "__main__":
    import openai
    said = openai.OpenAI().chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{{"role": "user", "content": json.load(open(sys.argv[1]))["q"]}}])
    print(said.choices[0].message.content)
'''


@pytest.mark.parametrize(
    ("name", "answer", "calls"), [("parallel", "3", 2), ("plain", "hi", 1), ("framework", "3", 2), ("command", "hi", 1)]
)
def test_real_clients_are_recorded_as_the_engine_sampled(
    server: Serving, tmp_path: Path, name: str, answer: str, calls: int
) -> None:
    if name == "framework":
        pytest.importorskip("agents", reason="pip install openai-agents")
    file = tmp_path / "my_agents.py"
    file.write_text(AGENTS.format(question=json.dumps(QUESTION), add=json.dumps(ADD)))

    async def play() -> tuple[Any, list[Any]]:
        client = InferenceClient(ServerConfig(base_url=server.url), patience=60)
        front = Front(client.ask, sampling={"temperature": 1.0}, names=frozenset(), longest=512)
        url = await front.start()
        try:
            own, words = front.open(), "{task_file}"
            if name == "command":
                agent = load_command(f"{sys.executable} {file} {words}", url)
            else:
                agent = load_function(f"{file}:{name}", url)
            return await agent({"q": "hello"}, own), own.calls
        finally:
            await front.close()
            await client.close()

    said, recorded = asyncio.run(play())
    assert said == answer and len(recorded) == calls
    assert all(call.version == 0 for call in recorded)
    assert_as_the_engine_had_them(server, recorded)
    for before, after in pairwise(recorded):
        history = before.prompt_ids + before.token_ids
        assert after.prompt_ids[: len(history)] == history, "the call continues the one before"


TWO_TURNS = """
async def ask(client, question):
    messages = [{"role": "user", "content": question}]
    said = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    return said.choices[0].message.content or ""
async def solve(task, client):
    first = await ask(client, f"{task['a']}+{task['b']}=")
    if not first.isdecimal():
        return 0.0
    second = await ask(client, f"{int(first) % 40 + 10}+{task['c']}=")
    return float(second == str((task["a"] + task["b"]) % 40 + 10 + task["c"]))
"""


def test_a_run_trains_an_agent(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "two_turns.py").write_text(TWO_TURNS)
    tasks = [{"a": 10 + n, "b": 40 - n, "c": 10 + 2 * n} for n in range(16)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    agent = f"{tmp_path}/two_turns.py:solve"
    found = trained(demo_model, tmp_path / "run", agent=agent, data=tmp_path / "tasks.jsonl", env__group_size=4)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(row["batch/trained_tokens"] > 0 for row in found)
    assert any(row["batch/sequences"] > 32 for row in found), "an episode of two calls has two sequences"
