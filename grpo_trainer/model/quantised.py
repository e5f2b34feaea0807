"""Base models whose files are quantised: which ones the trainer reads, and the plain weights that they stand for.

vLLM serves files of GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) as they are. The trainer holds the same numbers
as plain matrices, so both compute the same function and an adapter means the same to them.

Shapes: I inputs, O outputs, G groups of inputs with one scale for each output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from grpo_trainer.errors import ModelError

READ: Final[Mapping[str, Mapping[str, tuple[object, ...]]]] = {
    "gptq": {
        "bits": (4, 8),
        "sym": (True,),  # vLLM reads no zero points of GPTQ
        "desc_act": (False,),  # vLLM refuses inputs in the order of their activations
        "checkpoint_format": ("gptq",),
        "lm_head": (False,),
        "dynamic": (None, {}),
    },
    "awq": {"bits": (4,), "zero_point": (True,), "version": ("gemm",), "lm_head": (False,)},
}
"""Methods whose files the trainer reads, and for their settings the values that it reads; a missing setting has the
first. Each was compared with vLLM, but for 8 bits, which it serves on GPUs only: with gptqmodel."""

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ puts eight neighbouring outputs in 32 bits, counted from the lowest."""


def quantised_by(config: Any) -> str | None:
    """Return the method by which a model's files are quantised, or None."""
    if (found := getattr(config, "quantization_config", None)) is None:
        return None
    return str(found.get("quant_method")) if isinstance(found, dict) else type(found).__name__


def is_read(config: Any) -> bool:
    """Return whether the trainer makes plain weights of a model's quantised files itself."""
    return quantised_by(config) in READ


def not_read(config: Any) -> str | None:
    """Return why files of GPTQ or AWQ can't be read, or None; other methods are transformers' matter."""
    if (method := quantised_by(config)) not in READ:
        return None
    settings: Mapping[str, Any] = {"bits": None, "group_size": None, **config.quantization_config}
    for name, values in READ[str(method)].items():
        if (got := settings.get(name, values[0])) not in values:
            wanted = " or ".join(str(value) for value in values)
            return f"its files have {name} {got} ({method}), and only {wanted} is served and trained"
    size = settings["group_size"]
    if not isinstance(size, int) or (size != -1 and size < 1):
        return f"its files have group_size {size} ({method}), which is no number of inputs"
    return None


def mark(model: nn.Module, method: str) -> None:
    """Note on a model that its weights are those of files that are quantised by a method."""
    setattr(model, _METHOD, method)


def other_files(model: nn.Module, quantization: str | None) -> tuple[str, str] | None:
    """Return how the trainer's model and the server's differ in what their files are quantised by, or None.

    Neither a bridge proof nor the drift alarm shows it reliably: files of 4 bits are as near to the weights that they
    were made of as to those in other 4 bits (0.07 and 0.10 nats a token for a model of 2.5M parameters).
    """
    method = (quantization or "").removeprefix("auto_").removesuffix("_marlin")  # vLLM's auto_gptq, awq_marlin, …
    own, served = getattr(model, _METHOD, None), method if method in READ else None
    return None if own == served else (own or PLAIN, served or PLAIN)


PLAIN: Final = "no quantised files"
_METHOD: Final = "quantised_files"


def plain_weights(paths: list[str], settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights of safetensors files of GPTQ or AWQ in main memory, each quantised matrix `[O, I]` in `dtype`.

    Raises:
        ModelError: the files hold something else than such matrices and plain tensors.
    """
    weights: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(paths):
        module, _, kind = name.rpartition(".")
        if kind in ("qweight", "qzeros", "scales", "g_idx"):
            packed.setdefault(module, {})[kind] = tensor
            if {"qweight", "qzeros", "scales"} <= packed[module].keys():  # g_idx is in order, since desc_act is false
                weights[f"{module}.weight"] = _matrix(module, packed.pop(module), settings, dtype)
        else:
            weights[name] = tensor.to(dtype)
    for module, parts in packed.items():
        if parts.keys() != {"g_idx"}:
            raise _not_such_files(module, ", ".join(sorted(parts)), "qweight, qzeros and scales")
    return weights


def _tensors(paths: list[str]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file is no mapping
                yield name, file.get_tensor(name)


def _matrix(module: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return `(code - zero) * scale` as `[O, I]`, with the scale in `dtype` as the server has it."""
    scales_GO, bits = parts["scales"].to(dtype).float(), int(settings["bits"])
    if settings["quant_method"] == "gptq":
        codes_IO = _unpacked(parts["qweight"].T, bits, range(32 // bits)).T
        zeros_GO = torch.full_like(scales_GO, 1 << (bits - 1))
    else:
        codes_IO = _unpacked(parts["qweight"], bits, AWQ_ORDER)
        zeros_GO = _unpacked(parts["qzeros"], bits, AWQ_ORDER)
    inputs, outputs = codes_IO.shape
    size = inputs if settings["group_size"] == -1 else int(settings["group_size"])
    if inputs % size or scales_GO.shape != (inputs // size, outputs) or zeros_GO.shape != scales_GO.shape:
        raise _not_such_files(module, f"scales {list(scales_GO.shape)}", f"[{inputs} / {size}, {outputs}]")
    codes_GSO = codes_IO.reshape(-1, size, outputs)
    plain_GSO = (codes_GSO - zeros_GO[:, None]) * scales_GO[:, None]
    return plain_GSO.view(inputs, outputs).T.to(dtype).contiguous()


def _unpacked(words_RW: Tensor, bits: int, order: tuple[int, ...] | range) -> Tensor:
    """Return the unsigned numbers in words of 32 bits, `[R, W * 32 / bits]`; `order[i]` is the place of number i."""
    shifts = torch.tensor([bits * place for place in order], dtype=torch.int32)
    return ((words_RW[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _not_such_files(module: str, got: str, wanted: str) -> ModelError:
    return ModelError(
        "a quantised matrix can't be read",
        field=f"--model-name: {module}",
        got=got,
        wanted=wanted,
        fix="download or save the model again",
    )
