"""Small inputs for the tests of the trainer's pure parts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from grpo_trainer.rollouts.groups import Group, RolloutBatch, Sample, Teacher
from vllm_server.protocol import BridgeInfo, WorkerInfo

VOCAB = 11
E = TypeVar("E", bound=Exception)


def sample(
    prompt: Sequence[int],
    completion: Sequence[int],
    reward: float,
    *,
    logprobs: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
    temperature: float = 1.0,
    version: int | None = None,
    supervised: bool = False,
    teacher: Sequence[dict[int, float]] | None = None,
) -> Sample:
    """A sample whose `logprobs`, `advantages` and `teacher` (logprobs by token) are given for the completion only."""
    return Sample(
        tokens_T=np.array([*prompt, *completion], np.int64),
        positions=np.arange(len(prompt), len(prompt) + len(completion)),
        reward=reward,
        advantages=None if advantages is None else np.array(advantages, np.float32),
        rollout_logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        version=version,
        temperature=temperature,
        supervised=supervised,
        teacher=None if teacher is None else taught(teacher),
    )


def untrained(sample: Sample, **changes: Any) -> Sample:
    """The same sample, of which no token is trained."""
    return replace(sample.cut(len(sample.tokens_T), trained=False), **changes)


def taught(rows: Sequence[dict[int, float]]) -> Teacher:
    """Return what a teacher gives for a completion."""
    ids_NK = np.zeros((len(rows), max(map(len, rows))), np.int64)
    logprobs_NK = np.full(ids_NK.shape, -np.inf, np.float32)
    for n, row in enumerate(rows):
        ids_NK[n, : len(row)], logprobs_NK[n, : len(row)] = list(row), list(row.values())
    return Teacher(ids_NK, logprobs_NK)


def batch(*groups: Sequence[Sample]) -> RolloutBatch:
    return RolloutBatch("b", tuple(Group(tuple(group), environment=0) for group in groups))


class TinyModel(nn.Module):
    """An embedding and a head: logits of a position depend on its token and on the one before, as in a causal model."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        hidden = self.embed(input_ids)
        hidden = hidden + 0.5 * torch.roll(hidden, 1, dims=1) * (torch.arange(input_ids.shape[1]) > 0)[None, :, None]
        return type("Output", (), {"logits": self.head(hidden)})()


OURS = "GPU-ours"
"""The trainer's GPU."""


def worker(rank: int = 0, uuid: str = OURS, visible: list[str] | None = None) -> WorkerInfo:
    """A server's worker on a GPU; by default it sees that one alone."""
    return WorkerInfo(rank=rank, gpu_uuid=uuid, visible_gpus=[uuid] if visible is None else visible)


def bridge_info(*workers: WorkerInfo, machine: str = "here") -> BridgeInfo:
    """What a server says of itself; by default it has one worker on the trainer's GPU."""
    return BridgeInfo(
        enabled=True, shared_weights=False, update_count=0, last_update_time=0.0, model_name="m",
        served_model_name="m", device="cuda", dtype="bfloat16", boot_id="b", pid=1, policy_version=0,
        lora_name="policy", max_lora_rank=8, max_loras=4, keep_versions=4, max_model_len=512,
        logprobs_mode="processed_logprobs", vllm_version="0", lora_dtype="bfloat16", machine=machine,
        workers=list(workers) or [worker()],
    )  # fmt: skip


@contextmanager
def refusing(
    kind: type[E],
    field: str,
    status: int | None = None,
    got: str | None = None,
    *,
    wanted: str | None = None,
    words: Sequence[str] = (),
) -> Iterator[pytest.ExceptionInfo[E]]:
    """The block raises this error of this field, whose other parts have these words; a server's has this status."""
    with pytest.raises(kind) as refused:
        yield refused
    error: Any = refused.value
    for part, value in {"field": field, "status": status, "got": got, "wanted": wanted}.items():
        assert value is None or getattr(error, part) == value
    assert all(word in f"{error.summary} {error.got} {error.wanted} {error.fix}" for word in words)


def values_of(flags: str) -> dict[str, object]:
    """The values of flags by key; a flag without a value is a switch."""
    values: dict[str, object] = {}
    key = ""
    for word in shlex.split(flags):
        if word.startswith("--"):
            key, values[word.removeprefix("--")] = word.removeprefix("--"), True
        else:
            values[key] = word
    return values
