"""Bad adapters between good ones, under load: what is not finite is refused or ends in an error, and leaves no trace.

Every answer of a good version is compared with the trainer's own forward pass, so another version's would show as well.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save

from tests.integration.serving import RANK, Serving, make_adapter, serving, shared_server
from vllm_server.protocol import SAFETENSORS_MEDIA_TYPE, GenerateResponse, LoraStatus

pytestmark = pytest.mark.timeout(600)

PROMPTS = [[2 + (7 * i + start) % 90 for i in range(length)] for start, length in enumerate((3, 40, 130, 300))]
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "logprobs": 0, "ignore_eos": True}
KINDS = ("nan", "inf", "alpha", "overflow")
SCALE = 2  # lora_alpha / r of `make_adapter`
LARGEST = 3e38 / SCALE  # finite in float32 and bfloat16, and so is its product with the scale
ROUNDS = 10  # of each kind
CLIENTS = 2


def body_of(model: PeftModel, *, kind: str = "") -> bytes:
    """An adapter as a request's body; of a kind that must not be served if it is said."""
    tensors = {
        name.replace(".default.", "."): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    for name in [name for name in tensors if ".lora_B." in name]:
        match kind:
            case "nan" | "inf":
                tensors[name].view(-1)[-1] = float(kind)
            case "overflow":
                tensors[name].fill_(LARGEST)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 1e300 if kind == "alpha" else SCALE * RANK}
    config |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
    return save(tensors, {"adapter_config": json.dumps(config)})


@dataclass
class Trial:
    """A server, two good adapters in turn, and clients that never stop asking for the newest version.

    Attributes:
        served: which of the good adapters each version is.
        answers: status and body of each answer to the clients, with the number of its prompt.
    """

    server: Serving
    tolerance: float

    served: dict[int, int] = field(default_factory=dict)
    answers: list[tuple[int, int, bytes]] = field(default_factory=list)
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.good = [make_adapter(self.server.model_folder, seed) for seed in (1, 2)]
        self.bodies = [body_of(model) for model in self.good]
        self.bad = {kind: body_of(self.good[0], kind=kind) for kind in KINDS}
        self._known: dict[tuple[int, int, tuple[int, ...]], list[float]] = {}

    def __enter__(self) -> Trial:
        self._clients = [threading.Thread(target=self._ask_on, args=(index,)) for index in range(CLIENTS)]
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for client in self._clients:
            client.join(120)
            assert not client.is_alive()

    def _ask_on(self, index: int) -> None:
        for number in itertools.count(index):
            if self._done.is_set():
                return
            status, body = self.ask(number % len(PROMPTS))
            self.answers.append((number % len(PROMPTS), status, body))

    def ask(self, prompt: int, **routing: Any) -> tuple[int, bytes]:
        sent = {"prompt": {"prompt_token_ids": PROMPTS[prompt]}, **SAMPLING, **routing}
        answer = self.server.post("/generate", sent)
        return answer.status_code, answer.content

    def publish(self, body: bytes) -> tuple[int, Any]:
        """Status and answer."""
        answer = self.server.post("/lora/load", body, **{"content-type": SAFETENSORS_MEDIA_TYPE})
        return answer.status_code, answer.json()

    def publish_good(self) -> None:
        """The other of the two; it answers at once, and rightly."""
        which = len(self.served) % 2
        status, answer = self.publish(self.bodies[which])
        assert status == 200, answer
        self.served[answer["policy_version"]] = which
        status, body = self.ask(which)
        assert status == 200 and self.check(which, body) == answer["policy_version"]
        assert self.server.get("/health").status_code == 200

    def publish_bad(self, kind: str) -> None:
        """It is refused; or, where nobody can tell before, it is published and gives nothing but errors."""
        before = self.status()
        status, answer = self.publish(self.bad[kind])
        if kind != "overflow":
            assert status == 422 and answer["error"]["param"], answer
            after = self.status()
            assert (after.load_count, after.policy_version) == (before.load_count, before.policy_version)
            held = [{v.name: v.slot for v in each.versions if not v.draining} for each in (before, after)]
            assert held[0] == held[1]
            return
        assert status == 200, answer
        for route, sent in (("/generate", {"prompt": "12"}), ("/v1/completions", {"prompt": "1+1", "logprobs": 0})):
            refused = self.server.post(route, sent)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (503, "policy_version"), refused.text
            assert str(answer["policy_version"]) in error["got"]
        assert answer["adapter_name"] in [v.name for v in self.status().versions if v.unhealthy]
        assert self.server.get("/health").status_code == 503
        assert self.server.get("/bridge/debug").json()["fault"]

    def status(self) -> LoraStatus:
        return msgspec.json.decode(self.server.get("/lora/status").content, type=LoraStatus)

    def check(self, prompt: int, body: bytes) -> int:
        """The version of an answer, whose every logprob is what the trainer computes with that version's weights."""
        answer = msgspec.json.decode(body, type=GenerateResponse)
        assert answer.policy_version in self.served, "an answer of a version that is none of the good ones"
        assert answer.logprobs is not None
        got = [next(iter(position[0].values())) for position in answer.logprobs[0]]
        wanted = self._reference(self.served[answer.policy_version], prompt, tuple(answer.token_ids[0]))
        assert (
            all(map(math.isfinite, got)) and max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < self.tolerance
        )
        return answer.policy_version

    @torch.no_grad()
    def _reference(self, which: int, prompt: int, tokens: tuple[int, ...]) -> list[float]:
        key = (which, prompt, tokens)
        if key not in self._known:
            logits = self.good[which](torch.tensor([[*PROMPTS[prompt], *tokens]])).logits[0, len(PROMPTS[prompt]) - 1 :]
            rows = logits[: len(tokens)].float().log_softmax(-1)
            self._known[key] = rows[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        return self._known[key]

    def check_all(self) -> Counter[int]:
        """Look at what the clients got; how many answers there were of each status."""
        for prompt, status, body in self.answers:
            if status == 200:
                self.check(prompt, body)
        return Counter(status for _, status, _ in self.answers)


def test_bad_adapters_between_good_ones_under_load_leave_no_trace(tmp_path: Path) -> None:
    """Few KV blocks, which go from one request to the next at once."""
    with serving(tmp_path, "--kv-cache-memory-bytes", str(4 << 20), "--lora-keep-versions", "2") as server:
        trial = Trial(server, tolerance=1e-3)
        trial.publish_good()
        with trial:
            for kind in KINDS * ROUNDS:
                trial.publish_bad(kind)
                trial.publish_good()
        found = trial.check_all()
    assert len(trial.served) == 1 + len(KINDS) * ROUNDS
    assert set(found) == {200, 503} and found[200] > 100, found


def test_what_a_request_makes_of_its_own_logits_is_no_fault_of_the_version() -> None:
    server = shared_server()
    body = {"prompt": "1+1=", "max_tokens": 3, "logprobs": 0, "repetition_penalty": 1e-44}
    for stream in (False, True):
        answer = server.post("/generate", body | {"stream": stream})
        error = json.loads(answer.text.splitlines()[-1])["error"]
        assert (error["code"], error["param"]) == (422, "sampling")
        assert "null" not in answer.text and "NaN" not in answer.text
    assert server.get("/health").status_code == 200
    assert server.generate("1+1=", max_tokens=3, logprobs=0).logprobs
