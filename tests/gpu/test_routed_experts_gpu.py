"""Routing replay on a GPU, with CUDA graphs: the promise of the CPU lane, on the same models.

The last test compares the experts that vLLM itself returns (`--enable-return-routed-experts`) with ours. If it passes,
ours can go.
"""

from __future__ import annotations

import base64
import io
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from environments.peers.inference import Completion
from tests.integration.test_routed_experts import (
    LAYERS,
    PROMPTS,
    TOKENS,
    WAYS,
    at_the_trainer,
    completions_of,
    gaps,
    mixture_server,
    near_ties,
)
from vllm_server.protocol.routed_experts import RoutedShape, pack, unpack

NATIVE = ("--enable-return-routed-experts", "--enable-scale-out")
"""Flags of vLLM: return experts, and serve the route that has them in its answers."""

Served = tuple[nn.Module, str, list[Completion], Future[list[Completion]]]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(way))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model of near-ties, and its completions with our experts and with vLLM's, by two servers at the same time."""
    kind, dtype = request.param
    folders = [tmp_path_factory.mktemp(name) for name in ("ours", "native")]
    model, _ = [near_ties(kind, folder, getattr(torch, dtype)) for folder in folders]

    def ours() -> list[Completion]:
        with mixture_server(folders[0], dtype, "--return-routed-experts") as url:
            return completions_of(url, folders[0])

    def native() -> list[Completion]:
        with mixture_server(folders[1], dtype, *NATIVE) as url:
            return [each for prompt in PROMPTS for each in sampled(url, str(folders[1]), prompt)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(ours), pool.submit(native)
    return model.to("cuda"), dtype, first.result(), second


def test_replay_closes_most_of_the_gap(served: Served) -> None:
    """The kernels of both sides differ more than on a CPU: with replay the gap is smaller, and few experts change."""
    model, dtype, completions, _ = served
    group = at_the_trainer(completions)
    shape, _ = unpack(completions[0].routed_experts or b"")
    without, _ = gaps(model, dtype, group, "off")
    replayed, changed = gaps(model, dtype, group, "server")
    print(f"{dtype}: {float(without.abs().mean()):.2e} without, {float(replayed.abs().mean()):.2e} with, {changed:.2%}")
    assert changed < 0.5 * (1 - shape.top_k / shape.experts)
    assert float(replayed.abs().mean()) <= float(without.abs().mean()) / (1 if dtype == "float32" else 2)
    assert torch.isfinite(replayed).all()


def test_routed_experts_of_vllm(served: Served) -> None:
    model, dtype, completions, native = served
    ours, changed = gaps(model, dtype, at_the_trainer(completions), "server")
    theirs, theirs_changed = gaps(model, dtype, at_the_trainer(native.result()), "server")
    print(f"{dtype}: {float(ours.abs().mean()):.2e} and {changed:.2%} with ours,", end=" ")
    print(f"{float(theirs.abs().mean()):.2e} and {theirs_changed:.2%} with vLLM's own")
    assert float(theirs.abs().mean()) <= 1.25 * float(ours.abs().mean()) + 1e-6
    assert theirs_changed <= 1.25 * changed + 0.005


def sampled(url: str, model: str, prompt: list[int]) -> list[Completion]:
    """Completions of vLLM's route for tokens, with the experts that vLLM returns: all tokens' but the last one's."""
    sampling = {"n": 5, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return [completion_of(prompt, choice) for choice in answer.json()["choices"]]


def completion_of(prompt: list[int], choice: dict[str, Any]) -> Completion:
    rows_TLK = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert rows_TLK.shape == (len(prompt) + len(choice["token_ids"]) - 1, LAYERS, 2)
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    experts = pack(RoutedShape(LAYERS, 2, 8), rows_TLK.astype(np.uint8).tobytes())
    return Completion(prompt, choice["token_ids"], logprobs, "", "length", 0, routed_experts=experts)
