"""The kernels for sampled tokens' logprobs, run by Triton's interpreter, against the plain formula."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, NamedTuple

import pytest
import torch

from tests.triton_kernels import compiled_for_hopper
from vllm_server.worker import logprob_kernels
from vllm_server.worker.logprob_kernels import logprobs_and_ranks
from vllm_server.worker.speed import in_place_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [16, 4096, 4097, 40_000])
def test_logprobs_and_ranks_are_those_of_the_softmax(
    vocabulary: int, dtype: torch.dtype, interpreter: Executor
) -> None:
    torch.manual_seed(vocabulary)
    logits = (torch.randn(5, vocabulary + 3) * 4).to(dtype)[:, :vocabulary]  # rows do not follow each other
    tokens = torch.tensor([0, vocabulary - 1, vocabulary // 2, 7, 8])
    logits[3, 8:] = -torch.inf  # top-k left eight tokens: whole chunks are excluded
    logits[4, :8] = -torch.inf
    logits[2] = 30_000.0  # all tokens are equally likely, and exp(logit) is infinite
    logprobs, ranks = interpreter.submit(logprobs_and_ranks, logits, tokens).result()
    wanted = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, (logits >= logits.gather(-1, tokens[:, None])).sum(-1))
    assert ranks[2] == vocabulary and logprobs.isfinite().all()


def test_a_row_that_is_not_finite_has_no_finite_logprob(interpreter: Executor) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, 4999], logits[1] = torch.nan, -torch.inf
    logprobs, _ = interpreter.submit(logprobs_and_ranks, logits, torch.tensor([0, 1, 2])).result()
    assert logprobs.isfinite().tolist() == [False, False, True]


class Tensors(NamedTuple):
    """As vLLM's `LogprobsTensors`."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: list[int] | None = None


def test_only_logprobs_of_sampled_tokens_are_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    compute = in_place_of(lambda *args, **named: asked.append((args[1:], named)) or "vllm's", Tensors)
    logits, sampled = torch.zeros(2, 4), torch.tensor([1, 3])
    for num_logprobs, cu_num_logits, named in (
        (2, None, {}), (0, [0, 2], {}), (0, None, {"max_per_req_token_ids": 3}), (0, None, {"logits_mode": True}),
    ):  # fmt: skip
        more = {"logprob_token_ids_state": None, "expanded_idx_mapping": None, **named}
        assert compute(logits, num_logprobs, sampled, cu_num_logits, **more) == "vllm's"
        (count, _, where), passed = asked[-1]
        assert (count, where) == (num_logprobs, cu_num_logits) and more.items() <= passed.items()
    answers = torch.tensor([-1.0, -2.0]), torch.tensor([2, 1])
    monkeypatch.setattr(logprob_kernels, "logprobs_and_ranks", lambda *tensors: answers)
    compute = in_place_of(lambda *_, **__: pytest.fail("asked vLLM"), Tensors)
    own = compute(logits, 0, sampled, None, logprob_token_ids_state=None, max_per_req_token_ids=0)
    assert own.logprob_token_ids.tolist() == [[1], [3]] and own.logprobs.tolist() == [[-1.0], [-2.0]]
    assert own.selected_token_ranks.tolist() == [2, 1] and own.cu_num_generated_tokens is None


def test_the_kernels_compile_for_a_gpu() -> None:
    floats = {"logits_NV": "*fp32", "largest_NC": "*fp32", "sums_NC": "*fp32", "logprobs_N": "*fp32"}
    kinds = {**floats, "tokens_N": "*i64", "reached_NC": "*i32", "ranks_N": "*i64"}
    constants = {"BLOCK": logprob_kernels.BLOCK, "BLOCKS": logprob_kernels.BLOCKS}
    made = compiled_for_hopper(logprob_kernels.chunks, constants, kinds, {"logits_NV", "row_stride", "vocabulary"}, 8)
    assert "ld.global.v4" in made.asm["ptx"], "logits are read in whole words of 16 bytes"
    assert compiled_for_hopper(logprob_kernels.joined, {"C": 16}, kinds, set(), 1).asm["cubin"]
