"""The LoRA adapter (arXiv 2106.09685) by PEFT: make it, and write it as a checkpoint that PEFT and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from transformers import PreTrainedModel

from grpo_trainer.config import LoraOptions
from grpo_trainer.errors import ModelError
from grpo_trainer.files import write_bytes

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def add_adapter(model: PreTrainedModel, options: LoraOptions, seed: int) -> PeftModel:
    """Wrap a frozen model with a fresh adapter (B = 0, so it starts as the base model); its weights are fp32.

    Raises:
        ModelError: no module has a wanted name.
    """
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    missing = [name for name in options.target_modules if name not in present]
    if missing:
        raise ModelError(
            f"--lora-target-modules {','.join(missing)}: {type(model).__name__} has no such linear module; "
            f"it has {', '.join(sorted(present))}"
        )
    torch.manual_seed(seed)
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # PEFT computes with it; a float is right
        lora_dropout=options.dropout,
        target_modules=list(options.target_modules),
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=True)
    assert isinstance(wrapped, PeftModel)
    return wrapped


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names of its checkpoint.

    Embeddings are never among them; left to decide by itself, PEFT asks the hub about the base model at each call.
    """
    return get_peft_model_state_dict(model, save_embedding_layers=False)


def save_adapter(model: PeftModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` into an existing folder.

    Args:
        dtype: of the written weights; by default as they are trained (fp32).
    """
    state = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in adapter_state(model).items()
    }
    write_bytes(folder / WEIGHTS_FILE, save(state, metadata={"format": "pt"}))
    settings = model.peft_config["default"].to_dict()
    settings["inference_mode"] = True
    settings["target_modules"] = sorted(settings["target_modules"])
    write_bytes(folder / CONFIG_FILE, json.dumps(settings, indent=2, default=str).encode())
