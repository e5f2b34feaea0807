"""The interface of a weight bridge, and what every bridge requires of an inference server."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import nn

from grpo_common.errors import Problem
from grpo_trainer.engine.forward import evaluating
from grpo_trainer.errors import warn_once
from grpo_trainer.metrics.types import Metric, Metrics, Sum, reduce
from grpo_trainer.parallel.world import World
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """The policy version that the server generates with from now on, as the server has confirmed."""

    version: int
    name: str
    metrics: Metrics


def quiet(version: int) -> dict[str, Metric]:
    """Return the metrics of a publish that had nothing to do."""
    return {"train/sync_time": Sum(0.0), "publish/version": Sum(version)}


def at_server(url: str, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of a server with its URL in front."""
    return [replace(one, field=": ".join(filter(None, [f"server {url}", one.field]))) for one in problems]


def largest(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Return the largest of any server's metrics, by name."""
    rows = [reduce(each) for each in metrics]
    return {name: Sum(max(row[name] for row in rows if name in row)) for row in rows for name in row}


class WeightBridge(Protocol):
    """Keeps one inference server on the trainer's weights. A context manager: its exit frees the bridge's resources.

    If several processes train together, all of them call `connect`, `prove`, `updating`, `publish` and `welcome`.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the bridge's resources."""
        ...

    def connect(self, policy_version: int) -> int:
        """Wait for the server, check that it supports this bridge, and agree on the first version.

        Args:
            policy_version: the version of the trainer's weights, by the trainer's own count.

        Returns:
            That version, or a higher one if the server has served that version before.

        Raises:
            ServerError: the server does not answer in time, or refuses.
            BridgeError: it does not support this bridge.
        """
        ...

    def prove(self) -> float | None:
        """Prove that the server generates with the published weights and with no others.

        Returns:
            Mean |server - trainer| on the present weights, in nats a token; None: not measured.

        Raises:
            BridgeError: the server generates with other weights.
        """
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Return the context in which the trainer's weights change; a bridge that shares memory fences the server.

        The next published version is one higher than the last.
        """
        return nullcontext()  # the server has its own copy

    def publish(self, version: int) -> Published:
        """Make the server generate with the trainer's weights as `version`, if this bridge updates at this version.

        After a skipped step the version is the same as before, and there is nothing to do.

        Returns:
            The version that the server generates with: `version` or an older one, and the metrics, times in seconds.

        Raises:
            ServerError: the server does not answer, or refuses the weights.
            BridgeError: the weights can't be sent, or the servers have different ones.
        """
        ...

    def has_news(self) -> bool:
        """Return whether servers have come or gone since the last publish or `welcome`; only rank 0 asks."""
        return False

    def welcome(self) -> None:
        """Bring servers that have come to the newest version, and part with those that are gone.

        Called if there is news while the trainer waits for a batch.
        """


@dataclass(frozen=True, repr=False)
class FirstsBridge(WeightBridge):
    """A bridge that only rank 0 has. All ranks call this one together."""

    world: World
    own: WeightBridge
    """On rank 0, the bridge."""

    def __enter__(self) -> Self:
        if self.world.leads:
            self.own.__enter__()
        return self

    def close(self) -> None:
        if self.world.leads:
            self.own.close()

    def connect(self, policy_version: int) -> int:
        return self.world.lead(lambda: self.own.connect(policy_version))

    def prove(self) -> float | None:
        return self.world.lead(lambda: self.own.prove())

    def updating(self) -> AbstractContextManager[None]:
        return self.own.updating() if self.world.leads else nullcontext()

    def publish(self, version: int) -> Published:
        return self.world.lead(lambda: self.own.publish(version))

    def has_news(self) -> bool:
        return self.own.has_news()

    def welcome(self) -> None:
        self.world.lead(lambda: self.own.welcome())


def problems_of(
    info: BridgeInfo,
    seq_len: int,
    *,
    by: str = "start it with",
    model: nn.Module | None = None,
) -> list[Problem]:
    """Return the problems that prevent training, and log a warning for settings that may be intended.

    Args:
        by: first words of a fix: how the user passes the server an argument.
        model: the trainer's model, if the user started the server separately; else None.
    """
    if info.max_model_len < seq_len:
        warn_once(log, "the server serves at most %d tokens, --seq-len is %d", info.max_model_len, seq_len)
    if model is not None and info.logits_dtype is not None:
        # If only one side rounds its logits to 16 bits, logprobs differ more than if both sides did. A server in fp32
        # has fp32 logits in any case. All processes compute: a model may lie in parts of all of them.
        device = next(model.parameters()).device
        # 16 tokens: a cuDNN without its precompiled engines has no convolution of one (gated delta nets)
        ids_BT = torch.zeros(1, 16, dtype=torch.int64, device=device)
        with torch.no_grad(), evaluating(model):
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        dtype = str(logits_BTV.dtype).removeprefix("torch.")
        if (info.logits_dtype == "float32") != (dtype == "float32") and info.dtype != "float32":
            warn_once(
                log,
                "the server's logits are %s, the trainer's %s: their logprobs differ by more than they need; start the "
                "server with --logits-dtype %s, or give the trainer the other",
                *(info.logits_dtype, dtype, "float32" if dtype == "float32" else "model"),
            )
    if info.logprobs_mode == "processed_logprobs":
        return []
    wanted = "processed_logprobs"
    return [
        Problem(
            field="--logprobs-mode",
            got=info.logprobs_mode,
            wanted=wanted,
            fix=f"{by} --logprobs-mode {wanted}",
            summary="the inference server does not return the logprobs that it samples from",
        )
    ]
