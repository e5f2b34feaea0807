"""Conditional models of real width, four layers deep: their text parts train by an adapter and by whole weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForImageTextToText, Gemma3Config, PreTrainedConfig, PreTrainedModel, Qwen3_5Config

from environments.demo_model.model import build_tokenizer
from tests.golden.models import PROCESSORS, adapted_modules
from tests.processes import tail
from tests.runs import finished, of_mode, rows, started

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

IMAGES: Final = {"gemma3_whole": "image_token_index", "qwen3_5": "image_token_id"}
"""The field of the id that stands for an image: the tokenizer's padding, which no prompt has."""


def config_of(architecture: str, vocabulary: int) -> PreTrainedConfig:
    """Widths of Gemma 3 4B and of Qwen 3.5 9B; two layers of the vision tower."""
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    if architecture == "gemma3_whole":
        layers = ["sliding_attention"] * 3 + ["full_attention"]
        text = {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4}
        vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 2}
        text |= {"sliding_window": 1024, "num_hidden_layers": 4, "layer_types": layers, **sizes}
        whole: dict[str, Any] = {
            "mm_tokens_per_image": 256,
            IMAGES[architecture]: 0,
            "boi_token_index": 0,
            "eoi_token_index": 0,
        }
        return Gemma3Config(text_config=text, vision_config={**vision, "image_size": 896, "patch_size": 14}, **whole)
    layers = ["linear_attention"] * 3 + ["full_attention"]
    whole = {IMAGES[architecture]: 0, "video_token_id": 0, "vision_start_token_id": 0, "vision_end_token_id": 0}
    return Qwen3_5Config(
        text_config={"num_hidden_layers": 4, "layer_types": layers, **sizes},
        vision_config={"depth": 2, "out_hidden_size": 4096},
        **whole,
    )


def spread_out(model: PreTrainedModel) -> None:
    """Make tied embeddings small and the last norm large: a wide random model otherwise only repeats its input, and no
    change of its layers moves its logprobs."""
    if model.config.get_text_config().tie_word_embeddings:
        with torch.no_grad():
            model.get_input_embeddings().get_parameter("weight").mul_(0.1)
            model.base_model.get_parameter("language_model.norm.weight").fill_(9.0)  # Gemma adds 1


@pytest.mark.parametrize("mode", ["lora_only", "broadcast"])
@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3_whole"])
def test_a_conditional_model_of_real_width_trains(tmp_path: Path, architecture: str, mode: str) -> None:
    tokenizer = build_tokenizer()
    folder, run_dir, log = tmp_path / "model", tmp_path / "run", tmp_path / "log"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForImageTextToText.from_config(config_of(architecture, len(tokenizer)), dtype=torch.bfloat16)
    spread_out(model)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[architecture]))
    # Random models get no rewards: the entropy bonus trains them. One mode has CUDA graphs, and compiled layers where
    # they can be. Whole weights with their optimizer states take 10 GB: they are saved once.
    options = of_mode(
        mode, env="arithmetic", training_steps=20, entropy_coef=0.01, dtype="bfloat16", lr=1e-5, on_drift="stop",
        checkpoint_interval=0, compile="auto" if mode == "lora_only" else "off",
        server__enforce_eager=None if mode == "lora_only" else True,
    )  # fmt: skip
    flags = ["--max-num-seqs", "64", "--kv-cache-memory-bytes", "4294967296"]
    if architecture == "qwen3_5" and importlib.util.find_spec("cutlass") is None:
        flags += ["--gdn-prefill-backend", "triton"]  # vLLM's choice needs nvidia-cutlass-dsl
    options["server.extra-args"] = ",".join(flags)
    if mode == "lora_only":
        options["lora-target-modules"] = ",".join(adapted_modules(architecture))
    with started(folder, run_dir, log, **options) as process:
        assert finished(process, log, 500) == 0, tail(log)
    trained = rows(run_dir)
    assert [row["step"] for row in trained] == list(range(1, 21))
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()
    fresh = [row["alignment/logprob_diff_mean"] for row in trained if row.get("rollout/staleness_max") == 0]
    print(f"{architecture} {mode}: mean difference of logprobs {sum(fresh) / len(fresh):.4f}, worst {max(fresh):.4f}")
    assert fresh and max(fresh) < 0.04  # bfloat16 on both sides
