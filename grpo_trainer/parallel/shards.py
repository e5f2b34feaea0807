"""A model whose weights are sharded over the trainer's processes: no process ever holds the whole model.

The model is built without weights and sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`), layer by layer, with
everything outside the layers as one more unit. Only then does it get memory, for this process's shard alone. The shard
is read from the model's files, or drawn at random.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.recompute import known_layers
from grpo_trainer.errors import ConfigError, warn_once
from grpo_trainer.model.export import own_rows, stored_tensors
from grpo_trainer.model.text_part import load_causal_lm, published, weight_files
from grpo_trainer.parallel.world import World

log = logging.getLogger(__name__)


def is_sharded(world: World, config: TrainConfig) -> bool:
    """Return whether to shard the weights over the processes: it is asked for, and they can be sharded."""
    if world.alone or not config.wants_parts:
        return False
    if why := config.why_whole:
        warn_once(log, "weights, gradients and optimizer states are whole on each GPU: --sharding full %s", why)
        return False
    return True


def shard_model(model: PreTrainedModel, world: World, device: torch.device, dtype: torch.dtype) -> None:
    """Shard a model without weights. Choose the trained parameters before.

    fp32 weights are gathered in `dtype`, that of the forward pass, and gradients are summed in fp32.

    Raises:
        ConfigError: the model's layers are not known.
    """
    layers = known_layers(model.base_model)
    if layers is None:
        raise ConfigError(
            f"the layers of {type(model).__name__} are not known",
            field="--sharding",
            got="full",
            fix="use --sharding none",
        )
    mesh = init_device_mesh(device.type, (world.size,))
    computes = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=computes)


@contextmanager
def with_rest(model: FSDPModule) -> Iterator[None]:
    """Gather the weights outside the layers within the block, so that parts of the model can be called alone."""
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


# ---------------------------------------------------------------- memory, and its contents


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters and buffers on `meta`; of a sharded parameter, for this process's shard only."""
    made: dict[int, Tensor] = {}  # tied tensors share one allocation
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _with_memory(tensor, device)
                    tensors[leaf] = made[id(tensor)]  # pyright: ignore[reportArgumentType]


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    data = tensor.data
    if isinstance(data, DTensor):
        own = torch.empty_like(data.to_local(), device=device)
        new: Tensor = DTensor.from_local(
            own, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
        )
    else:
        new = torch.empty_like(data, device=device)
    return Parameter(new, tensor.requires_grad) if isinstance(tensor, Parameter) else new


def _own(tensor: Tensor) -> tuple[Tensor, slice]:
    """Return a tensor's memory in this process, and the rows that it holds."""
    return (tensor.to_local(), own_rows(tensor)) if isinstance(tensor, DTensor) else (tensor, slice(None))


@torch.no_grad()
def read_weights(model: PreTrainedModel, name: str, world: World) -> None:
    """Read the model's weights from its files: each process reads its own shard.

    If transformers renames or fuses the tensors of these files, rank 0 loads the model in main memory and sends it to
    the other ranks tensor by tensor.
    """
    stored = {key: tensor for key, (_, tensor) in stored_tensors(model).items()}
    with ExitStack() as stack:
        holder: dict[str, Any] = {}
        for path in weight_files(name):
            file = stack.enter_context(safe_open(path, "pt"))
            holder |= dict.fromkeys(file.keys(), file)
        if _is_plain(model, stored, holder):
            for key, tensor in stored.items():
                own, rows = _own(tensor)
                if own.numel():
                    own.copy_(holder[key].get_slice(key)[rows])
            return
    log.info("rank 0 reads %s and sends each rank its shard: the files name or lay out its weights differently", name)
    _hand_out(stored, name, world)


def _is_plain(model: PreTrainedModel, stored: Mapping[str, Tensor], holder: Mapping[str, Any]) -> bool:
    """Return whether the files hold each tensor under the model's name and in its shape."""
    for key, tensor in stored.items():
        written = published(model, {key: torch.empty(tensor.shape, device="meta")})
        if {name: each.shape for name, each in written.items()} != {key: tensor.shape} or key not in holder:
            return False
        if holder[key].get_slice(key).get_shape() != list(tensor.shape):
            return False
    return True


def _hand_out(stored: Mapping[str, Tensor], name: str, world: World) -> None:
    whole = {}
    if world.leads:
        whole = stored_tensors(load_causal_lm(name, dtype="auto"))
    for key, tensor in stored.items():
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if world.leads:
            value.copy_(whole[key][1])
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements).to_local())
        else:
            dist.broadcast(value, 0)
            tensor.copy_(value)


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw random weights with transformers' spread; each tensor has its own generator, so sharding changes nothing."""
    spread = model.config.get_text_config().initializer_range
    for key, (_, tensor) in stored_tensors(model).items():
        own, rows = _own(tensor)
        if tensor.ndim == 1:
            own.fill_(0.0 if key.endswith("bias") else 1.0)
        elif own.numel():
            generator = torch.Generator(own.device).manual_seed(seed + zlib.crc32(key.encode()))
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=own.device)
            own.copy_(whole.normal_(0.0, spread, generator=generator)[rows])
