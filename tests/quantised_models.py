"""Make small quantised models with the library gptqmodel, on a CPU in half a minute each.

    python -m tests.quantised_models DENSE OUT                   # OUT/gptq and OUT/awq, in 4 bits

gptqmodel 7.7 asks for newer versions of torch and transformers than this project has, and works with these:

    pip install --no-deps gptqmodel==7.7.0 device-smi pypcre tokenicer logbar defuser threadpoolctl

`tests/data/quantised` was made so of `tests.integration.serving.save_tiny_model` with two key-value heads.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

METHODS = ("gptq", "awq")
RECORD = "logprobs.json"
"""In the model's folder: logprobs of `PROMPT` as gptqmodel computes them in float16, `[token, vocabulary]`."""
PROMPT = [5, 17, 30, 2, 90, 44, 61, 8]


def make(dense: Path, out: Path, method: str) -> Path:
    """Write the model at `dense`, quantised with sums to calibrate on, to a folder below `out`; return the folder."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer its threads can't be made
    from gptqmodel import BACKEND, GPTQModel  # pyright: ignore[reportMissingImports]
    from gptqmodel.quantization.config import AWQConfig, GPTQConfig  # pyright: ignore[reportMissingImports]

    narrow = AutoConfig.from_pretrained(dense).hidden_size < 128
    settings: dict[str, Any] = {"bits": 4, "group_size": 32 if narrow else 64, "offload_to_disk": False}
    config = GPTQConfig(sym=True, desc_act=False, **settings) if method == "gptq" else AWQConfig(sym=False, **settings)
    model = GPTQModel.load(str(dense), config, device="cpu")
    sums = [f"{a}+{b}={a + b} " for a in range(10, 50, 3) for b in range(10, 50)]
    rows = AutoTokenizer.from_pretrained(dense)(["".join(sums[i : i + 16]) for i in range(0, len(sums), 16)])
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in rows["input_ids"]], batch_size=4)
    folder = out / method
    model.save(str(folder))
    backend = BACKEND.TORCH if method == "gptq" else BACKEND.TORCH_AWQ
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16)
    with torch.no_grad():
        logprobs = model.model(torch.tensor([PROMPT])).logits.float().log_softmax(-1)[0]
    (folder / RECORD).write_text(json.dumps([[round(value, 4) for value in row] for row in logprobs.tolist()]))
    return folder


if __name__ == "__main__":
    for each in METHODS:
        make(Path(sys.argv[1]), Path(sys.argv[2]), each)
