"""What would make a run fit that does not: options are tried on the memory plan, and only those that help are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_trainer.config.bridge import CheckpointRestart, LoraOnly, LoraOptions, SharedVllm
from grpo_trainer.memory import MemoryPlan, MemoryRow, Setup

SHARES = (0.1, 0.9)
"""Of a GPU, what `--server.gpu-memory-utilization` is tried with, in steps of 0.05."""
NOTHING_HELPS = "no option makes it fit: choose a smaller model, or a machine with more memory"


@dataclass(frozen=True)
class Planned(Setup):
    """A setup, and the options that were changed to make it."""

    said: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        plan = self.plan()
        return not plan.problems and not plan.is_tight

    def saying(self, text: str, **changed: Any) -> Planned:
        return replace(self, said=(*self.said, text), **changed)

    def with_section(self, text: str, section: str, **values: Any) -> Planned:
        inner = getattr(self.config, section).model_copy(update=values)
        return self.saying(text, config=self.config.model_copy(update={section: inner}))


Change = Callable[[Planned], Planned | None]
"""One option's change; None: it changes nothing here."""


def largest_rows(plan: MemoryPlan, device: int) -> list[MemoryRow]:
    """Return the three largest parts of what lies on a device."""
    return sorted((row for row in plan.rows if row.device == device), key=lambda row: -row.nbytes)[:3]


def advice(planned: Planned) -> str:
    """Return what makes the run fit, at most three ways: options that do so together where they cost less than any that
    does alone, and those that do alone."""
    alone = [change for change in CHANGES if (changed := change(planned)) is not None and changed.fits]
    together = _fewest(CHANGES[: CHANGES.index(alone[0])] if alone else CHANGES, planned)
    ways = [" with ".join(_all(changes, planned).said) for changes in (together, *([change] for change in alone))]
    return "; or ".join(list(filter(None, ways))[:3]) or NOTHING_HELPS


def _fewest(changes: Sequence[Change], planned: Planned) -> Sequence[Change]:
    """The changes without those that are not needed to make it fit; none if all of them are not enough."""
    if not _all(changes, planned).fits:
        return ()
    for change in reversed(changes):
        fewer = [each for each in changes if each is not change]
        if _all(fewer, planned).fits:
            changes = fewer
    return changes


def _all(changes: Sequence[Change], planned: Planned) -> Planned:
    for change in changes:
        planned = change(planned) or planned
    return planned


def other_shares(now: Planned) -> list[Planned]:
    """Return the setup with smaller and larger shares of a GPU for the server, from the smallest on."""
    low, high = SHARES
    shares = [round(low + 0.05 * n, 2) for n in range(round((high - low) / 0.05) + 1)]
    return [
        now.saying(f"--server.gpu-memory-utilization {share}", server=replace(now.server, gpu_share=share))
        for share in shares
    ]


def _own_gpu(now: Planned) -> Planned | None:
    last = now.devices.count - 1
    if not last or now.trainers > 1 or now.config.shares_weights:
        return None
    return now.with_section(f"--device cuda:{last}", "model", device=f"cuda:{last}")


def _server_share(now: Planned) -> Planned | None:
    """The share nearest to the present one with which it fits, or else the least that leaves room for a sequence."""
    if not now.on_gpu:
        return None
    tried = other_shares(now)
    nearest = sorted(tried, key=lambda each: abs(each.server.gpu_share - now.server.gpu_share))
    serving = (each for each in tried if each.plan().kv_tokens >= now.server.max_model_len)
    return next((each for each in nearest if each.fits), None) or next(serving, None)


def _shorter_server(now: Planned) -> Planned | None:
    longest = now.config.model.seq_len
    if now.server.max_model_len <= longest:
        return None
    return now.saying(f"--server.max-model-len {longest}", server=replace(now.server, max_model_len=longest))


def _smaller_passes(now: Planned) -> Planned | None:
    longest = now.config.model.seq_len
    if now.config.largest_pass <= longest:
        return None
    return now.with_section(f"--max-tokens-per-microbatch {longest}", "compute", max_tokens_per_microbatch=longest)


def _shared_vllm(now: Planned) -> Planned | None:
    if not isinstance(now.config.bridge, CheckpointRestart) or now.trainers > 1:
        return None
    bridge = SharedVllm(train_layers=now.config.bridge.train_layers)
    return now.saying("--weight-bridge-mode shared_vllm", config=now.config.model_copy(update={"bridge": bridge}))


def _lora(now: Planned) -> Planned | None:
    if isinstance(now.config.bridge, LoraOptions):
        return None
    config = now.config.model_copy(update={"bridge": LoraOnly()})
    said = tuple(text for text in now.said if not text.startswith("--weight-bridge-mode"))
    return replace(now, said=said).saying("--weight-bridge-mode lora_only", config=config)


def _set(text: str, helps: Callable[[Planned], bool], section: str, **values: Any) -> Change:
    """One option with one value, where it may help."""
    return lambda now: now.with_section(text, section, **values) if helps(now) else None


def _base_is_its_own(now: Planned) -> bool:
    """Whether the trainer holds a base model of an adapter, in 16 or 32 bits."""
    bridge = now.config.bridge
    return isinstance(bridge, LoraOnly) and not bridge.share_base and not now.config.model.load_in_4bit


CHANGES: tuple[Change, ...] = (
    *(_own_gpu, _server_share, _shorter_server, _smaller_passes),
    _set(
        "--gradient-checkpointing",
        lambda now: not now.config.model.gradient_checkpointing and not now.chooses,
        "model",
        gradient_checkpointing=True,
    ),
    _set(
        "--optimizer adamw_8bit",
        lambda now: now.config.optimizer.optimizer == "adamw",
        "optimizer",
        optimizer="adamw_8bit",
    ),
    *(_shared_vllm, _lora),
    _set("--share-base", lambda now: _base_is_its_own(now) and now.trainers == 1, "bridge", share_base=True),
    _set("--load-in-4bit", _base_is_its_own, "model", load_in_4bit=True),
)
"""First what costs least: what is learnt stays the same, then speed goes, then it is another kind of training."""
