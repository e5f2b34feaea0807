"""The bridge proof against a server made of the same model, with faults planted in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.proof import prove_lora
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.protocol import BridgeInfo, GenerateResponse

INFO = BridgeInfo(
    enabled=True, shared_weights=False, update_count=0, last_update_time=0.0, model_name="m", served_model_name="m",
    device="cpu", dtype="float32", boot_id="b", pid=1, policy_version=0, lora_name="policy", max_lora_rank=8,
    max_loras=4, keep_versions=4, max_model_len=512, logprobs_mode="processed_logprobs", vllm_version="0",
    lora_dtype="float32", machine="m", workers=[],
)  # fmt: skip


class FakeServer:
    """Serves adapters by name from a model of its own; `fault` says what it does wrong."""

    def __init__(self, trainer: PeftModel, fault: str = "", model: PeftModel | None = None) -> None:
        self.trainer = trainer
        self.model = (tiny_lora() if model is None else model).eval()
        self.fault = fault
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.unloaded: list[str] = []

    def load(self, name: str) -> None:
        state = {key: value.clone() for key, value in get_peft_model_state_dict(self.trainer).items()}
        if self.fault == "scaled twice":
            state = {key: value * 2 if "lora_B" in key else value for key, value in state.items()}
        if self.fault == "a module missing":
            state = {k: v * 0 if "layers.1.mlp.up_proj.lora_B" in k else v for k, v in state.items()}
        self.adapters[name] = state

    def generate(self, prompt: list[int], *, model: str, max_tokens: int, **_: Any) -> GenerateResponse:
        served = {
            "base served": None,
            "first adapter kept": next(iter(self.adapters)),
            "synthetic kept": next((name for name in self.adapters if "synthetic" in name), model),
        }.get(self.fault, model)  # fmt: skip
        zeros = {key: value * 0 for key, value in self.adapters[model].items()}
        set_peft_model_state_dict(self.model, zeros if served is None else self.adapters[served])
        tokens = list(prompt)
        logprobs = []
        for _step in range(max_tokens):
            with torch.no_grad():
                row = torch.log_softmax(self.model(input_ids=torch.tensor([tokens])).logits[0, -1], -1)
            token = int(torch.multinomial(row.exp(), 1))
            logprobs.append([{token: float(row[token])}])
            tokens.append(token)
        return GenerateResponse(
            text=[""], prompt=None, finish_reasons=["length"], policy_version=0,
            model="policy-v9" if self.fault == "wrong name" else model,
            prompt_token_ids=prompt, token_ids=[tokens[len(prompt) :]], logprobs=[logprobs],
        )  # fmt: skip

    def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)


def prove() -> tuple[PeftModel, FakeServer]:
    trainer = tiny_lora()
    fill_b(trainer)
    server = FakeServer(trainer)
    prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    return trainer, server


@pytest.mark.parametrize("fault", ["base served", "scaled twice", "a module missing"])
def test_a_fresh_adapter_which_is_still_the_base_model_hides_no_fault(fault: str) -> None:
    trainer = tiny_lora()  # B is 0: only the synthetic adapter shows anything
    server = FakeServer(trainer, fault)
    with pytest.raises(BridgeError, match="synthetic adapter"):
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    assert sorted(server.unloaded) == sorted(server.adapters)


def test_an_honest_server_passes_and_the_weights_are_as_before_bit_for_bit() -> None:
    trainer, server = prove()
    untouched = tiny_lora()
    fill_b(untouched)
    states = [get_peft_model_state_dict(model) for model in (trainer, untouched)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert trainer.training
    assert sorted(server.unloaded) == sorted(server.adapters) and len(server.adapters) == 3


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("base served", "present adapter.*answers as the base model does"),
        ("scaled twice", "present adapter.*other weights than the published ones"),
        ("a module missing", "present adapter.*other weights than the published ones"),
        ("first adapter kept", "synthetic adapter.*other weights than the published ones"),
        ("synthetic kept", "restored adapter.*did not come back"),
        ("wrong name", "answered by policy-v9"),
    ],
)
def test_each_planted_fault_is_caught(fault: str, said: str) -> None:
    trainer = tiny_lora()
    fill_b(trainer)
    server = FakeServer(trainer, fault)
    with pytest.raises(BridgeError, match=said):
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    assert sorted(server.unloaded) == sorted(server.adapters)  # a failed proof leaves nothing behind
