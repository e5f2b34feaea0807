"""Read models and adapters as transformers and PEFT do, and print their greedy answers.

Run by the Python of a second virtual environment, which has older versions of both, and imported by the tests.
The argument is a JSON list of `{"folder", "adapter", "prompt", "text"}`: the folder of a model, that of an adapter on
it or null, the ids to continue, and a text for the tokenizer, which is that of the last folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH = 12
torch.set_num_threads(1)


def read(job: dict[str, Any]) -> dict[str, Any]:
    folder, adapter = Path(job["folder"]), job["adapter"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager")
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    prompt = torch.tensor([job["prompt"]])
    options = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        tokens = model.eval().generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    found: dict[str, Any] = {"tokens": tokens[0, prompt.shape[1] :].tolist()}
    if not any(Path(adapter or folder).glob("tokenizer*")):
        return found
    tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
    ids = tokenizer.encode(job["text"])
    return {
        **found,
        "dtype": json.loads((folder / "config.json").read_text())["torch_dtype"],
        "ids": ids,
        "text": tokenizer.decode(ids),
        "without special tokens": tokenizer.decode(ids, skip_special_tokens=True),
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": job["text"]}], tokenize=False),
        "special": sorted(tokenizer.all_special_tokens),
    }


if __name__ == "__main__":
    answers = [read(job) for job in json.loads(sys.argv[1])]
    print(json.dumps({"transformers": transformers.__version__, "answers": answers}))
