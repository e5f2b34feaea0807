"""Triton kernels, compiled for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def compiled_for_hopper(
    kernel: Any, constants: Mapping[str, Any], kinds: Mapping[str, str], even: Collection[str], warps: int
) -> Any:
    """What Triton makes of a kernel.

    Args:
        kinds: of those arguments that are neither constants nor whole numbers of 32 bits.
        even: arguments that are multiples of 16, as a model's tensors and sizes are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if name in even},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
