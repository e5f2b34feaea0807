"""The servers of one trainer: each has its own bridge and its own proof, and receives every published version.

A fixed list is a roster that never changes: there a server that fails ends the run. `grpo run` may list the servers
that there are (`grpo_common.roster`). Then a server that fails a publish, or that the list no longer has, leaves. A
server that the list has and that runs joins: it is proved and gets the newest version before the trainer names it in
its own list, by which environments ask it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, TypeVar

import msgspec

from grpo_common.roster import SERVED_FILE, Member, Served, read_members, read_served
from grpo_trainer.config.server import Server, server_names
from grpo_trainer.errors import BridgeError, LostError, ServerError, warn_once
from grpo_trainer.files import replace_file
from grpo_trainer.metrics.types import Sum
from grpo_trainer.parallel.world import World
from grpo_trainer.server_client import at_url
from grpo_trainer.weights.bridge import Published, WeightBridge, at_server, largest, quiet
from grpo_trainer.weights.broadcast import PresentWeights

log = logging.getLogger(__name__)

T = TypeVar("T")

OpenBridge = Callable[[str, Server], WeightBridge]
"""Returns the bridge to a server by the server's name and settings; it is entered later."""
Failed = BridgeError | ServerError

JOIN_SECONDS = 5.0
"""Time for a server that joins to answer, though it has been ready before; training waits meanwhile."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Between two attempts to connect to a server that runs and does not answer."""
MOST_AT_ONCE = 64
"""Threads that publish."""


class OnlyAheadError(ServerError):
    """No server can take the trainer's version, and without a server there is no batch to train a newer one.

    A trainer that starts again takes a higher version; a supervisor may start it.
    """

    exit_code = os.EX_TEMPFAIL


@dataclass(frozen=True)
class _Waiting:
    """A server that could not join."""

    boot: int
    until: float
    """When it is tried again; infinity: not before it starts again."""
    pause: float
    note: str
    version: int = 0
    """The lowest version with which it is tried again."""


class Fleet(WeightBridge):
    """The bridges of several servers as one.

    A version counts as published when all servers generate with it. Until then, a server with the new version or one
    with the old version may answer a request; each answer names its version. With no server left, training waits for
    one: the next batch needs completions.

    If several processes have parts of the weights, all of them call the fleet together; they have the same lists,
    because only rank 0 reads files and clocks. `weights` None: one process has all that is sent. `config.roster` is the
    run's folder of servers; None: the list never changes.
    """

    def __init__(self, config: Server, open_bridge: OpenBridge, weights: PresentWeights | None = None) -> None:
        self._weights = weights
        self._world = World() if weights is None else weights.world
        self._config, self._open, self._folder = config, open_bridge, config.roster
        self._waiting: dict[str, _Waiting] = {}
        self._published: Published | None = None
        names = server_names(len(config.each))
        listed = self._listed()
        self._boots: dict[str, int] = {}
        self._bridges: dict[str, WeightBridge] = {}
        for name, each in zip(names, config.each, strict=True):
            member = listed.get(each.url) or Member(name, each.url, "", "running")
            self._bridges[each.url] = open_bridge(member.name, each)
            self._boots[each.url] = member.boot
        threads = len(names) if self._folder is None else MOST_AT_ONCE
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="publish")

    def __enter__(self) -> Self:
        with ExitStack() as entering:
            entering.callback(self._threads.shutdown)
            for bridge in self._bridges.values():
                entering.enter_context(bridge)
            entering.pop_all()
        return self

    def close(self) -> None:
        with ExitStack() as leaving:
            leaving.callback(self._threads.shutdown)
            for bridge in self._bridges.values():
                leaving.push(bridge)

    # ------------------------------------------------------------------------------------------- what all are asked

    def connect(self, policy_version: int) -> int:
        """Connect to all servers at the same time; return the highest version that any of them requires to begin with.

        If several processes have parts of the weights, connect to one after the other: each gets them as its version.

        Raises:
            BridgeError, ServerError: names each server that could not be connected to, and why.
        """
        if self._world.alone:
            answers = self._at_once(lambda bridge: bridge.connect(policy_version))
        else:
            bridges = self._bridges.items()
            answers = {url: _answer(url, partial(bridge.connect, policy_version)) for url, bridge in bridges}
        version = max(self._agreed(answers, strict=self._begins(answers)).values())
        # A server may have restarted while it was waited for.
        listed = self._listed()
        self._boots |= {url: listed[url].boot for url in self._boots if url in listed}
        return version

    def prove(self) -> float | None:
        """Prove one server after the other, because a proof changes the trainer's weights for a moment."""
        answers = {url: _answer(url, bridge.prove) for url, bridge in self._bridges.items()}
        gaps = self._agreed(answers, strict=self._begins(answers)).values()
        return None if None in gaps else max(gap for gap in gaps if gap is not None)

    def _begins(self, answers: Mapping[str, object]) -> bool:
        """Return whether no server may fail: as the run begins, or if none is left."""
        is_left = any(not isinstance(answer, Exception) for answer in answers.values())
        folder = self._folder
        return folder is None or not is_left or self._world.lead(lambda: not read_served(folder))

    @contextmanager
    def updating(self) -> Iterator[None]:
        with ExitStack() as held:
            for bridge in self._bridges.values():
                held.enter_context(bridge.updating())
            yield

    def publish(self, version: int) -> Published:
        """Publish to all servers at the same time; each metric is the largest of any server.

        In a list that changes, servers that fail leave, and those that have come join.

        Raises:
            BridgeError, ServerError: a server of a fixed list failed; all servers refused; or the servers now serve
                different versions. The message names them.
        """
        self._let_go()
        if self._weights is not None:
            self._weights.gather(version)
        answers = self._world.lead(lambda: self._at_once(lambda bridge: bridge.publish(version)))
        # If all have failed, and not all are gone, then what is published is at fault.
        none = not any(isinstance(answer, Published) for answer in answers.values())
        at_fault = none and not all(isinstance(answer, ServerError | LostError) for answer in answers.values())
        published = self._agreed(answers, strict=at_fault)
        one = Published(version, "", quiet(version))
        if published:
            if len({each.version for each in published.values()}) > 1:
                served = [f"{each.version} at {url}" for url, each in published.items()]
                raise BridgeError("the servers differ", field="version", got=", ".join(served), wanted=str(version))
            one = replace(next(iter(published.values())), metrics=largest(each.metrics for each in published.values()))
        self._published = one
        if self._folder is None:
            return one
        self._join()
        self._world.lead(self._note)
        return Published(one.version, one.name, {**one.metrics, "publish/servers": Sum(len(self._bridges))})

    def _at_once(self, ask: Callable[[WeightBridge], T]) -> dict[str, T | Failed]:
        """Ask all bridges in threads, each with its own time limits, and return what came of each."""
        asked = {url: self._threads.submit(_answer, url, partial(ask, bridge)) for url, bridge in self._bridges.items()}
        wait(asked.values())  # even if one raises
        return {url: future.result() for url, future in asked.items()}

    def _agreed(self, answers: Mapping[str, T | Failed], *, strict: bool) -> dict[str, T]:
        """Return the answers; servers that failed leave.

        Raises:
            BridgeError, ServerError: of all that failed, if it is `strict` or the list is fixed.
        """
        failed = {url: answer for url, answer in answers.items() if isinstance(answer, BridgeError | ServerError)}
        errors = list(failed.values())
        if errors and (strict or self._folder is None):
            kind = ServerError if all(isinstance(error, ServerError) for error in errors) else BridgeError
            raise errors[0] if len(errors) == 1 else kind.of([each for error in errors for each in error.problems])
        for url, error in failed.items():
            self._part(url, str(error))
        return {url: answer for url, answer in answers.items() if not isinstance(answer, BridgeError | ServerError)}

    # ------------------------------------------------------------------------------------------- a list that changes

    def _listed(self) -> dict[str, Member]:
        folder = self._folder
        if folder is None:
            return {}
        return self._world.lead(lambda: {member.url: member for member in read_members(folder)})

    def has_news(self) -> bool:
        return self._folder is not None and self._published is not None and bool(self._gone() or self._comers())

    def welcome(self) -> None:
        """Let servers join that have come, and those leave that are gone."""
        if self._folder is not None and self._published is not None and (self._let_go() | self._join()):
            self._world.lead(self._note)

    def _gone(self) -> dict[str, str]:
        """Return the servers that the list no longer has as they were, and what has become of each."""
        listed = self._listed()
        return {
            url: f"{listed[url].state}" if url in listed else "gone"
            for url, boot in self._boots.items()
            if (now := listed.get(url)) is None or now.boot != boot or now.state not in ("running", "starting")
        }

    def _let_go(self) -> bool:
        """Part with servers that are gone; return whether there were any."""
        gone = {} if self._folder is None else self._gone()
        for url, why in gone.items():
            self._part(url, why)
        return bool(gone)

    def _part(self, url: str, why: str) -> None:
        """Close the bridge to a server. What can't be closed because the server is gone is not an error."""
        warn_once(log, "server %s leaves: %s", url, why)
        bridge, boot = self._bridges.pop(url), self._boots.pop(url)
        with suppress(ServerError, BridgeError):
            bridge.close()
        # One that only failed may come back; training does not wait for it at every step.
        self._waiting[url] = _Waiting(boot, time.monotonic() + FIRST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS, why)

    def _join(self) -> bool:
        """Bring servers that have come to the newest version; return whether there were any."""
        assert self._published is not None, "publish comes first"
        comers = self._world.lead(self._comers)
        for member in comers:
            self._try(member, self._published.version)
        return bool(comers)

    def _comers(self) -> list[Member]:
        """Return the servers that run and may join; rank 0's clock decides."""
        assert self._published is not None, "publish comes first"
        comers, ahead = [], []
        for url, member in self._listed().items():
            if member.state != "running" or url in self._bridges:
                continue
            waiting = self._waiting.get(url)
            if waiting is None or waiting.boot != member.boot:
                comers.append(member)
            elif time.monotonic() >= waiting.until:
                (comers if self._published.version >= waiting.version else ahead).append(member)
        return comers or ([] if self._bridges else ahead)  # without a server there is no newer version

    def _try(self, member: Member, version: int) -> None:
        """Connect a server, prove it, and publish the newest version to it; if that fails, note why."""
        url, started, wanted = member.url, time.monotonic(), version
        bridge = self._open(member.name, at_url(self._config, url).model_copy(update={"startup_timeout": JOIN_SECONDS}))
        try:
            with ExitStack() as entering:
                entering.enter_context(bridge)
                wanted = bridge.connect(version)
                if wanted <= version:
                    bridge.prove()
                    bridge.publish(version)
                    entering.pop_all()
        except (ServerError, BridgeError) as error:
            self._wait_for(member, str(error), for_ever=not isinstance(error, ServerError | LostError))
            return
        if wanted <= version:
            self._bridges[url], self._boots[url] = bridge, member.boot
            self._waiting.pop(url, None)
            warn_once(log, "server %s joins with version %d, after %.1f s", url, version, time.monotonic() - started)
            return
        if not self._bridges:
            raise OnlyAheadError(
                "the only server has generated with a newer version than the trainer's",
                field=f"server {url}",
                got=str(wanted - 1),
                wanted=f"at most {version}",
                fix="use --resume auto, which continues with a higher version",
            )
        # `connect` may have sent weights as version `wanted`, so only a later version is new to the server.
        self._wait_for(member, f"it has served version {wanted - 1} before", version=wanted + 1)

    def _wait_for(self, member: Member, why: str, *, for_ever: bool = False, version: int = 0) -> None:
        """Note why a server can't join, and when to try again; each pause is twice the one before it."""
        before = self._waiting.get(member.url)
        pause = float("inf")
        if not for_ever:
            known = before is not None and before.boot == member.boot
            pause = min(2 * before.pause, LONGEST_PAUSE_SECONDS) if before and known else FIRST_PAUSE_SECONDS
        warn_once(log, "server %s can't join%s: %s", member.url, " until it restarts" if for_ever else "", why)
        self._waiting[member.url] = _Waiting(member.boot, time.monotonic() + pause, pause, why, version)

    def _note(self) -> None:
        """Write which servers environments may ask."""
        assert self._published is not None and self._folder is not None
        served = {url: Served(one.boot, note=one.note) for url, one in self._waiting.items()}
        served |= {url: Served(boot, self._published.version) for url, boot in self._boots.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / SERVED_FILE, msgspec.json.encode(served))


def _answer(url: str, ask: Callable[[], T]) -> T | Failed:
    """Return what a function returns, or the error that it raises; a `BridgeError` gets the server's URL."""
    try:
        return ask()
    except ServerError as error:
        return error
    except BridgeError as error:
        return type(error).of(at_server(url, error.problems))
