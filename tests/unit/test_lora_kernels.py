"""The LoRA kernels, run by Triton's interpreter, against the plain formula; the groups against vLLM's own."""

from __future__ import annotations

from concurrent.futures import Executor
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_kernels import compiled_for_hopper
from vllm_server.worker import KERNELS_VARIABLE, lora_kernels
from vllm_server.worker.lora import prepare_worker, update_metadata
from vllm_server.worker.lora_kernels import Blocks, run_expand, run_shrink

SLOTS = 5


def shrunk(middle: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    x, a, *rest = arguments
    middle = middle.clone()
    run_shrink(x, a, middle, *rest, **options)
    return middle


def expanded(y: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    middle, b, *rest = arguments
    y = y.clone()  # the caller's memory comes along, shared
    run_expand(middle, b, y, *rest, **options)
    return y


def batch(slots: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Slots of the tokens, those that occur (filled up as vLLM does), how many to look at."""
    present = sorted(set(slots))
    active = torch.tensor([*present, *[-1] * (SLOTS + 1 - len(present))], dtype=torch.int32)
    return torch.tensor(slots, dtype=torch.int32), active, len(present)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


MIXED = [0, 3, -1, 3, 1, 0, -1, 4, 4, 3, 0, 0, 1, 1, 1, 3, 0, 4, -1]  # 19 tokens: no multiple of a block


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("rank", [8, 16, 24, 128])
def test_shrink_multiplies_each_token_with_its_own_slot(rank: int, slices: int, interpreter: Executor) -> None:
    torch.manual_seed(rank + slices)
    slots, active, count = batch(MIXED)
    x, a = random(len(MIXED), 72), [random(SLOTS, 1, rank, 72) for _ in range(slices)]
    before = torch.full((slices, len(MIXED), rank), torch.nan)
    blocks = Blocks(tokens=16, outer=16, warps=4, steps=2)  # 72 inputs: three programs, the last one with half a block
    middle = interpreter.submit(shrunk, before, x, a, slots, active, count, 0.5, blocks=blocks).result()
    for part, weights in enumerate(a):
        for token, slot in enumerate(MIXED):
            wanted = 0.5 * x[token].float() @ weights[slot, 0].float().T if slot >= 0 else torch.zeros(rank)
            torch.testing.assert_close(middle[part, token], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(("rank", "widths"), [(8, [40]), (16, [48, 48]), (16, [56, 24, 24]), (96, [40, 8])])
def test_expand_adds_each_token_its_own_slots_outputs(
    rank: int, widths: list[int], add: bool, interpreter: Executor
) -> None:
    torch.manual_seed(rank + sum(widths))
    slots, active, count = batch(MIXED)
    middle = torch.randn(len(widths), len(MIXED), rank)
    b = [random(SLOTS, 1, width, rank) for width in widths]
    before = random(len(MIXED), 4 + sum(widths) + 3)  # columns of others on both sides
    blocks = Blocks(tokens=16, outer=32, warps=4)
    y = interpreter.submit(expanded, before, middle, b, slots, active, count, 4, add, blocks=blocks).result()
    wanted = before.float()
    end = 4 + sum(widths)
    for token, slot in enumerate(MIXED):
        column = 4
        for part, width in enumerate(widths):
            if slot >= 0:
                made = middle[part, token].to(torch.float16).float() @ b[part][slot, 0].float().T
                wanted[token, column : column + width] = made + (wanted[token, column : column + width] if add else 0)
            column += width
    torch.testing.assert_close(y.float(), wanted, rtol=2e-3, atol=2e-2)
    assert torch.equal(y[:, :4], before[:, :4]) and torch.equal(y[:, end:], before[:, end:])
    without = [token for token, slot in enumerate(MIXED) if slot < 0]
    assert torch.equal(y[without], before[without])


def test_what_padding_holds_is_never_used_as_a_slot(interpreter: Executor) -> None:
    """Captured graphs run on more tokens than there are: the slots of the rest are what was there before."""
    torch.manual_seed(0)
    x, a, b = random(4, 16), [random(SLOTS, 1, 16, 16)], [random(SLOTS, 1, 32, 16)]
    slots, active, _ = batch([2, 2, 2, 2])
    stale = torch.tensor([2, 2, 1_000_000, -7], dtype=torch.int32)
    results = []
    for of_tokens in (slots, stale):
        middle, y = torch.zeros(1, 4, 16), torch.zeros(4, 32, dtype=torch.float16)
        middle = interpreter.submit(shrunk, middle, x, a, of_tokens, active, SLOTS + 1, 1.0).result()
        results.append(interpreter.submit(expanded, y, middle, b, of_tokens, active, SLOTS + 1, 0, True).result())
    assert torch.equal(results[0][:2], results[1][:2]) and results[0][:2].abs().sum() > 0
    assert not results[1][2:].any()


@pytest.mark.parametrize(("tokens", "rank"), [(16, 8), (64, 16), (512, 16), (8192, 64), (256, 320)])
def test_the_kernels_compile_for_a_hopper_gpu_and_read_in_whole_lines(
    tokens: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    both = {"RANK": rank, "BLOCK_R": lora_kernels.rank_block(rank)}
    down, up = lora_kernels.shrink_blocks(tokens, 18944), lora_kernels.expand_blocks(tokens, 18944)
    of_shrink = {**both, "BLOCK_M": down.tokens, "BLOCK_K": down.outer, "STEPS": down.steps}
    of_expand = {**both, "BLOCK_M": up.tokens, "BLOCK_N": up.outer, "ADD": True}
    numbers = {"middle": "*fp32", "slots_M": "*i32", "active_slots": "*i32", "scaling": "fp32", "y": "*bf16"}
    tensors = ("x_", "a0", "a1", "a2", "b0", "b1", "b2")
    for kernel, constants, warps in (
        (lora_kernels.shrink, of_shrink, down.warps),
        (lora_kernels.expand, of_expand, up.warps),
    ):
        names = kernel.arg_names
        kinds = {name: "*bf16" for name in names if name.startswith(tensors) and name != "x_stride"}
        even = [name for name in names if name not in (*constants, "scaling", "active")]
        made = compiled_for_hopper(kernel, constants, numbers | kinds, even, warps)
        assert len(made.asm["cubin"]) > 1000 and "ld.global.v4" in made.asm["ptx"]
        assert made.metadata.shared <= 227 << 10  # bytes a program may have on Hopper


def test_the_operators_are_replaced_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.lora.ops.triton_ops.lora_expand_op  # defines the operators
    import vllm.lora.ops.triton_ops.lora_shrink_op

    calls: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(lora_kernels, "run_shrink", lambda *args: calls.append(("shrink", args)))
    monkeypatch.setattr(lora_kernels, "run_expand", lambda *args: calls.append(("expand", args)))
    monkeypatch.setattr(
        vllm.lora.ops.triton_ops.lora_shrink_op, "_lora_shrink", lambda *args: calls.append(("vllm's shrink", args))
    )
    monkeypatch.setattr(lora_kernels, "_library", None)
    lora_kernels.install()
    slots, active, count = batch([1, 1, 0])
    meta = (slots, slots, slots, slots, active, torch.tensor([False]), torch.tensor([count], dtype=torch.int32))
    nobody = (*meta[:5], torch.tensor([True]), meta[6])
    x, a, middle = random(3, 8), [random(2, 1, 8, 8)], torch.zeros(1, 3, 8)
    torch.ops.vllm.lora_shrink(x, a, middle, *meta, 2.0)
    torch.ops.vllm.lora_shrink(x, a, middle, *nobody, 2.0)
    torch.ops.vllm.lora_shrink(x, a * 4, middle, *meta, 2.0)
    y = random(3, 8)
    torch.ops.vllm.lora_expand(middle, a, y, *meta)
    torch.ops.vllm.lora_expand(middle, a, y, *meta, offset_start=4, add_inputs=True)
    assert [name for name, _ in calls] == ["shrink", "vllm's shrink", "expand", "expand"]
    assert calls[0][1][5:] == (2, 2.0) and len(calls[1][1][1]) == 4
    assert calls[2][1][5:] == (2, 0, False) and calls[3][1][5:] == (2, 4, True)


FIELDS = ("active_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "no_lora_flag_cpu", "num_active_loras_cpu")


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(st.lists(st.sampled_from([0, 31, 33, 35]), min_size=1, max_size=64), min_size=1, max_size=3),
    captured=st.booleans(),
)
def test_a_worker_groups_tokens_on_the_host_as_vllm_does_on_the_gpu(steps: list[list[int]], captured: bool) -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper import punica_gpu

    kind = punica_gpu.PunicaWrapperGPU
    config: Any = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=captured)
    held = [None, 31, 33, None, 35]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)  # imported with a GPU only
        ours, vllms = (kind(64, 8, "cpu", lora_config=config) for _ in range(2))
    for tokens in steps:  # one after the other into the same tensors, as in a server
        mapping = LoRAMapping(tuple(tokens), tuple(adapter for adapter, _ in groupby(tokens)), is_prefill=True)
        update_metadata(ours, mapping, held, SLOTS + 1, 1000)
        kind.update_metadata(vllms, mapping, held, SLOTS + 1, 1000)
        for name in ("token_mapping_meta", "prompt_mapping_meta"):
            metas = getattr(ours, name), getattr(vllms, name)
            for field in FIELDS:
                got, wanted = (getattr(meta, field) for meta in metas)
                assert torch.equal(got, wanted), (name, field)
            for field in ("token_lora_mapping", "token_indices_sorted_by_lora_ids") if any(tokens) else ():
                count = len(tokens if name == "token_mapping_meta" else mapping.prompt_mapping)
                got, wanted = (getattr(meta, field)[:count] for meta in metas)
                assert torch.equal(got, wanted), (name, field)
        assert ours.indices_len == vllms.indices_len and ours.is_prefill
        assert torch.equal(ours.token_lora_indices, vllms.token_lora_indices)


def test_a_worker_takes_up_what_the_server_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.punica_wrapper import punica_gpu

    monkeypatch.setattr(punica_gpu.PunicaWrapperGPU, "update_metadata", punica_gpu.PunicaWrapperGPU.update_metadata)
    installed: list[str] = []
    monkeypatch.setattr(lora_kernels, "install", lambda: installed.append("kernels"))
    for kind, invariant, wanted in ((None, "0", []), ("vllm", "0", []), ("grpo", "1", []), ("grpo", "0", ["kernels"])):
        monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
        if kind:
            monkeypatch.setenv(KERNELS_VARIABLE, kind)
        prepare_worker()
        assert installed == wanted
        assert punica_gpu.PunicaWrapperGPU.update_metadata is update_metadata
