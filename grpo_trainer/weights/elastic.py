"""The servers of a run that may leave and join while it trains: each has its own bridge and its own proof.

`grpo run` lists the servers that there are (`grpo_common.roster`). A server that fails a publish, or that the list no
longer has, leaves. A server that the list has and that runs joins: it is proved and gets the newest version before the
trainer names it in its own list, by which environments ask it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from grpo_common.roster import SERVED_FILE, Member, Served, read_members, read_served
from grpo_trainer.config.server import Server
from grpo_trainer.errors import BridgeError, GrpoError, ServerError
from grpo_trainer.files import replace_file
from grpo_trainer.metrics.types import Sum
from grpo_trainer.server_client import at_url
from grpo_trainer.weights.bridge import Published, WeightBridge, quiet
from grpo_trainer.weights.multi_server import SeveralServers, as_one, at_once, named

log = logging.getLogger(__name__)

T = TypeVar("T")

OpenBridge = Callable[[str, Server], WeightBridge]
"""Returns the bridge to a server by the server's name and settings; it is entered later."""

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


class _AheadError(Exception):
    """A server has served a version that the trainer has not reached."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.wanted = wanted


@dataclass(frozen=True)
class _Waiting:
    """A server that could not join.

    Attributes:
        until: when it is tried again; infinity: not before it starts again.
        version: the lowest version with which it is tried again.
    """

    boot: int
    until: float
    pause: float
    note: str
    version: int = 0


class ElasticServers(SeveralServers):
    """The bridges of the servers in a run's list.

    A version counts as published when all servers that are left generate with it. With no server left, training waits
    for one: the next batch needs completions.

    Args:
        folder: the run's folder of servers.
        config: settings of every server; host and port are those of the list.
        open_bridge: makes the bridge to one server.
    """

    def __init__(self, folder: Path, config: Server, open_bridge: OpenBridge) -> None:
        super().__init__({}, MOST_AT_ONCE)
        self._folder = folder
        self._config = config
        self._open = open_bridge
        self._boots: dict[str, int] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._published: Published | None = None
        listed = {member.url: member for member in read_members(folder)}
        for each in config.each:
            member = listed.get(each.url) or Member("server", each.url, "", "running")
            self._bridges[each.url] = open_bridge(member.name, each)
            self._boots[each.url] = member.boot

    def connect(self, policy_version: int) -> int:
        """Connect to all servers at the same time; return the highest version that any of them has to begin with."""
        asked = at_once(self._senders, self._bridges, lambda bridge: bridge.connect(policy_version))
        version = max(self._answers({url: future.result for url, future in asked.items()}))
        # A server may have restarted while it was waited for.
        boots = {member.url: member.boot for member in read_members(self._folder)}
        self._boots |= {url: boots[url] for url in self._boots if url in boots}
        return version

    def _answers(self, asked: Mapping[str, Callable[[], T]]) -> list[T]:
        """Return the answers of servers. If a trainer starts again, those that fail leave as long as another answers.

        Raises:
            BridgeError, ServerError: a server failed, and the run begins, or no server answered.
        """
        begins = not read_served(self._folder)
        answers: list[T] = []
        failed: dict[str, GrpoError] = {}
        for url, ask in asked.items():
            try:
                answers.append(named(url, ask))
            except (ServerError, BridgeError) as error:
                if begins:
                    raise
                failed[url] = error
        if not answers:
            raise next(iter(failed.values()))
        for url, error in failed.items():
            self._part(url, str(error))
        return answers

    def publish(self, version: int) -> Published:
        """Publish to all servers at the same time; those that fail leave, those that have come join.

        Raises:
            BridgeError: all servers refused, or the servers that are left serve different versions.
        """
        self._let_go()
        published: dict[str, Published] = {}
        failed: dict[str, GrpoError] = {}
        for url, sending in at_once(self._senders, self._bridges, lambda bridge: bridge.publish(version)).items():
            try:
                published[url] = named(url, sending.result)
            except (ServerError, BridgeError) as error:
                failed[url] = error
        for url, error in failed.items():
            if not published and not isinstance(error, ServerError):
                raise error  # no server that is gone: what is published is at fault
            self._part(url, str(error))
        one = self._published = as_one(published, version) if published else Published(version, "", quiet(version))
        self._join()
        self._note()
        return Published(one.version, one.name, {**one.metrics, "publish/servers": Sum(len(self._bridges))})

    def welcome(self) -> None:
        """Let servers join that have come, and those leave that are gone."""
        if self._published is not None and (self._let_go() | self._join()):
            self._note()

    def _let_go(self) -> bool:
        """Part with servers that the list no longer has as they were; return whether there were any."""
        listed = {member.url: member for member in read_members(self._folder)}
        gone = [
            url
            for url, boot in self._boots.items()
            if (now := listed.get(url)) is None or now.boot != boot or now.state not in ("running", "starting")
        ]
        for url in gone:
            self._part(url, f"{listed[url].state}" if url in listed else "gone")
        return bool(gone)

    def _part(self, url: str, why: str) -> None:
        """Close the bridge to a server. What can't be closed because the server is gone is not an error."""
        log.warning("server %s leaves: %s", url, why)
        bridge, boot = self._bridges.pop(url), self._boots.pop(url)
        with suppress(ServerError, BridgeError):
            bridge.close()
        # One that only failed may come back; training does not wait for it at every step.
        self._waiting[url] = _Waiting(boot, time.monotonic() + FIRST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS, why)

    def _join(self) -> bool:
        """Bring servers that have come to the newest version; return whether there were any."""
        joined = False
        for member in read_members(self._folder):
            if member.state == "running" and member.url not in self._bridges and self._may_join(member):
                self._try(member)
                joined = True
        return joined

    def _may_join(self, member: Member) -> bool:
        waiting = self._waiting.get(member.url)
        if waiting is None or waiting.boot != member.boot:
            return True
        assert self._published is not None, "publish comes first"
        return time.monotonic() >= waiting.until and self._published.version >= waiting.version

    def _try(self, member: Member) -> None:
        """Connect a server, prove it, and publish the newest version to it; if that fails, note why."""
        assert self._published is not None, "publish comes first"
        version, url = self._published.version, member.url
        started = time.monotonic()
        bridge = self._open(member.name, at_url(self._config, url).model_copy(update={"startup_timeout": JOIN_SECONDS}))
        try:
            with ExitStack() as entering:
                entering.enter_context(bridge)
                if (wanted := bridge.connect(version)) > version:
                    raise _AheadError(wanted)
                bridge.prove()
                bridge.publish(version)
                entering.pop_all()
        except _AheadError as ahead:
            if not self._bridges:
                raise OnlyAheadError(
                    "the only server has generated with a newer version than the trainer's",
                    field=f"server {url}",
                    got=str(ahead.wanted - 1),
                    wanted=f"at most {version}",
                    fix="use --resume auto, which continues with a higher version",
                ) from None
            # `connect` may have sent weights as version `wanted`, so only a later version is new to the server.
            self._wait_for(member, f"it has served version {ahead.wanted - 1} before", version=ahead.wanted + 1)
        except ServerError as error:
            self._wait_for(member, str(error))
        except BridgeError as error:
            self._wait_for(member, str(error), pause=float("inf"))
        else:
            self._bridges[url], self._boots[url] = bridge, member.boot
            self._waiting.pop(url, None)
            log.warning("server %s joins with version %d, after %.1f s", url, version, time.monotonic() - started)

    def _wait_for(self, member: Member, why: str, *, pause: float | None = None, version: int = 0) -> None:
        """Note why a server can't join, and when to try again; each pause is twice the one before it."""
        before = self._waiting.get(member.url)
        if pause is None:
            known = before is not None and before.boot == member.boot
            pause = min(2 * before.pause, LONGEST_PAUSE_SECONDS) if before and known else FIRST_PAUSE_SECONDS
        log.warning("server %s can't join%s: %s", member.url, "" if pause < float("inf") else " until it restarts", why)
        self._waiting[member.url] = _Waiting(member.boot, time.monotonic() + pause, pause, why, version)

    def _note(self) -> None:
        """Write which servers environments may ask."""
        assert self._published is not None, "publish comes first"
        served = {url: Served(one.boot, note=one.note) for url, one in self._waiting.items()}
        served |= {url: Served(boot, self._published.version) for url, boot in self._boots.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / SERVED_FILE, msgspec.json.encode(served))
