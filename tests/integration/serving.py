"""A real inference server on the CPU, with a tiny random model: started once per test session, shared by all.

from tests.integration.serving import Serving, shared_server

@pytest.fixture
def server() -> Serving:
    return shared_server()
"""

from __future__ import annotations

import atexit
import functools
import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.processes import GPU_SHARE, answers, free_port, running, tail, wait_for
from vllm_server.protocol import GenerateRequest, GenerateResponse, LoraLoadResponse, TokenPrompt

RANK = 8
KEEP_VERSIONS = 2
START_LIMIT_S = 240.0


def save_tiny_model(folder: Path, key_value_heads: int = 1, intermediate_size: int = 128) -> Path:
    """Two layers of Qwen2 with random weights, and a tokenizer with one token per printable character.

    Heads of 32: the CPU build has no attention kernel for smaller ones. A chat template that only joins.
    """
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(model_folder: Path, seed: int, rank: int = RANK, **options: object) -> PeftModel:
    """A LoRA adapter whose B is not zero, so that it changes what the model says; by default on all linear layers."""
    model = Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    common: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    return fill(get_peft_model(model, LoraConfig(**common | options)), seed)  # pyright: ignore[reportArgumentType]


def fill(adapter: PeftModel, seed: int) -> PeftModel:
    """Give an adapter random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter.eval()


@dataclass
class Serving:
    """A running server: where it is, what it serves, and the one process that was started."""

    url: str
    model_folder: Path
    adapter_root: Path
    log: Path
    process: subprocess.Popen[bytes]
    key: str | None = None
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def post(self, route: str, body: object, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        sent = {"content-type": "application/json", **self._authorization, **headers}
        return httpx.post(self.url + route, content=content, headers=sent, timeout=120, trust_env=False)

    def get(self, route: str, **headers: str) -> httpx.Response:
        sent = {**self._authorization, **headers}
        return httpx.get(self.url + route, headers=sent, timeout=60, trust_env=False)

    @property
    def _authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def generate(
        self,
        prompt: str | list[int],
        *,
        model: str | None = None,
        policy_version: int | None = None,
        **sampling: object,
    ) -> GenerateResponse:
        """`/generate`, which must answer 200."""
        asked = prompt if isinstance(prompt, str) else TokenPrompt(prompt)
        request = GenerateRequest(prompt=asked, model=model, policy_version=policy_version, sampling=sampling)
        response = self.post("/generate", request.to_body())
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=GenerateResponse)

    def publish(self) -> tuple[PeftModel, LoraLoadResponse]:
        """A new adapter, saved to a new folder and loaded as the next version."""
        seed = next(self._seeds)
        adapter = make_adapter(self.model_folder, seed)
        folder = self.adapter_root / f"adapter{seed}"
        adapter.save_pretrained(str(folder))
        response = self.post("/lora/load", {"adapter_path": str(folder)})
        assert response.status_code == 200, response.text
        return adapter, msgspec.json.decode(response.content, type=LoraLoadResponse)


def sampled(answer: GenerateResponse, out: int = 0) -> torch.Tensor:
    """Logprobs of a completion's tokens, as a client reads them: the first entry of a position is the sampled token."""
    assert answer.logprobs is not None
    first = [next(iter(position[0].items())) for position in answer.logprobs[out]]
    assert [token for token, _ in first] == answer.token_ids[out]
    return torch.tensor([logprob for _, logprob in first])


def forward(model: torch.nn.Module, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of the same tokens after a prompt, by a model's own forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]  # row i predicts token i + 1
    return rows[torch.arange(len(tokens)), torch.tensor(tokens)]


def assert_ends_at_one_of_many_stop_ids(server: Serving) -> None:
    """More ids than vLLM searches quickly, of which one is sampled."""
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    (tokens,) = server.generate([5, 6, 7], **sampling).token_ids
    place = next(place for place, token in enumerate(tokens) if place > 0 and token not in tokens[:place])
    unused = [token for token in range(40, 60) if token not in tokens]
    answer = server.generate([5, 6, 7], **sampling, stop_token_ids=[*unused, tokens[place]])
    assert answer.token_ids == [tokens[: place + 1]] and answer.finish_reasons == ["stop"]


@contextmanager
def serve(
    model: Path,
    folder: Path,
    *flags: str,
    key: str | None = None,
    wait: bool = True,
    port: int | None = None,
    env: dict[str, str] | None = None,
    module: str = "vllm_server",
) -> Iterator[Serving]:
    """`python -m vllm_server`, by default on a free port, whose log is in `folder`; ended with the block.

    A start that fails shows the end of the server's log.
    """
    log, port = folder / "server.log", free_port() if port is None else port
    command = ["-m", module, "--model", str(model), "--port", str(port)]
    command += ["--gpu-memory-utilization", GPU_SHARE, "--kv-cache-memory-bytes", str(64 << 20)]
    command += [*(["--api-key", key] if key else []), *flags]
    with running(*command, log=log, env=env) as process:
        server = Serving(f"http://127.0.0.1:{port}", model, folder / "adapters", log, process, key)

        def ready() -> bool:
            assert process.poll() is None, f"the server ended with status {process.poll()}\n{tail(log)}"
            return answers(f"{server.url}/health")

        if wait:
            wait_for("a healthy server", ready, log, START_LIMIT_S)
        yield server


@contextmanager
def serving(
    folder: Path,
    *flags: str,
    key_value_heads: int = 1,
    intermediate_size: int = 128,
    **options: Any,
) -> Iterator[Serving]:
    """A server of a tiny model below `folder`, with LoRA; `options` are those of `serve`."""
    model, adapters = folder / "model", folder / "adapters"
    save_tiny_model(model, key_value_heads, intermediate_size)
    adapters.mkdir(exist_ok=True)
    lora = ("--max-lora-rank", str(RANK), "--lora-root", str(adapters))
    with serve(model, folder, *lora, *flags, **options) as server:
        yield server


@functools.cache
def shared_server() -> Serving:
    """The session's one server, ended when Python exits."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-"))
    return stack.enter_context(serving(Path(folder), "--lora-keep-versions", str(KEEP_VERSIONS)))
