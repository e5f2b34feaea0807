"""The server's worker refuses adapters that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_server.protocol.flat import encode_header, lay_out
from vllm_server.worker.packed import NotFiniteError, PackedAdapter, cast, check_finite, layout_of, scaling_of

NAMES = ("q.lora_A.weight", "q.lora_B.weight")


def packed(*values: float, dtype: str = "F32") -> PackedAdapter:
    """Two tensors of two values each."""
    layout = layout_of(encode_header(lay_out([(name, (1, 2)) for name in NAMES], dtype), {}), "")
    return PackedAdapter(layout, torch.tensor(values, dtype=layout.dtype))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(4))
def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name(dtype: str, bad: float, place: int) -> None:
    values = [0.5, -0.25, 1.0, 0.0]
    check_finite(packed(*values, dtype=dtype), 2.0)
    values[place] = bad
    with pytest.raises(NotFiniteError) as refused:
        check_finite(packed(*values, dtype=dtype), 2.0)
    assert (refused.value.field, refused.value.got) == (NAMES[place // 2], "nan" if math.isnan(bad) else "inf")


def test_what_is_finite_in_32_bits_is_judged_in_the_dtype_of_the_slots() -> None:
    large = packed(1.0, 2.0, 70_000.0, 0.0)  # float16 ends at 65,504
    for dtype in (torch.float32, torch.bfloat16):
        check_finite(cast(large, dtype), 1.0)
    with pytest.raises(NotFiniteError) as refused:
        check_finite(cast(large, torch.float16), 1.0)
    assert refused.value.field == NAMES[1]
    beyond = packed(3.4e38, 0.0, 0.0, 0.0)  # bfloat16 ends at 3.3895e38
    check_finite(beyond, 1.0)
    with pytest.raises(NotFiniteError):
        check_finite(cast(beyond, torch.bfloat16), 1.0)


@pytest.mark.parametrize(("dtype", "largest", "limit"), [("F16", 1000.0, 65.5), ("F32", 1e30, 3.4e8)])
def test_so_is_what_its_scale_makes_of_it(dtype: str, largest: float, limit: float) -> None:
    """1,000 x 65.5 is 65,500; 1e30 x 3.4e8 is 3.4e38, and float32 ends at 3.4028e38."""
    for sign in (1.0, -1.0):
        check_finite(packed(0.1, 0.1, -largest, 0.0, dtype=dtype), sign * limit)
        with pytest.raises(NotFiniteError) as refused:
            check_finite(packed(0.1, 0.1, -largest, 0.0, dtype=dtype), sign * 1.01 * limit)
        assert refused.value.field == "lora_alpha"
    for scale in (math.inf, math.nan):
        with pytest.raises(NotFiniteError):
            check_finite(packed(0.0, 0.0, 0.0, 0.0, dtype=dtype), scale)


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    config = {"r": 16, "lora_alpha": 8}
    assert scaling_of(config) == scaling_of(config | {"use_rslora": None}) == 0.5
    assert scaling_of(config | {"use_rslora": True}) == 2.0
