"""What a run trains, a LoRA adapter or all weights: how it is loaded, and how its checkpoints look.

Checkpoints of both kinds hold besides what `checkpoint.py` adds. An adapter's (`lora_only`, `lora_restart`):

    adapter_step_12/     adapter_model.safetensors, adapter_config.json     what PEFT and vLLM load

All weights (`none`):

    step_12/             model*.safetensors, config.json, tokenizer files   what transformers and vLLM load
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.config import CheckpointRestart, LoraOnly, LoraRestart, ModelConfig, TrainConfig, require_available
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.model import lora
from grpo_trainer.model.export import export_model, stored_tensors
from grpo_trainer.model.load import load_all_weights, load_model

MODEL_CONFIG_FILE = "config.json"


class Policy(Protocol):
    """What a run trains.

    Attributes:
        model: its parameters that require a gradient are trained.
        kind: what it is, in messages.
        step_prefix: checkpoints are folders of this name and the step.
        final_name: the folder of what the run leaves.
        marker: the file by which a checkpoint of this kind is known.
    """

    @property
    def model(self) -> PreTrainedModel | PeftModel: ...

    kind: str
    step_prefix: str
    final_name: str
    marker: str

    def save(self, folder: Path) -> None:
        """Write the trained weights into an existing folder."""
        ...

    def exact_weights(self) -> dict[str, Tensor]:
        """What `save` does not write to the last bit, for the checkpoint."""
        ...

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint.

        Raises:
            ConfigError: it was made with other options, or of another model.
        """
        ...


class Adapter:
    """A LoRA adapter on a frozen model."""

    kind = "a LoRA adapter"
    step_prefix = "adapter_step_"
    final_name = "adapter_final"
    marker = lora.CONFIG_FILE

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def save(self, folder: Path) -> None:
        lora.save_adapter(self.model, folder)

    def exact_weights(self) -> dict[str, Tensor]:
        return {}

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        """PEFT itself loads what fits and keeps silent about the rest: so the kind is compared first."""
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
                    f"--resume {path}: made with another adapter: {flag} was {was}, is {now}; give it as it was"
                )
        with safe_open(path / lora.WEIGHTS_FILE, "pt") as weights:
            names = set(weights.keys())
        if names != set(lora.adapter_state(self.model)):
            raise ConfigError(f"--resume {path}: made with another adapter: its modules are not this model's")
        set_peft_model_state_dict(self.model, load_file(path / lora.WEIGHTS_FILE))


class AllWeights:
    """Every parameter of a model, in fp32.

    Args:
        dtype: of the folders that `save` writes; the server's.
    """

    kind = "all weights"
    step_prefix = "step_"
    final_name = "model_final"
    marker = MODEL_CONFIG_FILE

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._dtype = dtype

    def save(self, folder: Path) -> None:
        export_model(self.model, self._tokenizer, folder, self._dtype)

    def exact_weights(self) -> dict[str, Tensor]:
        """Always: what is written for the server may be rounded, and under names of its own."""
        return {name: tensor.detach() for name, (_, tensor) in stored_tensors(self.model).items()}

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        own = stored_tensors(self.model)
        shapes = {name: tensor.shape for name, (_, tensor) in own.items()}
        if shapes != {name: tensor.shape for name, tensor in exact.items()}:
            raise ConfigError(f"--resume {path}: its weights are not those of this --model-name; give it as it was")
        with torch.no_grad():
            for name, (_, tensor) in own.items():
                tensor.copy_(exact[name])


def build_policy(config: TrainConfig) -> Policy:
    """Load the model and make trainable what the run trains.

    Raises:
        NotAvailableError: the mode is not in this version.
        ModelError, ConfigError: see `load_model`.
    """
    match require_available(config.bridge):
        case LoraOnly() | LoraRestart() as options:
            return Adapter(lora.add_adapter(load_model(config.model), options, config.model.seed))
        case CheckpointRestart():
            model = load_all_weights(config.model)
            dtype = getattr(torch, config.served_dtype(on_gpu=torch.cuda.is_available()))
            return AllWeights(model, load_tokenizer(config.model), dtype)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, to be written beside its weights.

    Raises:
        ModelError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(config.name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"--model-name {config.name}: no tokenizer there, which vLLM needs: {reason}") from None
