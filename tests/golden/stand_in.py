"""A server's end of shared weights without a server: a file that holds a model as vLLM lays it out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.golden.models import golden, random_model
from vllm_server.protocol import machine_id
from vllm_server.protocol.bridge_config import (
    FILE_NAME,
    SCHEMA_VERSION,
    BridgeConfigFile,
    CudaIpcHandle,
    FileHandle,
    Handle,
    ParamMapping,
)


@dataclass(frozen=True)
class StandIn:
    """What a server would have made of `model`, which is saved in `folder`."""

    folder: Path
    model: PreTrainedModel
    config: BridgeConfigFile


def stand_in(architecture: str, folder: Path, dtype: torch.dtype = torch.float32) -> StandIn:
    """Lay a random model out by the golden file; padding is NaN, so that nobody reads it unnoticed."""
    record = golden(architecture)
    model = random_model(architecture)
    for parameter in model.parameters():  # and no buffers: rotary frequencies stay in 32 bits
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    tensors = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in record.vllm.items()}
    tensors |= {name: tensors[first] for name, first in record.ties.items()}
    for name, parameter in model.named_parameters():
        for place, start in record.found[name]:
            tensors[place][start : start + len(parameter)] = parameter.detach()
    return StandIn(folder, model, bridge_config(str(folder), write_tensors(folder / "memory", tensors)))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Handle]:
    """The tensors one after another in a file; the same tensor under two names once."""
    handles: dict[str, Handle] = {}
    offsets: dict[int, int] = {}
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            if id(tensor) not in offsets:
                file.seek(-file.tell() % 64, os.SEEK_CUR)
                offsets[id(tensor)] = file.tell()
                file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            handles[name] = FileHandle(
                path=str(path),
                offset=offsets[id(tensor)],
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                stride=list(tensor.stride()),
            )
    return handles


def bridge_config(model: str, handles: Mapping[str, Any], gpu_uuid: str = "", **changed: Any) -> BridgeConfigFile:
    """The file of a server that is this process."""
    fields: dict[str, Any] = {
        "model": model,
        "tp_degree": 1,
        "dp_shard_degree": 1,
        "param_names": list(handles),
        "param_mappings": {
            name: ParamMapping(vllm_name=name, shape=handle.shape, dtype=handle.dtype, device="cpu")
            for name, handle in handles.items()
        },
        "ipc_handles": dict(handles),
        "shared_weights_enabled": True,
        "single_copy_enabled": True,
        "num_params": len(handles),
        "schema_version": SCHEMA_VERSION,
        "kind": "cuda_ipc" if any(isinstance(handle, CudaIpcHandle) for handle in handles.values()) else "file",
        "server_url": "http://127.0.0.1:9001",
        "server_pid": os.getpid(),
        "boot_id": "this one",
        "machine": machine_id(),
        "gpu_uuid": gpu_uuid,
        "vllm_version": "0",
        "torch_version": str(torch.__version__),
    }
    return BridgeConfigFile(**fields | changed)


def write_config(folder: Path, config: BridgeConfigFile) -> Path:
    """As a server writes it."""
    path = folder / FILE_NAME
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(config))
    return path
