"""Compile before there are weights: while the server starts in whose memory the model is to lie.

torch.compile keeps its graphs with the code of a layer, and all layers of one kind share them. So it is enough to
compile two layers with weights of their own, which are dropped afterwards: the model's own layers find the graphs.
"""

from __future__ import annotations

import copy
import logging

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_trainer.config.bridge import AllWeightsOptions, LoraOptions
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.fitting import Fitting, decoder_list, is_compiled
from grpo_trainer.model.forward import build_forward
from grpo_trainer.model.load import freeze
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.model.lora_linear import use_few_kernels
from grpo_trainer.phases import START

log = logging.getLogger(__name__)

LAYERS = 2
"""The first has an input without gradient where the embedding is not trained: its graph is another one."""
VOCABULARY = 128
"""Of the model with so few layers: embedding and head are not what takes long."""


def compile_ahead(config: TrainConfig, skeleton: PreTrainedModel) -> None:
    """Compile what the decoder layers of a model will need, if they are to be compiled.

    Args:
        skeleton: the model without weights; its buffers are on the device.
    """
    device = next((buffer.device for buffer in skeleton.buffers()), torch.device("cpu"))
    trains_some = isinstance(config.bridge, AllWeightsOptions | LoraOptions) and config.bridge.layer_indices is not None
    if trains_some or not is_compiled(config, skeleton, on_gpu=device.type == "cuda"):
        return
    try:
        with START.of("compile"), torch.random.fork_rng([device] if device.type == "cuda" else []):
            sample = _two_layers(config, skeleton, device)
            forward = build_forward(sample, config)
            use_few_kernels(sample)
            layers = decoder_list(forward)
            if layers is not None:
                trained = [parameter for parameter in sample.parameters() if parameter.requires_grad]
                Fitting(forward, layers, config, trained).compile(head=False)
    except Exception as error:  # whatever models, kernels and compilers raise: what is to be trained is tried later
        log.info("nothing is compiled before the weights are there: %s: %s", type(error).__name__, error)


def _two_layers(config: TrainConfig, skeleton: PreTrainedModel, device: torch.device) -> torch.nn.Module:
    """A model with two such layers, random weights and few tokens, of which the same is trained."""
    found = copy.deepcopy(skeleton.config)
    text = found.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = LAYERS, VOCABULARY, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:LAYERS]
    options = {"dtype": skeleton.dtype, "attn_implementation": config.model.attention}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(found, **options)
    freeze(model, config.model)
    if isinstance(config.bridge, LoraOptions):
        return add_adapter(model, config.bridge.model_copy(update={"adapter": None}), config.model.seed)
    return model.requires_grad_(True)
