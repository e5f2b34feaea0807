"""What this project writes is read by transformers 4.57.1 and PEFT 0.12, and answers as the server does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import PeftModel
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from environments.demo_model.model import CHAT_TEMPLATE, build_tokenizer
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import CheckpointConfig, OptimizerConfig
from grpo_trainer.model.export import export_model
from grpo_trainer.model.load import read_tokenizer
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from grpo_trainer.weights.checkpoint_restart import MergedModels
from tests.golden.models import CONFIGS, random_model
from tests.integration import older_reader
from tests.integration.serving import serve
from tests.unit.tiny_lora import fill_b

pytestmark = pytest.mark.timeout(900)

OLDER = ("transformers==4.57.1", "peft==0.12.0", "tokenizers==0.22.1", "huggingface-hub==0.36.0")
"""All else, torch among it, is that of the tests."""
PROMPT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(180)]
"""Long enough that rotary embeddings of another base, or without scaling, give other answers."""
TEXT = "what is 12 + 3 , then ? <|think|>15"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # heads of 32: vLLM's CPU build has no attention kernel for smaller ones
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = ("qwen2", "qwen2-untied", "llama3", "llama3-tied")
LOST = ("rope_theta", "rope_scaling")
"""Keys that only older versions read."""


@pytest.fixture(scope="session")
def older() -> Path:
    """The Python of a virtual environment with older versions, made once for each user and kept in the user's cache."""
    packages = sysconfig.get_path("purelib")
    key = hashlib.sha256(" ".join([sys.version, packages, *OLDER]).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "grpo-tests" / f"older-{key}"
    python, done = folder / "bin" / "python", folder / "done"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, capture_output=True)
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *OLDER]
            made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            if made.returncode:
                pytest.skip(f"no registry has {', '.join(OLDER)}: {made.stderr.strip()[-300:]}")
            (found,) = folder.glob("lib/python*/site-packages")
            (found / "tests.pth").write_text(f"{packages}\n")  # behind the environment's own packages
            done.touch()
    return python


def read_by(python: Path, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the transformers and PEFT of another environment make of models and adapters on them."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), older_reader.__file__, json.dumps(jobs)],
        capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parent, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"].startswith("4.57.1")
    return found["answers"]


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 3's kind, one token a byte, with two added tokens."""
    symbols = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", chat_template=CHAT_TEMPLATE
    )
    wrapped.add_tokens(["<|answer|>"])
    wrapped.add_special_tokens({"additional_special_tokens": ["<|think|>"]})
    return wrapped


@dataclass(frozen=True)
class Written:
    """A base model, an adapter that was trained on it, its checkpoint, and a checkpoint of all weights."""

    base: Path
    adapted: PeftModel
    adapter: Path
    all_weights: Path


def base_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    tied = kind in ("qwen2", "llama3-tied")
    sizes = {**SIZES, "tie_word_embeddings": tied}
    if kind.startswith("qwen2"):
        config = Qwen2Config(**sizes, vocab_size=258, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        return Qwen2ForCausalLM(config)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=260, rope_parameters=LLAMA3))


def checkpoint(policy: Any, folder: Path) -> Path:
    optimizer = AdamW(
        [parameter for parameter in policy.model.parameters() if parameter.requires_grad], OptimizerConfig()
    )
    return Checkpoints(CheckpointConfig(save_path=folder), policy, optimizer).save(Progress(3, 3))


def write(kind: str, folder: Path) -> Written:
    base_model(kind).save_pretrained(folder / "base")
    tokenizer = build_tokenizer() if kind.startswith("qwen2") else llama_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    model = base_model(kind)
    model.config._name_or_path = str(folder / "base")
    options = BridgeConfig.model_validate({"weight_bridge_mode": "lora_only", "lora_r": 8, "lora_alpha": 64})
    adapted = add_adapter(base_model(kind).requires_grad_(False), options, seed=0)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    fill_b(adapted)
    model.requires_grad_(True)
    policy = AllWeights(model, read_tokenizer(str(folder / "base")), torch.float32)
    trained = checkpoint(Adapter(adapted), folder / "adapters"), checkpoint(policy, folder / "all")
    return Written(folder / "base", adapted, *trained)


@dataclass(frozen=True)
class Answers:
    """What readers of the older and of the tests' own versions answered, by the names of jobs."""

    old: dict[str, dict[str, Any]]
    new: dict[str, dict[str, Any]]
    llama3: Written
    folder: Path
    """Of the exports of `llama3`."""


@pytest.fixture(scope="module")
def answers(older: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Each way of writing a model or an adapter, each architecture, and the demo model."""
    root = tmp_path_factory.mktemp("written")
    jobs: dict[str, tuple[Path, Path | None]] = {"demo": (demo_model, None)}
    made = {kind: write(kind, root / kind) for kind in KINDS}
    for kind, each in made.items():
        folder, tokenizer = root / kind, read_tokenizer(str(each.base))
        models = MergedModels(str(each.base), each.adapted, tokenizer, torch.float32, folder / "served")
        ways = {
            "merged": ExportOptions(each.adapter, folder / "merged", merge=True),
            "exported": ExportOptions(each.all_weights, folder / "exported"),
            "rounded": ExportOptions(each.all_weights, folder / "rounded", dtype="bfloat16"),
        }
        jobs |= {f"{kind} {way}": (export_checkpoint(options), None) for way, options in ways.items()}
        jobs[f"{kind} served"] = Path(models.export(3)), None
        jobs[f"{kind} adapter"] = each.all_weights, export_checkpoint(ExportOptions(each.adapter, folder / "adapter"))
        jobs[f"{kind} all"] = each.all_weights, None
    for architecture in CONFIGS:
        (folder := root / f"architecture {architecture}").mkdir()
        export_model(random_model(architecture), None, folder, torch.float32)
        jobs[f"architecture {architecture}"] = folder, None
    bare: dict[str, tuple[Path, Path | None]] = {}
    whole = made["llama3"].all_weights
    config = json.loads((whole / "config.json").read_text())
    for lost in LOST:
        export_checkpoint(ExportOptions(whole, root / lost))
        (root / lost / "config.json").write_text(json.dumps({k: value for k, value in config.items() if k != lost}))
        bare[lost] = root / lost, None
    every = {
        name: {"folder": str(folder), "adapter": adapter and str(adapter), "prompt": PROMPT, "text": TEXT}
        for name, (folder, adapter) in {**jobs, **bare}.items()
    }
    old = dict(zip(every, read_by(older, [*every.values()]), strict=True))
    new = {name: json.loads(json.dumps(older_reader.read(every[name]))) for name in jobs}
    return Answers(old, new, made["llama3"], root / "llama3")


def test_older_readers_answers(answers: Answers) -> None:
    new = answers.new
    assert {name: answers.old[name] for name in new if answers.old[name] != new[name]} == {}
    for kind in KINDS:
        merged, served, adapter, plain, exported, rounded = (
            new[f"{kind} {way}"] for way in ("merged", "served", "adapter", "all", "exported", "rounded")
        )
        assert merged["tokens"] == served["tokens"] == adapter["tokens"] != plain["tokens"] == exported["tokens"]
        assert merged["text"] == TEXT and (plain["dtype"], rounded["dtype"]) == ("float32", "bfloat16")


@pytest.mark.parametrize("lost", LOST)
def test_older_readers_need_the_older_keys(answers: Answers, lost: str) -> None:
    """The prompt is long enough for the tests above to see a lost base or scaling."""
    assert answers.old[lost]["tokens"] != answers.old["llama3 all"]["tokens"]


def test_older_readers_answer_as_the_server(answers: Answers, tmp_path: Path) -> None:
    flags = ("--max-model-len", "256", "--max-lora-rank", "8", "--lora-root", str(answers.folder), "--dtype", "float32")
    with serve(answers.llama3.base, tmp_path, *flags) as server:

        def greedy() -> list[int]:
            return server.generate(PROMPT, max_tokens=older_reader.LENGTH, temperature=0, ignore_eos=True).token_ids[0]

        before = greedy()
        loaded = server.post("/lora/load", {"adapter_path": str(answers.folder / "adapter")})
        assert loaded.status_code == 200, loaded.text
        after = greedy()
    base, with_adapter, whole = (answers.old[f"llama3 {way}"] for way in ("all", "adapter", "merged"))
    assert base["tokens"] == before != after == with_adapter["tokens"] == whole["tokens"]
