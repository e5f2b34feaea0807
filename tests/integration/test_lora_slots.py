"""What lies in a slot is the adapter that was put there last, and nothing of the ones before it.

Through the real server: vLLM writes the first adapter of a layout into a slot, later ones are copied there. Answers are
compared with the trainer's own forward pass, or with vLLM's own loading of the same adapter, bit for bit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.bridge_contract import PROMPT
from tests.integration.serving import (
    KEEP_VERSIONS,
    Serving,
    fill,
    forward,
    make_adapter,
    sampled,
    serving,
    shared_server,
)
from vllm_server.protocol import GenerateResponse, LoraLoadResponse

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_folders = itertools.count()

TAKEN = re.compile(r"\b2 adapter slots\b")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """As few slots as can be: each is used again and again."""
    flags = ["--lora-keep-versions", "1", "--max-loras", "2"]
    with serving(tmp_path_factory.mktemp("slots"), *flags, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as started:
        yield started


def adapter(server: Serving, seed: int, rank: int = 8, modules: tuple[str, ...] = ALL, **options: object) -> PeftModel:
    own = {"lora_alpha": 3 * rank, "target_modules": list(modules), **options}
    return make_adapter(server.model_folder, seed, rank, **own)


def save(server: Serving, model: PeftModel) -> Path:
    folder = server.adapter_root / f"slots{next(_folders)}"
    model.save_pretrained(str(folder))
    return folder


def publish(server: Serving, model: PeftModel) -> LoraLoadResponse:
    answer = server.post("/lora/load", {"adapter_path": str(save(server, model))})
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=LoraLoadResponse)


def ask(server: Serving, model: str | None = None) -> GenerateResponse:
    return server.generate(PROMPT, model=model, max_tokens=6, temperature=1.0, logprobs=0, seed=5, ignore_eos=True)


def assert_serves(server: Serving, model: PeftModel, atol: float = 1e-3) -> None:
    answer = ask(server)
    torch.testing.assert_close(sampled(answer), forward(model, PROMPT, answer.token_ids[0]), atol=atol, rtol=0)
    with model.disable_adapter():
        moved = (sampled(answer) - forward(model, PROMPT, answer.token_ids[0])).abs().max()
    assert moved > 20 * atol, "the adapter makes no difference: nothing is shown"


def test_nothing_of_a_larger_adapter_is_left_in_its_slot(server: Serving) -> None:
    """Fewer modules, fewer layers, a smaller rank, in each slot after the largest adapter there is."""
    smaller = [
        adapter(server, 2, modules=("q_proj",)),  # a third of what vLLM merges
        adapter(server, 3, modules=("down_proj", "up_proj")),  # the second half of a merged pair
        adapter(server, 4, rank=2),
        adapter(server, 5, layers_to_transform=[1]),
        adapter(server, 6, rank=1, modules=("o_proj",), layers_to_transform=[0]),
        adapter(server, 7, use_rslora=True),
    ]
    for model in smaller:
        for _slot in range(2):
            large = adapter(server, 1)
            assert publish(server, large).slot in (0, 1)
            assert_serves(server, large)
            for seed in (20, 21):  # into both slots
                publish(server, fill(model, seed))
                assert_serves(server, model)


def test_publishes_of_two_layouts_in_turn(server: Serving) -> None:
    """Also when layouts come in no order: what was recorded for a slot holds as long as it is what the slot has."""
    models = [adapter(server, 8), adapter(server, 9, rank=4, modules=("k_proj", "v_proj", "gate_proj"))]
    turns = torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    replayed = []
    for number, which in enumerate([*[0, 1] * 20, *turns]):
        replayed.append(publish(server, fill(models[which], 100 + number)).replayed)
        if number % 5 == 0 or number > 70:
            assert_serves(server, models[which])
    assert any(replayed[40:]) and not all(replayed[40:])


def test_copies_that_are_repeated_are_vllms_own_loading_bit_for_bit(server: Serving) -> None:
    for model in (
        adapter(server, 10, rank=7),
        adapter(server, 10, rank=6, use_rslora=True),
        adapter(server, 10, rank=5, modules=("q_proj", "v_proj", "up_proj")),
    ):
        answers: dict[bool, list[list[float]]] = {}
        for _ in range(4):
            answer = publish(server, model)
            answers.setdefault(answer.replayed, []).append(sampled(ask(server)).tolist())
        assert len(answers[False]) == len(answers[True]) == 2  # each of two slots: first by vLLM, then repeated
        assert all(got == answers[False][0] for got in answers[False] + answers[True])
        assert_serves(server, model)


def test_vllms_own_route_gives_the_same_and_leaves_nothing_behind(server: Serving) -> None:
    """vLLM's own adapter takes a free slot, and keeps it: the last test of this server."""
    small = adapter(server, 11, modules=("k_proj",))
    for seed in (1, 2, 3):
        publish(server, fill(small, seed))  # recorded in both slots
    large = adapter(server, 12)
    theirs = {"lora_name": "theirs", "lora_path": str(save(server, large))}
    assert server.post("/v1/load_lora_adapter", theirs).status_code == 200
    body = {"model": "theirs", "prompt": PROMPT, "max_tokens": 6, "temperature": 1.0, "logprobs": 0, "seed": 5}
    answer = server.post("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True}).json()["choices"][0]
    wanted = forward(large, PROMPT, answer["token_ids"])
    torch.testing.assert_close(torch.tensor(answer["logprobs"]["token_logprobs"]), wanted, atol=1e-3, rtol=0)

    full = server.post("/lora/load", {"adapter_path": str(save(server, small))})  # their slot and the newest version's
    assert full.status_code == 422 and TAKEN.search(full.json()["error"]["got"])
    assert_serves(server, small)
    more = {"lora_name": "more", "lora_path": str(save(server, adapter(server, 13)))}
    refused = server.post("/v1/load_lora_adapter", more)
    assert refused.status_code >= 400 and TAKEN.search(refused.text + server.log.read_text())
    assert_serves(server, small)  # what vLLM would have pushed out
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "theirs"}).status_code == 200


def test_an_adapter_of_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    """vLLM would copy what is too small into a part of its place, and serve that."""
    server = shared_server()
    model, served = server.publish()
    folder = Path(served.adapter_path)
    for part, cut, said in (
        ("q_proj.lora_A", (slice(None), slice(32)), "takes 32 inputs, this model's 64"),
        ("down_proj.lora_A", (slice(None), slice(64)), "takes 64 inputs, this model's 128"),
        ("k_proj.lora_B", (slice(16), slice(None)), "gives 16 outputs, this model's 32"),
        ("up_proj.lora_B", (slice(64), slice(None)), "gives 64 outputs, this model's 128"),
        ("o_proj.lora_B", (slice(1), slice(None)), "gives 1 outputs, this model's 64"),
    ):
        cut_folder = server.adapter_root / f"{folder.name}-{part}"
        cut_folder.mkdir()
        (cut_folder / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
        tensors = load_file(folder / "adapter_model.safetensors")
        cuts = {name: t[cut].contiguous() if part in name else t for name, t in tensors.items()}
        save_file(cuts, cut_folder / "adapter_model.safetensors")
        answer = server.post("/lora/load", {"adapter_path": str(cut_folder)})
        assert answer.status_code == 422 and said in answer.text, answer.text
    for _ in range(KEEP_VERSIONS + 2):  # slots that a refused adapter may have begun to fill
        model, _ = server.publish()
        assert_serves(server, model)


def test_adapters_of_another_dtype_are_served_in_the_servers(tmp_path: Path) -> None:
    """A float32 file on a server of 16 bits is what the same file in 16 bits is, bit for bit, copied or repeated."""
    with serving(tmp_path, "--dtype", "bfloat16", "--lora-keep-versions", "1", "--max-loras", "2") as server:
        model = adapter(server, 1)
        rounded = adapter(server, 1)
        rounded.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in rounded.state_dict().items()})
        wide, narrow = [], []
        for _ in range(4):
            answer = publish(server, model)
            wide.append((answer.replayed, sampled(ask(server)).tolist()))
        for _ in range(4):
            folder = save(server, model)
            weights = folder / "adapter_model.safetensors"
            save_file({k: v.to(torch.bfloat16) for k, v in load_file(weights).items()}, weights)
            answer = server.post("/lora/load", {"adapter_path": str(folder)})
            assert answer.status_code == 200, answer.text
            narrow.append((answer.json()["replayed"], sampled(ask(server)).tolist()))
        assert [replayed for replayed, _ in wide] == [replayed for replayed, _ in narrow] == [False, False, True, True]
        assert all(got == wide[0][1] for _, got in wide + narrow)
        answer = ask(server)
        gap = (sampled(answer) - forward(rounded, PROMPT, answer.token_ids[0])).abs().mean()
        with rounded.disable_adapter():
            moved = (sampled(answer) - forward(rounded, PROMPT, answer.token_ids[0])).abs().mean()
        assert gap < 0.1 < moved / 3
        mixed = save(server, model)
        tensors = load_file(mixed / "adapter_model.safetensors")
        first = min(tensors)
        save_file({**tensors, first: tensors[first].to(torch.float16)}, mixed / "adapter_model.safetensors")
        refused = server.post("/lora/load", {"adapter_path": str(mixed)})
        assert refused.status_code == 422 and "F16, F32" in refused.json()["error"]["got"]
