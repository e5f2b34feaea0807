"""Sharing a worker's parameters with a trainer: handles by which another process opens the same memory.

On a GPU that is CUDA IPC of the storages as they are, captured graphs and all. On a CPU every storage is moved into one
file in memory that both map. The file has no name: it is reached through /proc by processes of the same user, and is
gone with the last of them that has it open or mapped, however they end.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm_server.protocol.bridge_config import CudaIpcHandle, FileHandle, Handle

_ALIGNMENT = 4096  # bytes: a page, more than any kernel asks for

_LORA_WRAPPER = ".base_layer."  # what vLLM's LoRA layers call the layer within


@dataclass(frozen=True)
class Shared:
    """Parameters by vLLM's names, and what opens them; `descriptor` is that of the file in memory, if there is one."""

    handles: dict[str, Handle]
    descriptor: int | None = None


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What goes to the server's process: handles by vLLM's names, `device` as torch writes it."""

    handles: dict[str, Handle]
    device: str
    torch_version: str


def plain_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's parameters by their names without LoRA, a tied one under each of its names.

    Raises:
        ValueError: two parameters have one name.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.replace(_LORA_WRAPPER, ".")
        if found.setdefault(plain, parameter) is not parameter:
            raise ValueError(f"two parameters are called {plain}: one of them is {name}")
    return found


def check_shareable(parameters: dict[str, Tensor], device: torch.device) -> None:
    """Refuse what a trainer could not write to as to the model's own weights.

    Raises:
        ValueError: names the first parameter that was packed away or quantised, or lies elsewhere.
    """
    for name, parameter in parameters.items():
        if parameter.numel() == 0:
            raise ValueError(f"{name}: got shape {[*parameter.shape]}, wanted the weight (vLLM packed it elsewhere)")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise ValueError(f"{name}: got {dtype_name(parameter)}, wanted plain 16 or 32 bit floats (it is quantised)")
        if parameter.device.type != device.type:
            raise ValueError(f"{name}: got a tensor on {parameter.device}, wanted one on {device} (it is offloaded)")


def dtype_name(tensor: Tensor) -> str:
    """Torch's name of it without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def share(parameters: dict[str, Tensor], device: torch.device) -> Shared:
    """Handles of all of them. On a CPU their `data` is moved, so nothing may hold on to where it was.

    Raises:
        ValueError: see `check_shareable`.
        RuntimeError: CUDA cannot share this memory.
    """
    check_shareable(parameters, device)
    return _share_cuda(parameters) if device.type == "cuda" else _share_file(parameters)


def _share_cuda(parameters: dict[str, Tensor]) -> Shared:
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
    return Shared(handles)


def _share_file(parameters: dict[str, Tensor]) -> Shared:
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
    handles: dict[str, Handle] = {
        name: FileHandle(
            path=path,
            offset=int(parameter.storage_offset()) * parameter.element_size(),
            shape=list(parameter.shape),
            dtype=dtype_name(parameter),
            stride=list(parameter.stride()),
        )
        for name, parameter in parameters.items()
    }
    return Shared(handles, descriptor)


def _layout(parameters: Iterable[Tensor]) -> tuple[dict[int, int], int]:
    """Where each storage goes (bytes, by its address), and the size of it all."""
    places: dict[int, int] = {}
    size = 0
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = size
            size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return places, size
