"""What a run trains, a LoRA adapter or all weights: how to load it, and the contents of its checkpoints.

`checkpoint.py` adds further files to these. An adapter (`lora_only`, `lora_restart`):

    adapter_step_12/     adapter_model.safetensors, adapter_config.json     PEFT and vLLM load these

All weights (`none`, `shared_vllm`, `broadcast`):

    step_12/             model*.safetensors, config.json, tokenizer files   transformers and vLLM load these
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.allocator import shareable
from grpo_trainer.engine.fitting import compile_ahead
from grpo_trainer.engine.tensor_shards import ModelShard, shard_of
from grpo_trainer.errors import BridgeError, ConfigError
from grpo_trainer.model import lora
from grpo_trainer.model.export import copy_whole, export_model, stored_tensors
from grpo_trainer.model.load import (
    build_without_weights,
    check_attention,
    check_model,
    compute_in,
    freeze,
    load_all_weights,
    load_model,
    pick_device,
    pick_dtype,
    read_tokenizer,
    take_generation_config,
)
from grpo_trainer.model.text_part import load_causal_lm
from grpo_trainer.optim.steps import first_not_finite, sampled
from grpo_trainer.parallel.shards import give_memory, is_sharded, read_weights, shard_model
from grpo_trainer.parallel.world import World
from grpo_trainer.phases import COMMAND_VARIABLE
from grpo_trainer.server_client import ServerClient
from grpo_trainer.shared.attach import attach_model, build_skeleton
from grpo_trainer.shared.bridge_file import read_bridge_config
from vllm_server.protocol.bridge_config import BridgeConfigFile

log = logging.getLogger(__name__)

MODEL_CONFIG_FILE = "config.json"


class Policy(Protocol):
    """What a run trains: those parameters of `model` that require a gradient."""

    @property
    def model(self) -> PreTrainedModel | PeftModel: ...

    kind: str
    """For messages."""
    step_prefix: str
    """A checkpoint's folder is this prefix and the step; `final_name` has the final weights."""
    final_name: str
    marker: str
    """The file by which a checkpoint of this kind is recognised."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of a checkpoint. They are the model's own memory: copy them if training continues."""
        ...

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors()`, or a copy of them, into an existing folder; the model itself is not read."""
        ...

    def exact(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of `tensors` that `write` rounds or renames, so that the checkpoint can hold them exactly."""
        ...

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint.

        Raises:
            ConfigError: the checkpoint has other options or another model.
        """
        ...


@dataclass(eq=False, repr=False)
class Adapter:
    """A LoRA adapter on a frozen model."""

    model: PeftModel
    kind = "a LoRA adapter"
    step_prefix = "adapter_step_"
    final_name = "adapter_final"
    marker = lora.CONFIG_FILE

    def tensors(self) -> dict[str, Tensor]:
        return lora.adapter_state(self.model)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        lora.save_adapter(self.model, folder, tensors)

    def exact(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        """Load an adapter after comparing its settings and names, since PEFT silently ignores what does not fit."""
        saved = json.loads((path / lora.CONFIG_FILE).read_text())
        own = self.model.peft_config["default"]
        assert isinstance(own, LoraConfig)
        pairs = {
            "--lora-r": (saved["r"], own.r),
            "--lora-alpha": (saved["lora_alpha"], own.lora_alpha),
            "--lora-rslora": (saved.get("use_rslora", False), own.use_rslora),
            "--lora-target-modules": (sorted(saved["target_modules"]), sorted(own.target_modules or ())),
        }
        for flag, (was, now) in pairs.items():
            if was != now:
                raise ConfigError(
                    f"--resume {path} was made with another adapter",
                    field=flag,
                    got=now,
                    wanted=str(was),
                    fix="give it as it was",
                )
        with safe_open(path / lora.WEIGHTS_FILE, "pt") as weights:
            names = set(weights.keys())
        if names != set(lora.adapter_state(self.model)):
            raise ConfigError(
                "the modules of its adapter are not this model's", field="--resume", got=path, fix="give it as it was"
            )
        lora.load_weights(self.model, load_file(path / lora.WEIGHTS_FILE))


@dataclass(eq=False, repr=False)
class AllWeights:
    """Every parameter of a model, in fp32; `write` writes them in `dtype`, which is the server's."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype = torch.float32
    kind = "all weights"
    step_prefix = "step_"
    final_name = "model_final"
    marker = MODEL_CONFIG_FILE

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, (_, tensor) in stored_tensors(self.model).items()}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        export_model(self.model, self.tokenizer, folder, self.dtype, tensors=tensors)

    def exact(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all of `tensors`: the weights written for the server may be rounded and renamed."""
        return dict(tensors)

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        self._check_shapes(path, exact)
        with torch.no_grad():
            for name, (_, tensor) in stored_tensors(self.model).items():
                copy_whole(tensor, exact[name])

    def _check_shapes(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        shard = shard_of(self.model) or ModelShard(0, 1)
        own = {name: shard.whole_shape(name, tensor) for name, (_, tensor) in stored_tensors(self.model).items()}
        if own != {name: tensor.shape for name, tensor in weights.items()}:
            raise ConfigError(
                "its weights are not those of --model-name", field="--resume", got=path, fix="name its model"
            )


class SharedWeights(AllWeights):
    """Every parameter of a model in a server's memory. Checkpoints have its dtype, so saving rounds nothing."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: BridgeConfigFile
    ) -> None:
        super().__init__(model, tokenizer, model.dtype)
        self.source = source
        """The server's handles."""
        self.loaded: dict[str, Tensor] | None = None
        """Weights of a checkpoint that still have to be written to the server's memory, within a fence."""

    def exact(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors whose dtype differs from the model's: in most models none."""
        return {name: tensor.clone() for name, tensor in tensors.items() if tensor.dtype != self.dtype}

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        """Read a checkpoint's weights, or this process's shard of them, into main memory, for `write_loaded`."""
        model = load_causal_lm(path, dtype="auto")
        loaded = {name: tensor.detach() for name, (_, tensor) in stored_tensors(model).items()} | dict(exact)
        self._check_shapes(path, loaded)
        if (first := first_not_finite([*loaded.values()], [*loaded.values()])) is not None:
            raise ConfigError(
                "weights of the checkpoint are not finite",
                field="--resume",
                got=f"{[*loaded][first]} in {path}",
                fix="resume from an earlier checkpoint",
            )
        if (shard := shard_of(self.model)) is not None:
            loaded = {name: shard.own(name, each).clone() for name, each in loaded.items()}
        self.loaded = loaded

    @torch.no_grad()
    def write_loaded(self) -> None:
        """Write the checkpoint's weights into the server's memory."""
        assert self.loaded is not None
        for name, (_, tensor) in stored_tensors(self.model).items():
            tensor.copy_(self.loaded[name])
        self.loaded = None


def build_policy(
    config: TrainConfig, check_stop: Callable[[], None] = lambda: None, world: World | None = None
) -> Policy:
    """Load the model, or attach it to the server's memory, and make the trained parameters trainable.

    `check_stop` is called while waiting for the server; it raises to end the wait. Each process of the `world` may get
    a shard of the weights.

    Raises:
        ModelError, ConfigError: see `load_model`.
        BridgeError: the server does not share its weights, or they can't be attached.
    """
    if config.trains_adapter:
        if not config.shares_weights:
            return Adapter(lora.add_adapter(load_model(config), config, config.seed))
        base, _ = attach_to_server(config, check_stop, world)
        if world is not None:
            world.check_agreement(sampled(list(base.parameters())), "as its base model")
        return Adapter(lora.add_adapter(base, config, config.seed))
    if config.shares_weights:
        model, source = attach_to_server(config, check_stop, world)
        choose_trained(model, config)
        return SharedWeights(model, read_tokenizer(config.model_name), source)
    if world is not None and is_sharded(world, config):
        model = _load_part(config, world)
    else:
        # A server on this GPU may map the weights to copy them.
        with shareable() if config.weight_bridge_mode == "broadcast" else nullcontext():
            model = load_all_weights(config)
        choose_trained(model, config)
    dtype = getattr(torch, config.served_dtype(on_gpu=torch.cuda.is_available()))
    return AllWeights(model, read_tokenizer(config.model_name), dtype)


def _load_part(config: TrainConfig, world: World) -> PreTrainedModel:
    """Load this process's shard of all weights in fp32, as `load_all_weights` loads the whole.

    Raises:
        ModelError, ConfigError: see `load_model`; or the model can't be sharded.
    """
    found = check_model(config.model_name)
    check_attention(found, config.attention)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    model = freeze(build_without_weights(found, torch.float32, config.attention, device), config)
    take_generation_config(model, config.model_name)
    choose_trained(model, config)
    compute_in(model, config)
    shard_model(model, world, device, dtype)
    give_memory(model, device)
    read_weights(model, config.model_name, world)
    text = "loaded part %d of %d of %s: %.2fM parameters in all, %s on %s"
    log.info(text, world.rank + 1, world.size, config.model_name, model.num_parameters() / 1e6, dtype, device)
    return model


def attach_to_server(
    config: TrainConfig, check_stop: Callable[[], None], world: World | None = None
) -> tuple[PreTrainedModel, BridgeConfigFile]:
    """Wait for the server, and return the model in the server's memory with every parameter frozen.

    Of several trainer processes, each attaches to its own server, the one with its rank, or to its shard of each weight
    in the memory of the only server's worker with its rank.

    Raises:
        BridgeError: the server does not share its weights, or the file is another server's.
        BridgeError, ConfigError, ModelError: see `attach_model`.
    """
    sharded = world is not None and config.shards_weights
    rank, ranks = (world.rank, world.size) if world is not None and sharded else (0, 1)
    vllm = config.server if world is None or sharded else config.server.each[world.rank]
    skeleton = None
    if COMMAND_VARIABLE in os.environ:  # `grpo run`: the starting server does not measure free memory
        skeleton = build_skeleton(config)
        if not sharded:
            compile_ahead(config, skeleton)
    with closing(ServerClient(vllm, check_stop)) as client:
        info = client.wait_until_there()
    if info.bridge_config_path is None:
        raise BridgeError(
            "does not share its weights",
            field=f"the inference server at {vllm.url}",
            fix="start it with --shared-weights",
        )
    path = config.vllm_config_path or Path(info.bridge_config_path)
    file = read_bridge_config(path, rank, ranks)
    if file.boot_id != info.boot_id:
        raise BridgeError(
            f"is of another server than the one at {vllm.url}",
            field=f"--vllm-config-path {path}",
            got=f"boot {file.boot_id}",
            wanted=f"boot {info.boot_id}",
            fix=f"leave it out, or name {info.bridge_config_path}",
        )
    auto = torch.device("cpu" if file.kind == "file" else "cuda")
    if auto.type == "cuda" and world is not None and not world.alone:
        auto = torch.device("cuda", torch.cuda.current_device())  # where this process meets the others
    device = auto if config.device == "auto" else pick_device(config.device)
    return attach_model(file, config, device, skeleton, rank), file


def choose_trained(model: PreTrainedModel, options: BridgeConfig) -> None:
    """Make every parameter trainable, or only those of the layers that `--train-layer-indices` names.

    Raises:
        ModelError: the model has fewer layers.
    """
    wanted = options.layer_indices
    model.requires_grad_(wanted is None)
    if wanted is None:
        return
    found = lora.decoder_layers(model)
    found.check("--train-layer-indices", wanted)
    layers = model.get_submodule(found.name)
    for number in wanted:
        layers.get_submodule(str(number)).requires_grad_(True)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    log.info("training %d of %d layers: %.2fM parameters", len(wanted), found.count, trained / 1e6)
