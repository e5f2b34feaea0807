"""A model of a given shape with random weights, and a tokenizer that has its vocabulary: needs no hub.

`python -m grpo_trainer.bench.random_model SHAPE FOLDER [no-weights]` writes one and frees its GPU memory.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from grpo_trainer.bench.shapes import POSITIONS, SHAPES
from grpo_trainer.doctor.model import ModelShape
from grpo_trainer.errors import ConfigError, GrpoError
from grpo_trainer.files import whole_folder
from grpo_trainer.parallel.shards import draw_weights, give_memory, shard_model
from grpo_trainer.parallel.world import World
from grpo_trainer.shared.attach import build_without_weights

log = logging.getLogger(__name__)

PAD, EOS = "<pad>", "<eos>"


def ensure_model(shape: ModelShape, folder: Path, dtype: torch.dtype, *, weights: bool = True) -> None:
    """Write the model into a folder unless it exists.

    Args:
        weights: whether the folder gets weights, beside the configuration and the tokenizer.

    Raises:
        ConfigError: the folder holds another model.
    """
    if (folder / "config.json").is_file():
        found = AutoConfig.from_pretrained(folder)
        sizes = (found.hidden_size, found.intermediate_size, found.num_hidden_layers, found.vocab_size)
        wanted = (shape.hidden, shape.intermediate, shape.layers, shape.vocab)
        if sizes != wanted:
            raise ConfigError(
                "holds a model of another shape",
                field=f"--model-dir {folder}",
                got=str(sizes),
                wanted=f"{wanted}, as --shape",
                fix="name another folder",
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(field=f"--model-dir {folder}", got="files, but no model", wanted="an empty or a new folder")
    if not weights:
        with whole_folder(folder) as writing:
            numbered_tokenizer(shape.vocab).save_pretrained(writing)
            config = model_config(shape, dtype)
            config.architectures = ["Qwen2ForCausalLM"]  # as a saved model's, by which vLLM chooses its class
            config.save_pretrained(writing)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(shape, dtype, torch.device(device))
    with whole_folder(folder) as writing:
        numbered_tokenizer(shape.vocab).save_pretrained(writing)
        model.save_pretrained(writing)
    log.info("wrote a model of %.0fM random %s parameters to %s", model.num_parameters() / 1e6, dtype, folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the peak that is reported is the trainer's


def random_model(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str = "sdpa",
    seed: int = 0,
    world: World | None = None,
) -> PreTrainedModel:
    """Return the model, created on its device and in its dtype.

    Args:
        world: the processes over which it is sharded, which changes no weight; None: it is whole.
    """
    model = build_without_weights(model_config(shape, dtype), dtype, attention, device)
    if world is not None:
        shard_model(model, world, device, dtype)
    give_memory(model, device)
    draw_weights(model, seed)
    return model


def model_config(shape: ModelShape, dtype: torch.dtype) -> Qwen2Config:
    """Return the shape as transformers' configuration."""
    return Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=shape.tied,
        initializer_range=0.1 if shape.hidden < 256 else 0.02,  # a small one says the same to everything otherwise
        dtype=dtype,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def numbered_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A token for each printable character, and numbered ones for the rest: the server turns every id into text."""
    names = [PAD, EOS, "\n", *map(chr, range(32, 127))]
    names += [f"<{index}>" for index in range(len(names), vocab)]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


if __name__ == "__main__":
    try:
        stored = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        ensure_model(SHAPES[sys.argv[1]], Path(sys.argv[2]), stored, weights="no-weights" not in sys.argv[3:])
    except GrpoError as error:
        sys.exit(f"grpo: {error}")
