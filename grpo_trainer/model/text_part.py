"""The text part of a conditional model (`…ForConditionalGeneration`: Gemma 3, Gemma 4, Qwen3.5, …).

The trainer loads the text part alone, as transformers' causal model of that kind: towers for images and sounds are
neither trained nor in memory. Everything that leaves the trainer has the names of the whole model, which vLLM, PEFT and
transformers expect: `model.layers.0…` is `model.language_model.layers.0…`. An exported model is the whole one: its
other weights are copied from the files at `--model-name`.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from grpo_common.models import find_folder
from grpo_trainer.errors import ModelError
from grpo_trainer.model.quantised import is_read, mark, plain_weights, quantised_by

PREFIX: Final = "model.language_model."
"""Before the names of the text part's layers in the whole model, instead of `model.`."""
READ_AS: Final[Mapping[str, str]] = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",  # files of transformers before 4.52, and Gemma 3's to this day
    r"^language_model\.lm_head\.": "lm_head.",
}
NAMED_OTHERWISE: Final = frozenset(
    {"blip-2", "idefics2", "idefics3", "instructblip", "instructblipvideo", "llama4", "smolvlm"}
)
"""Kinds whose text part transformers does not name `model.language_model`."""
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_WHOLE: Final = "whole_config"
OWN_CONFIG: Final = "own_config"
"""Attribute of a model that is trained: its configuration as it is saved, with the dropout that training is without."""


def text_config_of(config: Any) -> Any | None:
    """Return the configuration of a conditional model's text part; None: the model has no such part."""
    architectures = getattr(config, "architectures", None) or [""]
    text = getattr(config, "text_config", None)
    if not isinstance(text, PreTrainedConfig) or not architectures[0].endswith("ForConditionalGeneration"):
        return None
    if (tied := getattr(config, "tie_word_embeddings", None)) is not None:  # some kinds have it in the text part only
        text.tie_word_embeddings = tied  # vLLM, too, reads this one
    return text


def whole_config(model: nn.Module) -> Any | None:
    """Return the configuration of the conditional model of which a model is the text part; None: it is no part."""
    return getattr(model, _WHOLE, None)


def causal_lm_of(config: Any, **options: Any) -> PreTrainedModel:
    """Return a model of this configuration, or its text part, without reading weights."""
    text = text_config_of(config)
    model = AutoModelForCausalLM.from_config(config if text is None else text, **options)
    return model if text is None else _as_part(model, config)


def load_causal_lm(name: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model, or its text part, as `AutoModelForCausalLM.from_pretrained` does; files of GPTQ or AWQ as plain
    weights.

    Raises:
        ModelError: the files lack weights of the text part, or are quantised and can't be read.
    """
    config = AutoConfig.from_pretrained(name)
    if is_read(config):
        return _load_quantised(str(name), config, **options)
    if (text := text_config_of(config)) is None:
        try:
            return AutoModelForCausalLM.from_pretrained(name, **options)
        except ImportError as error:
            if (method := quantised_by(config)) is None:
                raise
            raise ModelError(
                str(error).partition("\n")[0], field=f"--model-name {name}", got=f"weights quantised by {method}",
                wanted="GPTQ, AWQ, or weights in 16 or 32 bits", fix="name the model that they were made of",
            ) from None  # fmt: skip
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    ignored = kind._keys_to_ignore_on_load_unexpected
    # So that transformers does not list the weights of the other parts, which it does not load.
    kind._keys_to_ignore_on_load_unexpected = [r"^(?!model\.layers\.|model\.norm\.|model\.embed_tokens\.|lm_head\.)"]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, config=text, key_mapping=dict(READ_AS), output_loading_info=True, **options
        )
    finally:
        kind._keys_to_ignore_on_load_unexpected = ignored
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            "the text part is not in the files", field=f"--model-name {name}", got=f"no {missing[0]}",
            wanted="all of its weights", fix="download or save the model again",
        )  # fmt: skip
    renamings = set(READ_AS)
    model._weight_conversions = [
        each
        for each in model._weight_conversions
        if not isinstance(each, PrefixChange) and not renamings.intersection(each.source_patterns)
    ]
    return _as_part(model, config)


def _load_quantised(name: str, config: Any, *, dtype: Any, **options: Any) -> PreTrainedModel:
    """Load files of GPTQ or AWQ as plain weights in `dtype`, for which "auto" is the files' own."""
    settings = config.quantization_config
    del config.quantization_config
    own = config.dtype or torch.float16 if dtype == "auto" else dtype
    weights = plain_weights(weight_files(name), settings, own)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, found = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=own, output_loading_info=True, **options
    )
    if missing := sorted(found["missing_keys"]):  # also without any file in safetensors
        raise ModelError(
            "weights are not in the files", field=f"--model-name {name}", got=f"no {missing[0]} in *.safetensors",
            wanted="all of them", fix="download or save the model again",
        )  # fmt: skip
    model.name_or_path = model.config._name_or_path = name  # saved adapters name it as their base
    mark(model, settings["quant_method"])
    if model.can_generate():
        with suppress(OSError):  # the files need not have one
            model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def _as_part(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    setattr(model, _WHOLE, copy.deepcopy(config))
    model.config._name_or_path = config._name_or_path
    return model


# names -----------------------------------------------------------------------------------------------------


def in_whole(model: nn.Module, name: str) -> str:
    """Return the name of a weight or module of `model` in the whole model."""
    is_part = whole_config(model) is not None and name.startswith("model.")
    return PREFIX + name.removeprefix("model.") if is_part else name


def in_part(model: nn.Module, name: str) -> str:
    """Return the name in `model` of a weight or module of the whole model."""
    return name.replace(PREFIX, "model.", 1) if whole_config(model) is not None else name


def published(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a published checkpoint has them: transformers renames some when it loads them, and fuses
    others (the experts of a mixture); both are undone."""
    return {in_whole(model, name): part for name, part in revert_weight_conversion(model, dict(tensors)).items()}


# files -----------------------------------------------------------------------------------------------------


def weight_files(name: str) -> list[str]:
    """Return the paths of a model's safetensors files, downloaded if necessary; empty if it has no such files."""
    known: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (single := cached_file(name, SAFE_WEIGHTS_NAME, **known)) is not None:
        return [single]
    if (index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **known)) is not None:
        return list(get_checkpoint_shard_files(name, index)[0] or ())
    return []


class OtherParts:
    """Weights of a whole model that are not of its text part, in its files.

    Raises:
        ModelError: the folder has no weights in safetensors.
    """

    def __init__(self, config: Any) -> None:
        self._name = str(config._name_or_path)
        self._places: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        """Their names and bytes."""
        self._old_names = False
        for path in weight_files(self._name):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # a file is no mapping
                    self._old_names |= name.startswith("language_model.model.")
                    if name.startswith((PREFIX, "language_model.", "lm_head.")):
                        continue
                    part = file.get_slice(name)
                    count = torch.Size(part.get_shape()).numel()
                    self._places[name] = path
                    self.sizes[name] = count * (4 if part.get_dtype() == "F32" else 2)
        if not self._places:
            raise ModelError(
                "an exported model has all parts, and the others are copied from there",
                field=f"--model-name {self._name}", got="no other part in *.safetensors", wanted="the whole model",
            )  # fmt: skip

    def named_as_there(self, name: str) -> str:
        """Return a name of the whole model as the files write it."""
        if not self._old_names:
            return name
        return name.replace(PREFIX, "language_model.model.", 1).replace("lm_head.", "language_model.lm_head.", 1)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these weights in main memory."""
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for path in {self._places[name] for name in names}:
                files[path] = stack.enter_context(safe_open(path, "pt"))
            return {name: files[self._places[name]].get_tensor(name) for name in names}

    def copy_processors(self, folder: Path) -> None:
        """Copy the files that say how images and sounds are read. Raise an OSError if one can't be copied."""
        source = find_folder(self._name)
        for name in PROCESSOR_FILES:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
