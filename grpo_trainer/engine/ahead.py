"""Compile ahead, while the server starts whose memory will hold the model's weights.

torch.compile stores its graphs with the code of a layer, so all layers of one class share them. It is therefore enough
to compile two layers with temporary weights: the model's own layers then find the graphs.
"""

from __future__ import annotations

import copy
import logging

import torch
from transformers import PreTrainedModel

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.fitting import Fitting, is_compiled
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.engine.recompute import known_layers
from grpo_trainer.model.load import freeze
from grpo_trainer.model.lora import add_adapter, use_few_kernels
from grpo_trainer.model.text_part import causal_lm_of
from grpo_trainer.phases import START

log = logging.getLogger(__name__)

LAYERS = 2
"""Two, because the first layer needs another graph if the embedding is not trained: its input has no gradient."""
VOCABULARY = 128
"""Vocabulary of the temporary model, small because embedding and head are not compiled here."""


def compile_ahead(config: TrainConfig, skeleton: PreTrainedModel) -> None:
    """Compile the graphs of a model's decoder layers, if the options ask for compiled layers.

    Args:
        skeleton: the model without weights; its buffers are on the device.
    """
    device = next((buffer.device for buffer in skeleton.buffers()), torch.device("cpu"))
    trains_some = config.layer_indices is not None
    if trains_some or not is_compiled(config, skeleton, on_gpu=device.type == "cuda"):
        return
    try:
        with START.of("compile"), torch.random.fork_rng([device] if device.type == "cuda" else []):
            sample = _two_layers(config, skeleton, device)
            forward = build_forward(sample, config)
            use_few_kernels(sample)
            if (layers := known_layers(forward.decoder)) is not None:
                trained = [parameter for parameter in sample.parameters() if parameter.requires_grad]
                Fitting(forward, layers, config, trained).compile(head=False)
    except Exception as error:  # from models, kernels or compilers; the real layers are tried again later
        log.info("could not compile ahead of the weights: %s: %s", type(error).__name__, error)


def _two_layers(config: TrainConfig, skeleton: PreTrainedModel, device: torch.device) -> torch.nn.Module:
    """Return a model with two such layers, random weights and a small vocabulary, and the same parts trainable."""
    found = copy.deepcopy(skeleton.config)
    text = found.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = LAYERS, VOCABULARY, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:LAYERS]
    options = {"dtype": skeleton.dtype, "attn_implementation": config.attention}
    with torch.device(device):
        model = causal_lm_of(found, **options)
    freeze(model, config)
    if config.trains_adapter:
        return add_adapter(model, config.model_copy(update={"lora_adapter": None}), config.seed)
    return model.requires_grad_(True)
