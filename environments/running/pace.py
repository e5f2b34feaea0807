"""How many groups an environment may start now, so that it stays close enough to the trainer. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from environments.api import wire
from environments.config import BaseEnvConfig

OVERTAKEN = 5
"""Default limit of a group's staleness, in versions, if newer groups can overtake it."""
MOST_BATCHES = 3
"""Most batches of groups in flight by default, however few of their completions run at a time."""
RECENT_GROUPS = 32
"""Groups over which `RunningShare` averages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the trainer sets."""

    batch_size: int  # in sequences
    last_step: int = -1  # -1: there is none
    max_staleness: int | None = None  # of a group when it is trained on, in versions; None: there is no limit


@dataclass(frozen=True, slots=True)
class InFlight:
    """Groups that are generated, scored or posted."""

    groups: int = 0
    oldest_step: int | None = None
    """The trainer's step when the oldest of them was started; None: there is none."""
    running_share: float = 1.0
    """As of `RunningShare`, in (0, 1]."""


class RunningShare:
    """Mean share of a group's completions that run while the group is generated.

    The completions of a group start together and the group lasts as long as its longest one. So the share of a group
    is the mean length of its completions divided by the longest.
    """

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=RECENT_GROUPS)

    def add(self, lengths: Sequence[int]) -> None:
        """Add a group by the lengths of its completions in tokens."""
        if longest := max(lengths, default=0):
            self._shares.append(fmean(lengths) / longest)

    @property
    def value(self) -> float:
        """The mean over the last groups; 1 before the first."""
        return fmean(self._shares) if self._shares else 1.0


def groups_to_start(status: wire.StatusEnv, limits: Limits, config: BaseEnvConfig, in_flight: InFlight) -> int:
    """Return how many groups to start now. Count `in_flight` *before* the request for `status`.

    Until the trainer's next batch is complete, enough groups are kept in flight that one batch of completions runs:
    more than one batch of groups if their lengths differ, but at most `MOST_BATCHES`, and only as long as the oldest
    group stays within `OVERTAKEN` versions. So the server does not drain while a batch's last groups finish. With
    `max_batches_offpolicy`, or with several environments, queued and in-flight groups stay within that many batches
    (default 1).

    No group is started that could exceed `Limits.max_staleness` when it is trained on, or that the remaining
    steps do not need. A share reserved by `min_batch_allocation` is filled even if the queue is full, because the
    trainer waits for it.
    """
    batch = limits.batch_size / config.group_size
    left = limits.last_step - status.current_step if limits.last_step >= 0 else math.inf
    limit = batch * min(config.max_batches_offpolicy or 1, left)
    # Groups that may be trained on before a new one.
    leased = status.leased or 0
    ahead = leased + status.queue_size + in_flight.groups
    lag = limits.max_staleness
    if config.max_batches_offpolicy is None and status.env_weight >= 1.0:
        complete = max(0.0, leased - batch) + status.queue_size  # groups beyond the batch in training
        running = math.ceil(batch * min(MOST_BATCHES, 1 / in_flight.running_share))
        room = running - in_flight.groups if complete < batch else 0
        lag = OVERTAKEN if lag is None else lag
    else:  # batches of several environments are mixed by their weights, so each has a share of the limit
        share = math.ceil(limit * min(1.0, status.env_weight)) - status.self_queue_size
        room = min(math.ceil(limit) - status.queue_size, share) - in_flight.groups
    if lag is not None:
        # All groups ahead may be trained on before the oldest in flight. The steps since its start, plus the steps that
        # these groups suffice for, must be at most `lag` plus the step that trains on it.
        age = 0 if in_flight.oldest_step is None else max(0, status.current_step - in_flight.oldest_step)
        room = min(room, math.ceil((lag + 1 - age) * batch) - ahead)
    if left < math.inf:
        room = min(room, math.ceil(left * batch) - ahead)
    if config.min_batch_allocation is not None:
        room = max(room, math.ceil(limit * config.min_batch_allocation) - status.self_queue_size - in_flight.groups)
    if config.max_concurrent_groups is not None:
        room = min(room, config.max_concurrent_groups - in_flight.groups)
    return max(0, room)
