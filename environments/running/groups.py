"""Make a group of an item, and judge whether it may be used; many unusable groups in a row end an environment."""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, PromptRefused, PromptTooLong, UnusableRow
from environments.peers.http import PeerError, PeerRefused
from environments.running.pace import RunningShare
from environments.scoring import OF_CODE, ScoreTimeout, contain_tasks, error_of_code, limited, settled
from environments.trajectory import check_sampled_from_all, trained_tokens, truncated_of
from grpo_common.errors import UserError

if TYPE_CHECKING:
    from environments.base import BaseEnv

log = logging.getLogger(__name__)

LOST_IN_A_ROW: Final = 16
"""After this many lost groups in a row, the environment counts as broken."""
LONG_IN_A_ROW = 1000
"""As many instead, if their prompts are too long: most rows of large data are not checked before they are drawn."""
UNSCORED_IN_A_ROW = 256
"""After this many groups in a row to which no reward applies, the environment counts as broken."""
EQUAL_IN_A_ROW = 64
"""After this many groups in a row that are dropped because their scores are all equal, the user is warned."""


class GroupTimeout(UserError, TimeoutError):
    """A group was not made within `--env.group_timeout`."""


class Unwritable(UserError, ValueError):
    """A group has a value that neither a post nor a file can have, such as half a surrogate pair."""


LOSSES: Final = {
    PeerRefused: "refused by the server",
    PromptTooLong: "prompt too long",
    PromptRefused: "prompt refused by the chat template",
    ScoreTimeout: "scored for too long",
    UnusableRow: "unusable row",
    GroupTimeout: "took too long",
    Unwritable: "can't be written",
}
"""Errors that lose one group, and the reason under which it is counted."""
ALL_EQUAL: Final = "all scores equal"
ALL_UNSCORED: Final = "no reward applies"
NOTHING: Final = "came to nothing"
"""Why there is no group, if the environment returned none."""


class EnvironmentFailed(PeerError):
    """The environment's code fails for one group after another."""


def unfit(group: wire.ScoredData, config: BaseEnvConfig, max_token_len: int) -> str | None:
    """Return why a group must not be used; None if it may be. `max_token_len` is as of `GroupMaker`."""
    expected = (group.group_overrides or {}).get("group_size", config.group_size)
    overrides = group.overrides or [{} for _ in group.tokens]
    if len(group.tokens) != expected:
        return f"{len(group.tokens)} sequences for {expected}"
    if all(entry == wire.IGNORED for mask in group.masks for entry in mask):
        if not wire.counted_scores(group):
            return ALL_UNSCORED
        if not any(truncated_of(group)):  # others of them may have failed
            return "no token to train on: all completions are empty"
    if not all(map(math.isfinite, group.scores)):
        return "a score that is not finite"
    if config.ensure_scores_are_not_same and len(set(wire.counted_scores(group))) == 1:
        return ALL_EQUAL
    try:
        parts = [wire.branch_lengths(own, len(tokens)) for own, tokens in zip(overrides, group.tokens, strict=True)]
    except ValueError as error:
        return f"{wire.BRANCHES}: {error}"
    if max_token_len > 0 and max(map(max, parts)) > max_token_len:
        return f"longer than the trainer's {max_token_len} tokens"
    return None


def check_writable(group: wire.ScoredData, config: BaseEnvConfig) -> None:
    """Raise Unwritable for a group that can't be posted, or written to the file of groups if there is one."""
    group = msgspec.structs.replace(group, routed_experts=None)  # megabytes of the server's own
    try:
        wire.encode_group(group)
        if config.data_path_to_save_groups is not None:
            wire.encode(group)
    except (ValueError, TypeError, OverflowError) as error:
        raise Unwritable(
            field="a group",
            got=str(error),
            wanted="texts in UTF-8, whole numbers of 64 bits, and no objects of classes",
            fix="look at its messages, and at what rewards pass to log_extra",
        ) from None


class Failures:
    """Logs each distinct error of an environment's code once, with its traceback; the same line raises the same error.

    The tally counts them all. A `UserError` says where its cause is, so it has no traceback.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def log(self, name: str, item: object, error: Exception) -> None:
        """Log an error, unless its kind is known."""
        if isinstance(error, UserError):
            key = (type(error).__name__, error.field, error.summary, error.wanted)
        else:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            key = (type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in last))
        if key in self._known:
            return
        self._known.add(key)
        if isinstance(error, UserError):
            log.warning("%s failed for %.200r: %s", name, item, error)
        else:
            log.error("%s failed for %.200r (logged once for each error)", name, item, exc_info=error)


async def set_up(env: BaseEnv[Any, Any]) -> None:
    """Call `setup`; no task that begins from now on ends the process, and after `setup` the event loop is watched."""
    contain_tasks()
    await settled(env.setup())
    env.is_set_up = True


class GroupMaker:
    """Makes the groups of `serve` and `process`.

    Lost are groups that the environment, or what it asks, could not make. Dropped are also groups of no use (all scores
    equal): the task may be too easy or too hard, but the environment works. Both are counted in `dropped`, by reason.
    """

    def __init__(self, env: BaseEnv[Any, Any], dropped: Counter[str]) -> None:
        self.max_token_len = -1  # the trainer's longest sequence; -1: there is no limit
        self.share = RunningShare()
        self._env = env
        self._dropped = dropped
        self._lost = self._long = self._unscored = self._equal = 0

    async def next_item(self) -> Any:
        """Return the next item, or None if there are no more; raise ScoreTimeout if it takes too long."""
        return await self._env.scoring.call("get_next_item()", settled(self._env.get_next_item()))

    async def make(self, item: Any) -> wire.ScoredData | None:
        """Return the item's group for the trainer; None if there is none, which is counted.

        Raise ConfigError for wrong settings, PeerError if the server is gone, and EnvironmentFailed if one group after
        another was lost, or has no reward.
        """
        env, reason, seconds = self._env, None, self._env.config.group_timeout
        late = GroupTimeout(
            field="--env.group_timeout",
            got=f"{seconds:g} s",
            wanted="a group",
            fix="raise it, or limit the time of the requests that collect_trajectories sends",
        )
        try:
            group = await limited(seconds, env.scored(item), late)
            if group is not None:
                check_sampled_from_all(group, env.name)
                self.share.add([trained_tokens(mask) for mask in group.masks])
                reason = unfit(group, env.config, self.max_token_len)  # its lists may have other lengths
                if reason is None:
                    check_writable(group, env.config)
        except OF_CODE as raised:  # it loses one item
            error = error_of_code(raised)
            loss = next((loss for kind, loss in LOSSES.items() if isinstance(error, kind)), "")
            if not loss and isinstance(error, PeerError | ConfigError):
                raise
            if not loss:
                env.failures.log(env.name, item, error)
            self.lose(loss or "failed", error if isinstance(error, UserError) else repr(error), is_logged=not loss)
            return None
        if group is None:
            self._dropped[NOTHING] += 1
            return None
        self._unscored = self._unscored + 1 if reason == ALL_UNSCORED else 0
        if self._unscored >= UNSCORED_IN_A_ROW:
            raise EnvironmentFailed(
                f"no reward applies to any answer of {self._unscored} groups in a row",
                field=env.name,
                got="None for every score",
                wanted="numbers",
                fix="look for a score that returns nothing, and for columns that it misses",
            )
        self._equal = self._equal + 1 if reason == ALL_EQUAL else 0
        if self._equal == EQUAL_IN_A_ROW:
            log.warning(
                "%s: the scores of each of the last %d groups are all equal (%g in the last one), so none was sent and "
                "the trainer gets no batch: give an easier or harder task or another score, a larger --env.group_size, "
                "or --env.ensure_scores_are_not_same false",
                env.name,
                self._equal,
                wire.counted_scores(group)[0],
            )
        if reason in (ALL_EQUAL, ALL_UNSCORED):
            self._dropped[reason] += 1
        elif reason is not None:
            self.lose(reason, f"a group of {env.name} is not used: {reason}")
        return group if reason is None else None

    def lose(self, reason: str, trouble: object, *, is_logged: bool = False) -> None:
        """Count a lost group, and log the first one of a reason since the last step.

        Raises:
            EnvironmentFailed: `LOST_IN_A_ROW` groups were lost one after the other, or `LONG_IN_A_ROW` of long prompts.
        """
        if not is_logged and not self._dropped[reason]:
            log.warning("%s", trouble)
        self._dropped[reason] += 1
        is_long = reason == LOSSES[PromptTooLong]
        self._lost, self._long = self._lost + (not is_long), self._long + is_long
        if self._lost >= LOST_IN_A_ROW or self._long >= LONG_IN_A_ROW:
            lost = self._lost + self._long
            raise EnvironmentFailed(f"{lost} groups in a row were lost", field=self._env.name, got=trouble)

    def used(self) -> None:
        """Count lost groups from 0: a group was used."""
        self._lost = self._long = 0
