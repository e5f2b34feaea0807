"""Two parts of an attention as one: the plain formula, and the kernel, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest
import torch

from grpo_trainer.engine import attention_kernel
from grpo_trainer.engine.attention import merge
from tests.triton_kernels import compiled_for_hopper, interpreting

ROWS, HEADS = 37, 3


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    with interpreting() as pool:
        yield pool


def by_kernel(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, normalisers, seen, seen_normalisers = (each.clone() for each in tensors)
    attention_kernel.launch(out[2:-1], normalisers[:, 2:-1], seen, seen_normalisers)
    return out, normalisers


def parts(size: int) -> tuple[torch.Tensor, ...]:
    """Of queries over 5 keys and over 4 more; the first has three rows besides, which nobody merges."""
    torch.manual_seed(size)
    scores = torch.randn(HEADS, ROWS, 9) * 3
    values = torch.randn(HEADS, 9, size)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        out_HRD = scores[..., keys].softmax(-1) @ values[:, keys]
        return out_HRD.transpose(0, 1).contiguous().half(), scores[..., keys].logsumexp(-1)

    own, own_log = attend(slice(5))
    seen, seen_log = attend(slice(5, 9))
    around = (
        torch.nn.functional.pad(own, (0, 0, 0, 0, 2, 1), value=7.0),
        torch.nn.functional.pad(own_log, (2, 1), value=7),
    )
    return *around, seen, seen_log, *attend(slice(9))


@pytest.mark.parametrize("size", [16, 24, 64])
def test_two_parts_are_one_softmax(size: int, interpreter: Executor) -> None:
    out, logs, seen, seen_logs, wanted, wanted_logs = parts(size)
    plain, plain_logs = out.clone(), logs.clone()
    merge(plain[2:-1], plain_logs[:, 2:-1], seen, seen_logs)
    for got, got_logs in ((plain, plain_logs), interpreter.submit(by_kernel, out, logs, seen, seen_logs).result()):
        torch.testing.assert_close(got[2:-1], wanted, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got_logs[:, 2:-1], wanted_logs, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[:2], out[:2]) and torch.equal(got[-1:], out[-1:])
        assert torch.equal(got_logs[:, :2], logs[:, :2]) and torch.equal(got_logs[:, -1:], logs[:, -1:])


@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_the_kernel_compiles_for_a_hopper_gpu(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"SIZE": size, "BLOCK": 1 << (size - 1).bit_length(), "ROWS": attention_kernel.ROWS}
    kinds = {"out": "*bf16", "seen": "*bf16", "normalisers": "*fp32", "seen_normalisers": "*fp32"}
    even = ("out", "seen", "out_row", "out_head", "seen_row", "seen_head")
    made = compiled_for_hopper(attention_kernel.merge, constants, kinds, even, warps=4)
    assert len(made.asm["cubin"]) > 1000 and "ld.global.v4" in made.asm["ptx"]
