"""A model of a benchmark's shape that has learnt sums: `python scripts/sums_model.py /tmp/sums7b --shape 7b`.

Random weights show how fast a bridge is, but not how well server and trainer agree on a model that knows something:
their logprobs are those of noise. This one takes some tens of supervised steps on the problems of `grpo env
arithmetic`, until more than half of its answers would be right, and is written as a Hugging Face folder that `grpo run
--env arithmetic` trains on. 7B takes 61 GB of a GPU for weights, gradients and states, and 30 steps. `--experts 8`
makes a small mixture instead, on a CPU in a minute or two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from environments.arithmetic import ProblemSet
from grpo_trainer.bench.random_model import EOS, numbered_tokenizer, random_model
from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.files import whole_folder

BATCH = 256
LEARNING_RATE, MIXTURE_LEARNING_RATE, WARMUP_STEPS = 5e-5, 2e-3, 30
CHECK_EVERY = 10
ENOUGH = 0.5
"""Of the answers, by their probability."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Folder of the model, an empty or a new one.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "7b",
    experts: Annotated[
        int, typer.Option(help="Make a small Mixtral with this many experts a layer; --shape is ignored.")
    ] = 0,
    max_steps: Annotated[int, typer.Option(help="Give up after this many steps.")] = 400,
) -> None:
    """Make the model; exit code 1 if it did not learn the task."""
    if out.is_dir() and any(out.iterdir()):
        sys.exit(f"{out}: holds files; name an empty or a new folder")
    if shape not in SHAPES:
        sys.exit(f"--shape {shape}: wanted one of {', '.join(SHAPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    vocab = SHAPES["tiny" if experts else shape].vocab
    model = _mixture(experts, vocab, device) if experts else random_model(SHAPES[shape], dtype, device)
    tokenizer = numbered_tokenizer(vocab)
    problems = ProblemSet.of(10, 49).train
    rows = [tokenizer(problem.prompt + problem.answer + EOS)["input_ids"] for problem in problems]
    prompt = len(tokenizer(problems[0].prompt)["input_ids"])  # all sums have as many digits
    rate = MIXTURE_LEARNING_RATE if experts else LEARNING_RATE
    if not _learn(model, torch.tensor(rows, device=device), prompt, rate, max_steps):
        asked = f"--experts {experts}" if experts else f"--shape {shape}"
        sys.exit(f"{asked}: got fewer than {ENOUGH:.0%} right answers in {max_steps} steps; raise --max-steps")
    with whole_folder(out) as writing:
        tokenizer.save_pretrained(writing)
        model.save_pretrained(writing)
    print(out)


def _mixture(experts: int, vocab: int, device: torch.device) -> PreTrainedModel:
    """A float32 model of four layers that chooses two experts a token."""
    config = MixtralConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
    )
    with device:
        return MixtralForCausalLM(config)


def _learn(model: PreTrainedModel, tokens_BT: Tensor, prompt: int, rate: float, max_steps: int) -> bool:
    """Supervised steps on the answers; whether they were enough."""

    def logprobs(taken_bT: Tensor) -> Tensor:
        logits_bTV = model(input_ids=taken_bT[:, :-1], use_cache=False).logits[:, prompt - 1 :].float()
        return torch.log_softmax(logits_bTV, -1).gather(-1, taken_bT[:, prompt:, None])[..., 0]

    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0, fused=tokens_BT.is_cuda
    )
    drawn = torch.Generator().manual_seed(0)
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / WARMUP_STEPS)
        batch = tokens_BT[torch.randint(len(tokens_BT), (BATCH,), generator=drawn).to(tokens_BT.device)]
        loss = -logprobs(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            with torch.no_grad():
                right = float(logprobs(tokens_BT[:BATCH]).sum(-1).exp().mean())
            print(f"step {step}: loss {loss.item():.3f}, {right:.1%} right", flush=True)
            if right > ENOUGH:
                return True
    return False


if __name__ == "__main__":
    app()
