"""Runs a plan's processes on the nodes of a Ray cluster (`grpo run --cluster`).

Each node that the plan uses has one actor (`agent.NodeAgent`), which holds the node's GPUs and cores for the run and
starts the processes there by the same command lines as a local run. A thread for each node asks its actor for output
and exit codes. Processes of this machine, the head, are children of `grpo run` itself; the actor there only holds GPUs.

If `grpo run` or a node dies, Ray ends the actors, and the kernel their processes. Ray is an extra, imported on use.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_trainer.errors import ConfigError, PortBusyError, ProcessFailedError
from grpo_trainer.launch.agent import NodeAgent, RemoteProcess, passed_on, seeing
from grpo_trainer.launch.places import HERE, Node, Place, Places, free_nodes, meeting_address
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.process import Process
from grpo_trainer.signals import running_time

CONNECT_SECONDS = 60.0
"""Time for the cluster to answer: a job may have started it just before."""
KNOCK_SECONDS = 5.0
NODES_SECONDS = 300.0
"""Time for all nodes to join."""
NEWS_SECONDS = 0.1
ORDER_SECONDS = 30.0
"""Time for a node's answer; one without an answer is lost."""
POLL_SECONDS = 0.5

ROOM_SECONDS = 120.0
"""Time for Ray to give room on a node: to start an actor there, which waits where others hold the GPUs. A process that
comes later then asks another node first."""

Files = Mapping[Path, bytes]


@dataclass
class _Room:
    """What the run holds of a node: an agent there, with some of its GPUs. Its key is the node and `Place.room`."""

    node: Node
    agent: Any
    gpus: str = ""
    """CUDA_VISIBLE_DEVICES of the agent."""
    processes: dict[str, RemoteProcess] = field(default_factory=dict)
    is_lost: bool = False


@dataclass(frozen=True)
class _Asked:
    """Room that Ray was asked for, and has not given yet."""

    place: Place
    gpus: Any
    """The answer of the agent there, as a future."""
    until: float
    """When the node is given up (`running_time`)."""


class RayCluster:
    """A connection to a Ray cluster (auto, or HOST:PORT of its head), and the processes that this run has on it.

    It waits for a cluster that does not answer yet, and for as many nodes as are wanted, unless `waits` is False.

    Raises:
        ConfigError: Ray is not installed, the cluster does not answer, or fewer nodes join.
    """

    def __init__(self, address: str, wanted: int = 1, *, waits: bool = True) -> None:
        self._ray = _ray()
        self._connect(address, CONNECT_SECONDS if waits else 0.0)
        self._rooms: dict[tuple[Node | None, str], _Room] = {}
        self._asked: dict[str, _Asked] = {}
        self._refusals: Counter[str] = Counter()
        self._starts = itertools.count()
        self._threads: list[threading.Thread] = []
        self._is_closing = threading.Event()
        try:
            self.nodes = self._joined(wanted, NODES_SECONDS if waits else 0.0)
        except BaseException:
            self._ray.shutdown()
            raise

    def _connect(self, address: str, seconds: float) -> None:
        deadline = running_time() + seconds
        while True:
            try:
                host, _, port = (os.environ.get("RAY_ADDRESS", "") if address == "auto" else address).rpartition(":")
                if port.isdecimal():  # where nothing listens, Ray itself would look for minutes
                    socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()
                self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                if running_time() > deadline:
                    raise ConfigError(
                        f"no Ray cluster answers: {error}",
                        field="--cluster",
                        got=address,
                        wanted="a cluster that this machine belongs to",
                        fix="start one: `ray start --head`, and `ray start --address HEAD:6379` on the other machines",
                    ) from error
                time.sleep(POLL_SECONDS)
            else:
                return

    def _joined(self, wanted: int, seconds: float) -> list[Node]:
        """Return the nodes, the head first, once there are enough."""
        deadline = running_time() + seconds
        while len(nodes := self._alive()) < wanted:
            if running_time() > deadline:
                raise ConfigError(
                    f"after {seconds:.0f} s",
                    field="--cluster-nodes",
                    got=f"{len(nodes)}: {', '.join(node.name for node in nodes)}",
                    wanted=str(wanted),
                    fix="see `ray status`",
                )
            time.sleep(POLL_SECONDS)
        return nodes

    def _alive(self) -> list[Node]:
        here = self._ray.get_runtime_context().get_node_id()
        nodes = [_node(found, here) for found in self._ray.nodes() if found["Alive"]]
        return sorted(nodes, key=lambda node: (not node.is_head, node.name, node.id))

    # before the start ---------------------------------------------------------------------------------------

    def occupy(self, places: Places) -> None:
        """Hold the GPUs and cores of the run on its nodes; raise a `ConfigError` if another program holds them."""
        for node in dict.fromkeys(place.node for place in places.values()):
            assert node is not None, "on a cluster every process has a node"
            own = [place for place in places.values() if place.node == node]
            gpus = len({number for place in own for number in place.gpus})
            self._hold(Place(node), gpus, 0 if gpus else min(len(own), int(node.cpus)))
        for room in self._rooms.values():
            try:
                self._open(room, self._ray.get(room.agent.gpus.remote(), timeout=ROOM_SECONDS))
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                raise ConfigError(
                    f"Ray gives this run no room there: {error}",
                    field="--cluster",
                    got=room.node.name,
                    wanted="free GPUs and cores, and this package in the same folder as here",
                    fix="see `ray status`",
                ) from error

    def _hold(self, place: Place, gpus: int, cpus: int) -> _Room:
        """Ask Ray for an agent on a node, with the given numbers of GPUs and cores."""
        assert place.node is not None, "on a cluster every process has a node"
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        strategy = affinity(place.node.id, soft=False)
        kind = self._ray.remote(NodeAgent).options(num_gpus=gpus, num_cpus=cpus, scheduling_strategy=strategy)
        room = _Room(place.node, kind.remote(str(Path.cwd()), passed_on(os.environ)))
        self._rooms[place.node, place.room] = room
        return room

    def _open(self, room: _Room, gpus: str) -> None:
        """Follow what the agent of a room says."""
        room.gpus = gpus
        if not room.node.is_head:
            thread = threading.Thread(target=self._follow, args=(room,), name=f"news of {room.node.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _room_of(self, place: Place) -> _Room:
        return self._rooms[place.node, place.room]

    def claim(self, wanted: Mapping[str, int], places: Places) -> dict[str, int]:
        """Return the ports of processes, each free on its node; 0 is replaced by a free port.

        Raises:
            PortBusyError: ports are taken.
            ProcessFailedError: a node does not answer.
        """
        by_address: dict[str, tuple[Place, dict[str, int]]] = {}
        for name, port in wanted.items():
            place = places.get("trainer" if name == "trainers" else name, HERE)
            address = meeting_address(places) if name == "trainers" else place.address
            by_address.setdefault(address, (place, {}))[1][name] = port
        claimed: dict[str, int] = {}
        for address, (place, ports) in by_address.items():
            claimed |= claim_ports(ports, address) if place.is_here else self._claim_there(place, ports, address)
        return claimed

    def _claim_there(self, place: Place, ports: Mapping[str, int], address: str) -> dict[str, int]:
        room = self._room_of(place)
        try:
            found = self._ray.get(room.agent.claim.remote(dict(ports), address), timeout=ORDER_SECONDS)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            raise ProcessFailedError(
                f"{room.node.name} does not answer", field=", ".join(ports), got=str(error), fix="see `ray status`"
            ) from error
        if isinstance(found, str):
            raise PortBusyError(found, field=f"ports of {room.node.name}")
        return found

    # during the run -----------------------------------------------------------------------------------------

    def is_lost(self, place: Place) -> bool:
        """Return whether a place's node is gone, or the run's actor there."""
        return not place.is_here and self._room_of(place).is_lost

    def room_for(self, name: str, gpus: int, taken: Iterable[Place]) -> Place | None:
        """Ask for room for a process that comes later, beside the places that the run has; None: there is none yet.

        So call again: a node that was asked for the process stays asked until the room is returned. A process that
        needs no GPU shares the cores of a CPU with others.
        """
        try:
            if (asked := self._asked.get(name)) is None:
                self._ask(name, gpus, [*taken, *(other.place for other in self._asked.values())])
                return None
            answered, _ = self._ray.wait([asked.gpus], timeout=0)
            if not answered and running_time() < asked.until:
                return None
            self._open(self._room_of(asked.place), self._ray.get(asked.gpus, timeout=0))
        except (self._ray.exceptions.RayError, TimeoutError):  # others hold the GPUs, or the node has just gone
            if name in self._asked:
                self._refusals[self._room_of(self._asked[name].place).node.id] += 1
            self.forget(name)
            return None
        return self._asked.pop(name).place

    def _ask(self, name: str, gpus: int, taken: Iterable[Place]) -> None:
        """Ask the emptiest of the nodes that have refused or were lost least often."""
        nodes = sorted(free_nodes(self._alive(), taken, gpus), key=lambda node: self._refusals[node.id])
        if nodes:
            place = Place(nodes[0], tuple(range(gpus)), f"{name}-{next(self._starts)}")
            future = self._hold(place, gpus, 0).agent.gpus.remote()
            self._asked[name] = _Asked(place, future, running_time() + ROOM_SECONDS)

    def forget(self, name: str) -> None:
        """No longer ask for room for a process."""
        if (asked := self._asked.pop(name, None)) is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._room_of(asked.place).agent)
            del self._rooms[asked.place.node, asked.place.room]

    # the run ------------------------------------------------------------------------------------------------

    def start(self, files: Files, spec: ProcessSpec, log_path: Path, on_line: Callable[[str, bool], None]) -> Process:
        """Start a process where its place is. Those of the files that its command line names are written there.

        Raises:
            ProcessFailedError: its node is lost, or can't start it.
        """
        place = spec.place
        if place.is_here:
            gpus = "" if place.node is None else self._room_of(place).gpus
            return Process(seeing(spec, gpus), log_path, on_line)
        room = self._room_of(place)
        # A process that starts again is another one to the agent, which still tells how the one before it ended.
        called = replace(spec, name=f"{spec.name}/{next(self._starts)}")
        process = RemoteProcess(spec, log_path, on_line, partial(self._order, room, called.name))
        room.processes[called.name] = process
        needed = {str(path): content for path, content in files.items() if str(path) in spec.argv}
        try:
            process.pid = self._ray.get(room.agent.start.remote(called, needed), timeout=ORDER_SECONDS)
        except (self._ray.exceptions.RayError, OSError) as error:
            process.close()
            room.agent.order.remote(called.name, "kill")  # if only the answer is late, it still starts
            raise ProcessFailedError(
                f"{room.node.name} can't start it",
                field=spec.name,
                got=str(getattr(error, "cause", None) or error),
                fix=f"every machine of the cluster needs {spec.argv[0]}, with this package",
            ) from error
        return process

    def _order(self, room: _Room, name: str, method: str) -> None:
        """Have an agent do something with a process, and wait for it; the thread of that node tells a loss."""
        if not room.is_lost:
            with suppress(self._ray.exceptions.RayError, TimeoutError):
                self._ray.get(room.agent.order.remote(name, method), timeout=ORDER_SECONDS)

    def _follow(self, room: _Room) -> None:
        """Pass on what a node's processes write and how they end, until the run is over or the node is lost."""
        while not self._is_closing.wait(NEWS_SECONDS):
            try:
                news = self._ray.get(room.agent.news.remote(), timeout=ORDER_SECONDS)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                room.is_lost = True
                self._refusals[room.node.id] += 1  # Ray may still count a lost node as alive
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(room.agent)  # it may only have been slow; its processes end with it
                for process in list(room.processes.values()):
                    process.note_end(lost=f"lost with its node {room.node.name} ({type(error).__name__})")
                return
            for line in news.lines:
                room.processes[line.name].write(line)
            for name, content in news.said.items():
                room.processes[name].tell(content)
            for name, code in news.ended.items():
                room.processes[name].note_end(code)

    def close(self) -> None:
        """End the actors, and with them what is left of their processes; leave the cluster."""
        self._is_closing.set()
        for thread in self._threads:
            thread.join(ORDER_SECONDS)
        for room in self._rooms.values():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(room.agent)
        self._ray.shutdown()


def _node(found: Mapping[str, Any], here: str) -> Node:
    """Return a node as `ray.nodes()` describes it."""
    resources = found["Resources"]
    return Node(
        name=found["NodeManagerHostname"],
        address=found["NodeManagerAddress"],
        gpus=int(resources.get("GPU", 0)),
        cpus=float(resources.get("CPU", 0)),
        id=found["NodeID"],
        is_head=found["NodeID"] == here,
    )


def _ray() -> Any:
    """Return the module; raise a `ConfigError` if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            field="--cluster", got="no module ray", wanted="the package", fix="pip install 'grpo-trainer[ray]'"
        ) from None


@contextmanager
def joined(address: str | None, wanted: int, *, waits: bool = True) -> Iterator[RayCluster | None]:
    """Connect to a cluster within the block; without an address there is none."""
    if address is None:
        yield None
        return
    with closing(RayCluster(address, wanted, waits=waits)) as cluster:
        yield cluster
