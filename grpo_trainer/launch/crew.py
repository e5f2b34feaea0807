"""Which processes of a run restart when they end, and which servers it has: decisions that `Supervisor` carries out.

Nothing restarts before the first trained step: a process that fails during the start has an error that the user should
see at once. Afterwards a process restarts up to `--max-restarts` times in a row, each time after a longer pause.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from grpo_common.roster import MEMBERS_FILE, SERVED_FILE, Member, State, read_served
from grpo_trainer.errors import GrpoError
from grpo_trainer.files import replace_file
from grpo_trainer.launch.plan import TRAINERS, ProcessSpec, started_again
from grpo_trainer.launch.requests import FOLDER, Answer, Request, answer_all
from grpo_trainer.launch.watched import Watched

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before the first restart, and before any."""
IN_A_ROW_SECONDS = 600.0
"""After a process was ready and has run for longer than this, its count of restarts begins at 0 again."""
PLACE_SECONDS = 2.0
"""Between two attempts to find a machine for a process."""
LOOK_SECONDS = 0.5
"""Between two looks for requests."""
LEAVE_SECONDS = 30.0
"""Most seconds for the trainer to let a server go that is dropped."""


class Planner(Protocol):
    """Plans processes of a running run: `replan.Replanner` says how."""

    def placed(self, specs: Sequence[ProcessSpec]) -> Sequence[ProcessSpec] | None: ...
    def another_server(self, gpus: str | None) -> ProcessSpec: ...
    def vacate(self, name: str) -> None: ...


@dataclass(frozen=True)
class Due:
    """Processes that start together.

    Attributes:
        at: not before this moment (`time.monotonic`).
        waits: no machine had room for them.
    """

    specs: tuple[ProcessSpec, ...]
    at: float
    waits: bool = False


class Crew:
    """The processes of a run that may be replaced.

    Args:
        most: restarts of a process in a row; 0: any process that ends, ends the run.
        has_begun: returns whether the first step is trained.
        has_checkpoint: returns whether trainers can continue from a checkpoint.
        servers: the run's folder of servers, where they may change; None: they stay.
        planner: says where processes start; None: where they were, and no server is added.
        say: shows a line to the user.
    """

    def __init__(
        self,
        most: int = 0,
        *,
        has_begun: Callable[[], bool] = lambda: False,
        has_checkpoint: Callable[[], bool] = lambda: False,
        servers: Path | None = None,
        planner: Planner | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._most = most
        self._has_begun = has_begun
        self._has_checkpoint = has_checkpoint
        self._servers = servers
        self._planner = planner
        self._say = say
        self._restarts: Counter[str] = Counter()
        self._boots: Counter[str] = Counter()
        self._due: list[Due] = []
        self._elsewhere: dict[str, Member] = {}
        self._leaving: dict[str, float] = {}
        self._told_to_end: dict[str, float] = {}
        self._added: list[str] = []
        self._written: tuple[Member, ...] | None = None
        self._looked = 0.0
        if servers is not None:
            for name in (MEMBERS_FILE, SERVED_FILE):  # of an earlier run in the same folder
                (servers / name).unlink(missing_ok=True)
            for old in (servers / FOLDER).glob("*"):
                old.unlink()

    # restarts -----------------------------------------------------------------------------------------------

    def started(self, spec: ProcessSpec) -> None:
        """Note that a process has started."""
        self._boots[spec.name] += 1

    def lost(self, child: Watched, children: Sequence[Watched]) -> tuple[Watched, ...] | None:
        """Decide about a process that has ended, and return those that end with it; None: the run ends.

        They are started again when they are due, except a server that has ended too often or was dropped.
        """
        spec = child.spec
        how = "not ready in time" if child.exit_code is None else child.how_it_ended()
        if spec.name in self._leaving:
            del self._leaving[spec.name]
            self._told_to_end.pop(spec.name, None)
            self._vacate(spec.name)
            self._say(f"{spec.name}: has left")
            return (child,)
        if not self._may_restart(child):
            return None
        if child.ready and time.monotonic() - child.started > IN_A_ROW_SECONDS:
            self._restarts[spec.restarts] = 0
        done = self._restarts[spec.restarts]
        if done >= self._most:
            if not (self._is_server(spec) and self._others(child, children)):
                return None
            self._vacate(spec.name)
            self._say(f"{spec.name}: {how}, after {done} restarts; the run goes on without it (log: {child.log_path})")
            return (child,)
        self._restarts[spec.restarts] += 1
        pause = min(FIRST_PAUSE_SECONDS * 2**done, LONGEST_PAUSE_SECONDS)
        group = tuple(each for each in children if each.spec.restarts == spec.restarts)
        names = ", ".join(each.name for each in group)
        self._say(f"{spec.name}: {how}; {names}: restart {done + 1} of {self._most} in {pause:g} s")
        self._due.append(Due(tuple(each.spec for each in group), time.monotonic() + pause))
        return group

    def _may_restart(self, child: Watched) -> bool:
        if not (child.spec.restarts and self._most and self._has_begun()):
            return False
        # An error that trainer or API report themselves, such as a deleted queue, would come again or hide a loss.
        was_killed = (child.exit_code or 0) < 0 or child.exit_code == os.EX_TEMPFAIL
        if not (was_killed or child.spec.after_errors):
            return False
        return child.spec.restarts != TRAINERS or self._has_checkpoint()

    def _others(self, child: Watched, children: Sequence[Watched]) -> bool:
        """Return whether the run has another server."""
        own = [each for each in children if self._is_server(each.spec) and each is not child]
        due = [spec for one in self._due for spec in one.specs if self._is_server(spec)]
        return bool(own or due or self._elsewhere)

    def due(self) -> list[Sequence[ProcessSpec]]:
        """Return the processes that start now; those that start together are one entry."""
        starting: list[Sequence[ProcessSpec]] = []
        for one in self._due.copy():
            if time.monotonic() < one.at:
                continue
            self._due.remove(one)
            placed = self._planner.placed(one.specs) if self._planner else one.specs
            if placed is not None:
                starting.append([started_again(spec, self._boots[spec.name]) for spec in placed])
                continue
            if not one.waits:
                self._say(f"{', '.join(spec.name for spec in one.specs)}: waiting for room on a machine")
            self._due.append(Due(one.specs, time.monotonic() + PLACE_SECONDS, waits=True))
        return starting

    def expects(self, prefix: str) -> bool:
        """Return whether a process whose name begins so will start again."""
        return any(spec.name.startswith(prefix) for one in self._due for spec in one.specs)

    def put_off(self, specs: Sequence[ProcessSpec]) -> bool:
        """Have processes that could not be started start later; return False if that has happened too often."""
        group = specs[0].restarts
        self._restarts[group] += 1
        self._due.append(Due(tuple(specs), time.monotonic() + PLACE_SECONDS))
        return self._restarts[group] <= self._most

    def _vacate(self, name: str) -> None:
        if self._planner is not None:
            self._planner.vacate(name)

    # servers ------------------------------------------------------------------------------------------------

    def tend(self, children: Sequence[Watched]) -> None:
        """Answer requests, end servers that were dropped, and write the list of servers if it has changed."""
        if self._servers is None:
            return
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            answer_all(self._servers, lambda request: self._obey(request, children))
            self._end_dropped(children)
        members = tuple(self._members(children))
        if members != self._written:
            self._servers.mkdir(parents=True, exist_ok=True)
            replace_file(self._servers / MEMBERS_FILE, msgspec.json.encode(members))
            self._written = members

    def _is_server(self, spec: ProcessSpec) -> bool:
        return self._servers is not None and spec.name.startswith("server")

    def _members(self, children: Sequence[Watched]) -> list[Member]:
        found = [self._member(child.spec, self._state(child)) for child in children if self._is_server(child.spec)]
        for one in self._due:
            state: State = "waiting for a machine" if one.waits else "restarting"
            found += [self._member(spec, state) for spec in one.specs if self._is_server(spec)]
        return [*found, *self._elsewhere.values()]

    def _state(self, child: Watched) -> State:
        if child.name in self._leaving:
            return "leaving"
        if child.exit_code is not None:
            return "gone"
        if child.ready:
            return "running"
        return "starting" if self._boots[child.name] == 1 else "restarting"

    def _member(self, spec: ProcessSpec, state: State) -> Member:
        boot = max(self._boots[spec.name], 1)
        if state == "waiting for a machine":
            return Member(spec.name, "", "", state, boot)
        where = "this machine" if spec.place.node is None else spec.place.node.name
        return Member(spec.name, url_of(spec), where, state, boot)

    def _obey(self, request: Request, children: Sequence[Watched]) -> Answer:
        try:
            return self._drop(request, children) if request.action == "drop" else self._add(request, children)
        except (GrpoError, OSError) as error:
            return Answer(False, str(error))

    def _drop(self, request: Request, children: Sequence[Watched]) -> Answer:
        members = [member for member in self._members(children) if member.state != "leaving"]
        member = next((one for one in members if request.server in (one.name, one.url)), None)
        if member is None:
            there = ", ".join(f"{one.name} {one.url}" for one in members)
            return Answer(False, f"no server {request.server}; there are {there}")
        if len(members) == 1:
            return Answer(False, f"{member.name} is the run's only server; add another one first")
        if self._elsewhere.pop(member.url, None) is None:
            self._leaving[member.name] = time.monotonic() + LEAVE_SECONDS
            if pending := [one for one in self._due if any(spec.name == member.name for spec in one.specs)]:
                self._due.remove(pending[0])
                del self._leaving[member.name]
                self._vacate(member.name)
        return Answer(True, f"{member.name} leaves")

    def _end_dropped(self, children: Sequence[Watched]) -> None:
        """End the servers that were dropped, once the trainer has let them go; kill those that do not end in time."""
        assert self._servers is not None, "servers stay"
        served = read_served(self._servers) if self._leaving else {}
        now = time.monotonic()
        for child in children:
            if (until := self._leaving.get(child.name)) is None:
                continue
            if (told := self._told_to_end.get(child.name)) is not None:
                if now > told + child.stop_seconds:
                    child.note_family()
                    child.kill()
                continue
            known = served.get(url_of(child.spec))
            if known is None or known.version is None or now > until:
                child.terminate()
                self._told_to_end[child.name] = now

    def _add(self, request: Request, children: Sequence[Watched]) -> Answer:
        if (url := request.server) is not None:
            members = {member.url: member for member in self._members(children)}
            if url in members:
                return Answer(False, f"{url} is {members[url].name} already")
            self._boots[url] += 1
            if url not in self._added:
                self._added.append(url)
            name = f"added-{1 + self._added.index(url)}"
            self._elsewhere[url] = Member(name, url, "", "running", self._boots[url])
            return Answer(True, f"{name} {url} joins once the trainer has proved it")
        if self._planner is None:
            return Answer(False, "this run starts no more servers")
        spec = self._planner.another_server(request.gpus)
        self._due.append(Due((spec,), time.monotonic(), waits=True))
        return Answer(True, f"{spec.name} starts once a machine has room, and joins once the trainer has proved it")


def url_of(spec: ProcessSpec) -> str:
    """Return a server's address."""
    assert spec.ready_url is not None, "a server says when it is ready"
    return spec.ready_url.removesuffix("/health")
