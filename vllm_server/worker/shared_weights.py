"""Share a worker's parameters with a trainer: handles by which another process opens the same memory.

On a GPU the handles are CUDA IPC of the unchanged storages, so captured graphs stay valid. On a CPU every storage moves
into one memory file that both processes map. The file has no name: processes of the same user reach it through /proc.
The kernel frees it when no process has it open or mapped.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vllm_server.protocol.bridge_config import CudaIpcHandle, FileHandle, Handle

_ALIGNMENT = 4096  # bytes: a page, more than any kernel requires

_LORA_WRAPPER = ".base_layer."  # vLLM's LoRA layers wrap the original layer under this name


def plain_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by their names without LoRA wrappers; a tied one is under each of its names.

    Raise a ValueError if two parameters have one name.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.replace(_LORA_WRAPPER, ".")
        if found.setdefault(plain, parameter) is not parameter:
            raise ValueError(f"two parameters are called {plain}: one of them is {name}")
    return found


def check_shareable(parameters: dict[str, Tensor], device: torch.device) -> None:
    """Raise a ValueError for the first parameter that no trainer can write: packed, quantised or elsewhere."""
    for name, parameter in parameters.items():
        if parameter.numel() == 0:
            raise ValueError(f"{name}: got shape {[*parameter.shape]}, wanted the weight (vLLM packed it elsewhere)")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise ValueError(f"{name}: got {dtype_name(parameter)}, wanted plain 16 or 32 bit floats (it is quantised)")
        if parameter.device.type != device.type:
            raise ValueError(f"{name}: got a tensor on {parameter.device}, wanted one on {device} (it is offloaded)")


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype by torch's name without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def share(parameters: dict[str, Tensor], device: torch.device) -> dict[str, Handle]:
    """Return handles of all parameters by vLLM's names; raise as `check_shareable`, or what CUDA raises.

    On a CPU this moves their `data`, so old references to it become invalid.
    """
    check_shareable(parameters, device)
    return _share_cuda(parameters) if device.type == "cuda" else _share_file(parameters)


def _share_cuda(parameters: dict[str, Tensor]) -> dict[str, Handle]:
    opened: dict[int, tuple[Any, ...]] = {}
    handles: dict[str, Handle] = {}
    for name, parameter in parameters.items():
        storage = parameter.untyped_storage()
        shared = opened.get(storage.data_ptr()) or storage._share_cuda_()
        opened[storage.data_ptr()] = shared
        device, handle, size, offset, counter, counter_offset, event, event_sync = shared
        handles[name] = CudaIpcHandle(
            device_index=device,
            ipc_handle_b64=b64encode(handle).decode(),
            storage_size=size,
            storage_offset=offset,
            ref_counter_handle_b64=b64encode(counter).decode(),
            ref_counter_offset=counter_offset,
            event_handle_b64=b64encode(event).decode(),
            event_sync_required=event_sync,
            shape=list(parameter.shape),
            dtype=dtype_name(parameter),
            stride=list(parameter.stride()),
            tensor_offset=int(parameter.storage_offset()),
        )
    return handles


def _share_file(parameters: dict[str, Tensor]) -> dict[str, Handle]:
    places, size = _layout(parameters.values())
    descriptor = os.memfd_create("grpo_shared_weights")
    os.truncate(descriptor, size)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    memory = torch.UntypedStorage.from_file(path, True, size)
    bytes_B = torch.empty(0, dtype=torch.uint8).set_(memory)  # pyright: ignore[reportArgumentType, reportCallIssue]
    for parameter in {id(p): p for p in parameters.values()}.values():
        start = places[parameter.untyped_storage().data_ptr()] // parameter.element_size() + parameter.storage_offset()
        there = torch.as_strided(bytes_B.view(parameter.dtype), parameter.shape, parameter.stride(), start)
        there.copy_(parameter.data)
        parameter.data = there
    return {
        name: FileHandle(
            path=path,
            offset=int(parameter.storage_offset()) * parameter.element_size(),
            shape=list(parameter.shape),
            dtype=dtype_name(parameter),
            stride=list(parameter.stride()),
        )
        for name, parameter in parameters.items()
    }


def _layout(parameters: Iterable[Tensor]) -> tuple[dict[int, int], int]:
    """Return each storage's place (in bytes, by its address) and the total size."""
    places: dict[int, int] = {}
    size = 0
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = size
            size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return places, size


# ----------------------------------------------------------------------------------------------------------------------
# Checksums of weights, for both sides: equal bits at equal places have equal sums. Needs torch.


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 8191
"""A prime: an element's bits are multiplied by 1 to 8191, depending on its place, so that an exchange shows."""

_PIECE = 16 << 20
"""Elements at a time: they take 8 bytes each meanwhile."""


def checksum(tensor: Tensor, first: int = 0) -> int:
    """Return the sum of the elements' bits, each multiplied by a number that its place determines, modulo 2^64.

    Sums of parts add up to the sum of the whole, if `first` says at which flat place a part begins. Zeros add nothing.
    """
    bits_E = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    sums = []
    for start in range(0, len(bits_E), _PIECE):
        piece_E = bits_E[start : start + _PIECE].to(torch.int64)
        places_E = torch.arange(first + start, first + start + len(piece_E), device=piece_E.device) % _WEIGHTS + 1
        sums.append(int((piece_E * places_E).sum()))
    return added(sums)


def added(sums: list[int]) -> int:
    """Return the checksum of a whole from those of its parts."""
    total = sum(sums) % 2**64
    return total - 2**64 if total >= 2**63 else total
