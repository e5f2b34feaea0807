"""The LoRA kernels on a GPU, compared with vLLM's; and tokens grouped without waiting for the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_server.worker.lora import group, update_metadata, write
from vllm_server.worker.lora_kernels import run_expand, run_shrink

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SLOTS = 8
LAYERS = [(3584, (3584, 512, 512)), (3584, (3584,)), (3584, (18944, 18944)), (18944, (3584,))]
"""Of a 7B shape: inputs, and outputs of each merged slice."""


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("tokens", [1, 17, 256, 3000])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_both_kernels_give_what_vllms_give(layer: tuple[int, tuple[int, ...]], tokens: int, rank: int) -> None:
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    inputs, outputs = layer
    torch.manual_seed(tokens + rank)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(tokens, inputs, **bf16)
    a = [torch.randn(SLOTS, 1, rank, inputs, **bf16) / inputs**0.5 for _ in outputs]
    b = [torch.randn(SLOTS, 1, width, rank, **bf16) for width in outputs]
    slots = torch.randint(4, (tokens,), dtype=torch.int32)
    slots[torch.rand(tokens) < 0.1] = -1
    slots[0] = 5
    meta = LoRAKernelMeta.make(SLOTS, tokens, "cuda")
    write(meta, group(slots.numpy()))
    arguments = meta.meta_args(tokens, False)
    ours, vllms = (torch.zeros(len(a), tokens, rank, device="cuda") for _ in range(2))
    run_shrink(x, a, ours, arguments[0], meta.active_lora_ids, SLOTS + 1, 0.5)
    lora_shrink_op._lora_shrink(x, a, vllms, *arguments, 0.5)
    torch.testing.assert_close(ours, vllms, rtol=1e-3, atol=1e-3)
    assert ours.abs().mean() > 0.05
    before = torch.randn(tokens, sum(outputs), **bf16)
    mine, theirs = before.clone(), before.clone()
    run_expand(ours, b, mine, arguments[0], meta.active_lora_ids, SLOTS + 1, 0, True)
    lora_expand_op._lora_expand(ours, b, theirs, *arguments, 0, True)
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=5e-2)  # theirs is rounded twice
    assert (mine != before).float().mean() > 0.5
    without = (slots < 0).nonzero().flatten()
    assert torch.equal(mine[without.cuda()], before[without.cuda()])


def test_tokens_are_grouped_without_waiting_for_the_gpu() -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=True)
    held = [11, 12, 13, 14, None, None, None, None]
    ours, vllms = (PunicaWrapperGPU(512, 256, torch.device("cuda"), lora_config=config) for _ in range(2))
    steps = [tuple([11 + (i + shift) % 4 for i in range(200 + shift)]) for shift in range(4)]
    for step in steps:
        mapping = LoRAMapping(step, step, is_prefill=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            update_metadata(ours, mapping, held, SLOTS + 1, 1000)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        PunicaWrapperGPU.update_metadata(vllms, mapping, held, SLOTS + 1, 1000)
        torch.cuda.synchronize()
        for name in ("token_mapping_meta", "prompt_mapping_meta"):
            got, wanted = (getattr(wrapper, name).meta_args(len(step), True) for wrapper in (ours, vllms))
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)), name
