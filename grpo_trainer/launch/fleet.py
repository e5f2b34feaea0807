"""The inference servers of a running `grpo run`: the list of them, and what `grpo servers` asks for.

`RUN_DIR/servers` has the list (`grpo_common.roster`), and in `requests/` a file for each request and its answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

import msgspec

from grpo_common.formats import FormatError, check_format
from grpo_common.roster import MEMBERS_FILE, SERVED_FILE, Member, in_use, read_served
from grpo_trainer.errors import GrpoError, ServerError
from grpo_trainer.files import replace_file
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.process import POLL_SECONDS, Process
from grpo_trainer.launch.replan import Replanner
from grpo_trainer.signals import running_time

FOLDER = "requests"
FORMAT = 1
"""Number of the format of requests."""
ANSWER_SECONDS = 60.0
"""Time for `grpo run` to answer: it may wait for the answer of a machine of its cluster."""
LOOK_SECONDS = 0.5
"""Between two looks for requests."""
LEAVE_SECONDS = 30.0
"""Most seconds for the trainer to let a server go that is dropped."""

State = Literal["starting", "running", "restarting", "waiting for a machine", "leaving", "ending", "ended"]
"""`restarting` and `waiting for a machine` have no process until they start; `leaving` waits until the trainer has let
the server go, `ending` for its end; `ended` has ended as planned."""


@dataclass
class Row:
    """A process of a run, in its supervisor's table."""

    spec: ProcessSpec
    state: State = "starting"
    process: Process | None = None
    boots: int = 0
    """How often it was started."""
    at: float = 0.0
    """Without a process: it is not started before. Leaving or ending: it is ended, or killed, then. (Monotonic.)"""


class Request(msgspec.Struct, frozen=True):
    """A change of a run's servers."""

    action: Literal["add", "drop"]
    server: str | None = None
    """The name or URL of the server to drop, or the URL of a running one to add; None: start one."""
    gpus: str | None = None
    """CUDA_VISIBLE_DEVICES of a server that is started."""
    format: int = 1


class Answer(msgspec.Struct, frozen=True):
    """What came of a request."""

    done: bool
    text: str


class Fleet:
    """The servers of a run, where they may change: in the run's folder of servers, and in the supervisor's table.

    Without a replanner only running servers can be added.
    """

    def __init__(self, folder: Path, table: dict[str, Row], replanner: Replanner | None) -> None:
        self._folder, self._table, self._replanner = folder, table, replanner
        self._elsewhere: dict[str, Member] = {}
        self._added: dict[str, int] = {}
        self._have_served: set[str] = set()
        self._written: tuple[Member, ...] | None = None
        self._looked = 0.0
        for name in (MEMBERS_FILE, SERVED_FILE):  # of an earlier run in the same folder
            (folder / name).unlink(missing_ok=True)
        for old in (folder / FOLDER).glob("*"):
            old.unlink()

    def tend(self, say: Callable[[str], None]) -> None:
        """Answer requests, end servers that were dropped, and write the list of servers if it has changed."""
        if running_time() - self._looked > LOOK_SECONDS:
            self._looked = running_time()
            self._have_served |= self._serving
            answer_all(self._folder, self._answer)
            self._end_dropped()
        members = tuple(self._members())
        if members != self._written:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / MEMBERS_FILE, msgspec.json.encode(members))
            self._written = members

    def has_another(self, row: Row) -> bool:
        """Return whether a row is a server, and the run goes on without it."""
        return row.spec.name.startswith("server") and bool(self._others(row.spec.name))

    def _others(self, name: str) -> set[str]:
        """Return the others that serve, with which the run goes on without a server.

        For one that has never served, those that may serve again count as well.
        """
        serving = self._serving
        enough = serving if name in self._have_served | serving else {*self._have_served, *self._table}
        return enough & {each.name for each in self._members() if each.state != "leaving"} - {name}

    @property
    def _serving(self) -> set[str]:
        members = [*self._members()]
        used = in_use(self._folder, members)
        return {each.name for each in members if each.url in used}

    @property
    def _servers(self) -> list[Row]:
        return [row for name, row in self._table.items() if name.startswith("server")]

    def _members(self) -> Iterator[Member]:
        for row in self._servers:
            name, boot = row.spec.name, max(row.boots, 1)
            if row.state == "waiting for a machine":
                yield Member(name, "", "", row.state, boot)
                continue
            node = row.spec.place.node
            state = "leaving" if row.state == "ending" else "gone" if row.state == "ended" else row.state
            yield Member(name, url_of(row.spec), "this machine" if node is None else node.name, state, boot)
        yield from self._elsewhere.values()

    def _answer(self, request: Request) -> Answer:
        try:
            return self._drop(request) if request.action == "drop" else self._add(request)
        except (GrpoError, OSError) as error:
            return Answer(False, str(error))

    def _drop(self, request: Request) -> Answer:
        members = [each for each in self._members() if each.state != "leaving"]
        member = next((each for each in members if request.server in (each.name, each.url)), None)
        if member is None:
            there = ", ".join(f"{each.name} {each.url}" for each in members)
            return Answer(False, f"no server {request.server}; there are {there}")
        if not self._others(member.name):
            others = " or ".join(each.name for each in members if each is not member) or "one that you add"
            return Answer(False, f"no server but {member.name} can do the work; wait until {others} serves")
        if self._elsewhere.pop(member.url, None) is None:
            row = self._table[member.name]
            row.state, row.at = "leaving", running_time() + LEAVE_SECONDS
            if row.process is None:
                del self._table[member.name]
                if self._replanner is not None:
                    self._replanner.vacate(member.name)
        return Answer(True, f"{member.name} leaves")

    def _end_dropped(self) -> None:
        """End the servers that were dropped, once the trainer has let them go; kill those that do not end in time."""
        served = read_served(self._folder) if any(row.state == "leaving" for row in self._servers) else {}
        for row in self._servers:
            process = row.process
            if process is None or row.state not in ("leaving", "ending"):
                continue
            is_late = running_time() > row.at
            known = served.get(url_of(row.spec))
            if row.state == "ending" and is_late:
                process.kill()
            elif row.state == "leaving" and (is_late or known is None or known.version is None):
                process.terminate()
                row.state, row.at = "ending", running_time() + process.stop_seconds

    def _add(self, request: Request) -> Answer:
        if (url := request.server) is not None:
            members = {each.url: each for each in self._members()}
            if url in members:
                return Answer(False, f"{url} is {members[url].name} already")
            boot = self._added[url] = self._added.get(url, 0) + 1
            name = f"added-{1 + list(self._added).index(url)}"
            self._elsewhere[url] = Member(name, url, "", "running", boot)
            return Answer(True, f"{name} {url} joins once the trainer has proved it")
        if self._replanner is None:
            return Answer(False, "this run starts no more servers")
        spec = self._replanner.another_server(request.gpus)
        self._table[spec.name] = Row(spec, "waiting for a machine")
        return Answer(True, f"{spec.name} starts once a machine has room, and joins once the trainer has proved it")


def url_of(spec: ProcessSpec) -> str:
    """Return a server's address."""
    assert spec.ready_url is not None, "a server says when it is ready"
    return spec.ready_url.removesuffix("/health")


# requests, from both ends ---------------------------------------------------------------------------------------


def request(servers: Path, wanted: Request, seconds: float = ANSWER_SECONDS) -> Answer:
    """Ask a running `grpo run` through its folder of servers; return its answer, or raise a `ServerError`."""
    folder = servers / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns()}-{uuid4().hex[:8]}"
    question, answered = folder / f"{name}.json", folder / f"{name}.answer"
    replace_file(question, msgspec.json.encode(msgspec.structs.replace(wanted, format=FORMAT)))
    deadline = running_time() + seconds
    while not answered.exists():
        if running_time() > deadline:
            question.unlink(missing_ok=True)
            raise ServerError(
                f"no answer of grpo run within {seconds:.0f} s",
                field=str(servers),
                fix="is it running? `grpo servers` shows whether it has done what was asked",
            )
        time.sleep(POLL_SECONDS)
    answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    answered.unlink()
    return answer


def answer_all(servers: Path, obey: Callable[[Request], Answer]) -> None:
    """Answer the requests that have come, the oldest first."""
    for question in sorted((servers / FOLDER).glob("*.json")):
        try:
            content = question.read_bytes()
            question.unlink()
        except FileNotFoundError:  # the command that asked has stopped waiting
            continue
        try:
            wanted = msgspec.json.decode(content, type=Request)
            check_format(question.name, wanted.format, FORMAT)
            answer = obey(wanted)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            answer = Answer(False, f"{question.name} is no request: {error}")
        except FormatError as error:
            answer = Answer(False, str(error))
        replace_file(question.with_suffix(".answer"), msgspec.json.encode(answer))
