"""Models of the benchmarks: Qwen2's shapes with random weights, which do not affect speed, and a tokenizer of as many
tokens. Nothing is loaded from the hub.

`python -m grpo_trainer.bench.models SHAPE FOLDER` writes one and frees its GPU memory.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError, GrpoError
from grpo_trainer.files import whole_folder
from grpo_trainer.model.shape import ModelShape

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from grpo_trainer.parallel.world import World

log = logging.getLogger(__name__)

ShapeName = Literal["tiny", "0.5b", "1.5b", "7b", "14b", "32b"]
POSITIONS = 32_768
CACHE_BYTES_TINY = 64 << 20
"""Size of vLLM's KV cache for the shape `tiny` on a CPU; the default would be gigabytes."""
PAD, EOS = "<pad>", "<eos>"


class ModelOptions(Section):
    """Model."""

    shape: ShapeName = option("0.5b", help="Shape of the model; its weights are random.")
    model_dir: Path | None = option(
        None, help="Folder of the model, which is written if it does not exist (default: a temporary folder)."
    )


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> ModelShape:
    sizes = (hidden, inner, layers, heads, kv_heads, hidden // heads, vocab)
    return ModelShape(*sizes, tied=tied, biases=True, positions=POSITIONS)


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": _qwen2(64, 128, 2, 2, 1, 98, tied=False),  # heads of 32: vLLM on a CPU has no smaller ones
        "0.5b": _qwen2(896, 4864, 24, 14, 2, 151_936, tied=True),
        "1.5b": _qwen2(1536, 8960, 28, 12, 2, 151_936, tied=True),
        "7b": _qwen2(3584, 18_944, 28, 28, 4, 152_064, tied=False),
        "14b": _qwen2(5120, 13_824, 48, 40, 8, 152_064, tied=False),
        "32b": _qwen2(5120, 27_648, 64, 40, 8, 152_064, tied=False),
    }
)


def ensure_model(shape: ModelShape, folder: Path, dtype: torch.dtype) -> None:
    """Write model and tokenizer into a folder unless they exist.

    Raises:
        ConfigError: the folder has another model, or other files.
    """
    import torch
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        present = AutoConfig.from_pretrained(folder)
        sizes = (present.hidden_size, present.intermediate_size, present.num_hidden_layers, present.vocab_size)
        wanted = (shape.hidden, shape.intermediate, shape.layers, shape.vocab)
        if sizes != wanted:
            raise ConfigError("another shape", field=f"--model-dir {folder}", got=sizes, wanted=f"{wanted}, as --shape")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(field=f"--model-dir {folder}", got="files, but no model", wanted="an empty or a new folder")
    on_gpu = torch.cuda.is_available()
    with whole_folder(folder) as writing:
        numbered_tokenizer(shape.vocab).save_pretrained(writing)
        random_model(shape, dtype, torch.device("cuda" if on_gpu else "cpu")).save_pretrained(writing)
    log.info("wrote a model of %.0fM random %s parameters to %s", shape.parameters / 1e6, dtype, folder)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the peak that is reported is the trainer's


def random_model(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, *, seed: int = 0, world: World | None = None
) -> PreTrainedModel:
    """Return the model, created on its device and in its dtype; sharded over a `world` it has the same weights."""
    from transformers import Qwen2Config

    from grpo_trainer.model.load import build_without_weights
    from grpo_trainer.parallel.shards import draw_weights, give_memory, shard_model

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=shape.tied,
        initializer_range=0.1 if shape.hidden < 256 else 0.02,  # with 0.02 a small model answers every prompt alike
        dtype=dtype,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = build_without_weights(config, dtype, "sdpa", device)
    if world is not None:
        shard_model(model, world, device, dtype)
    give_memory(model, device)
    draw_weights(model, seed)
    return model


def numbered_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A token for each printable character, and numbered ones for the rest: the server turns every id into text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [PAD, EOS, "\n", *map(chr, range(32, 127))]
    names += [f"<{index}>" for index in range(len(names), vocab)]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


if __name__ == "__main__":
    import torch as _torch

    try:
        stored = _torch.bfloat16 if _torch.cuda.is_available() else _torch.float32
        ensure_model(SHAPES[sys.argv[1]], Path(sys.argv[2]), stored)
    except GrpoError as error:
        sys.exit(f"grpo: {error}")
