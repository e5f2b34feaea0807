"""Runs a plan's processes on the nodes of a Ray cluster (`grpo run --cluster`).

Each node that the plan uses has one actor (`agent.NodeAgent`), which holds the node's GPUs and cores for the run and
starts the processes there by the same command lines as a local run. A thread for each node asks its actor for output
and exit codes. Processes of this machine, the head, are children of `grpo run` itself; the actor there only holds GPUs.

If `grpo run` or a node dies, Ray ends the actors, and the kernel their processes. Ray is an extra, imported on use.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_trainer.errors import ConfigError, PortBusyError, ProcessFailedError
from grpo_trainer.launch.agent import NodeAgent, passed_on, seeing
from grpo_trainer.launch.child import Child
from grpo_trainer.launch.places import HERE, Node, Places, meeting_address
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.remote import RemoteProcess
from grpo_trainer.launch.watched import Listener, Watched

CONNECT_SECONDS = 60.0
"""Time for the cluster to answer: a job may have started it just before."""
KNOCK_SECONDS = 5.0
NODES_SECONDS = 300.0
"""Time for all nodes to join."""
AGENT_SECONDS = 60.0
"""Time for Ray to start an actor on a node. It waits where others hold the node's GPUs."""
NEWS_SECONDS = 0.1
ORDER_SECONDS = 30.0
"""Time for a node's answer; one without an answer is lost."""
POLL_SECONDS = 0.5

Files = Mapping[Path, bytes]
NO_FILES: Files = MappingProxyType({})


class RayCluster:
    """A connection to a Ray cluster, and the processes that this run has on it.

    Args:
        address: auto, or HOST:PORT of the head.
        wanted: nodes to wait for.

    Raises:
        ConfigError: Ray is not installed, the cluster does not answer, or fewer nodes join.
    """

    def __init__(self, address: str, wanted: int = 1) -> None:
        self._ray = _ray()
        self._connect(address)
        self._agents: dict[Node, Any] = {}
        self._gpus: dict[Node, str] = {}
        self._processes: dict[Node, dict[str, RemoteProcess]] = {}
        self._threads: list[threading.Thread] = []
        self._is_closing = threading.Event()
        try:
            self.nodes = self._joined(wanted)
        except BaseException:
            self._ray.shutdown()
            raise

    def _connect(self, address: str) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
                self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                if time.monotonic() > deadline:
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

    def _joined(self, wanted: int) -> list[Node]:
        """Return the nodes, the head first, once there are enough."""
        deadline = time.monotonic() + NODES_SECONDS
        while len(nodes := self._alive()) < wanted:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"after {NODES_SECONDS:.0f} s",
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
        """Hold the GPUs and cores of the run on each of its nodes.

        Raises:
            ConfigError: another program of the cluster holds them.
        """
        for node in dict.fromkeys(place.node for place in places.values()):
            assert node is not None, "on a cluster every process has a node"
            own = [place for place in places.values() if place.node == node]
            gpus = len({number for place in own for number in place.gpus})
            self._agents[node] = self._agent(node, gpus, 0 if gpus else min(len(own), int(node.cpus)))
        for node, agent in self._agents.items():
            try:
                self._gpus[node] = self._ray.get(agent.gpus.remote(), timeout=AGENT_SECONDS)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                raise ConfigError(
                    f"Ray gives this run no room there: {error}",
                    field="--cluster",
                    got=node.name,
                    wanted="free GPUs and cores, and this package in the same folder as here",
                    fix="see `ray status`",
                ) from error
            if not node.is_head:
                self._processes[node] = {}
                thread = threading.Thread(target=self._follow, args=(node,), name=f"news of {node.name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _agent(self, node: Node, gpus: int, cpus: int) -> Any:
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        options = {"num_gpus": gpus, "num_cpus": cpus, "scheduling_strategy": affinity(node.id, soft=False)}
        kind = self._ray.remote(NodeAgent).options(**options)
        return kind.remote(str(Path.cwd()), passed_on(os.environ))

    def claim(self, wanted: Mapping[str, int], places: Places) -> dict[str, int]:
        """Return the ports of processes, each free on its node; 0 is replaced by a free port.

        Raises:
            PortBusyError: ports are taken.
        """
        by_address: dict[str, tuple[Node | None, dict[str, int]]] = {}
        for name, port in wanted.items():
            place = places.get("trainer" if name == "trainers" else name, HERE)
            address = meeting_address(places) if name == "trainers" else place.address
            by_address.setdefault(address, (None if place.is_here else place.node, {}))[1][name] = port
        claimed: dict[str, int] = {}
        for address, (node, ports) in by_address.items():
            claimed |= claim_ports(ports, address) if node is None else self._claim_there(node, ports, address)
        return claimed

    def _claim_there(self, node: Node, ports: Mapping[str, int], address: str) -> dict[str, int]:
        found = self._ray.get(self._agents[node].claim.remote(dict(ports), address), timeout=ORDER_SECONDS)
        if isinstance(found, str):
            raise PortBusyError(found, field=f"ports of {node.name}", fix="use --server.port 0: any free one")
        return found

    # the run ------------------------------------------------------------------------------------------------

    def start(
        self, files: Files, spec: ProcessSpec, log_path: Path, on_stdout: Listener, on_stderr: Listener
    ) -> Watched:
        """Start a process where its place is. With `files` given it is an `Executor`.

        Args:
            files: configuration files by path; those that the command line names are written on its node.

        Raises:
            ProcessFailedError: its node is lost, or can't start it.
        """
        node = spec.place.node
        if node is None or node.is_head:
            return Child(seeing(spec, self._gpus.get(node, "") if node else ""), log_path, on_stdout, on_stderr)
        agent = self._agents[node]
        process = RemoteProcess(spec, log_path, on_stdout, on_stderr, partial(self._order, node, spec.name))
        self._processes[node][spec.name] = process
        needed = {str(path): content for path, content in files.items() if str(path) in spec.argv}
        try:
            process.begin(self._ray.get(agent.start.remote(spec, needed), timeout=ORDER_SECONDS))
        except (self._ray.exceptions.RayError, OSError) as error:
            process.close()
            raise ProcessFailedError(
                f"{node.name} can't start it",
                field=spec.name,
                got=str(getattr(error, "cause", None) or error),
                fix=f"every machine of the cluster needs {spec.argv[0]}, with this package",
            ) from error
        return process

    def _order(self, node: Node, name: str, method: str) -> None:
        """Have a node's agent do something with a process, and wait for it; the thread of that node tells a loss."""
        with suppress(self._ray.exceptions.RayError, TimeoutError):
            self._ray.get(getattr(self._agents[node], method).remote(name), timeout=ORDER_SECONDS)

    def _follow(self, node: Node) -> None:
        """Pass on what a node's processes write and how they end, until the run is over or the node is lost."""
        processes = self._processes[node]
        while not self._is_closing.wait(NEWS_SECONDS):
            try:
                news = self._ray.get(self._agents[node].news.remote(), timeout=ORDER_SECONDS)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                reason = f"lost with its node {node.name} ({type(error).__name__})"
                for process in list(processes.values()):
                    process.lose(reason)
                return
            for line in news.lines:
                processes[line.name].hear(line)
            for name, code in news.ended.items():
                processes[name].end(code)

    def close(self) -> None:
        """End the actors, and with them what is left of their processes; leave the cluster."""
        self._is_closing.set()
        for thread in self._threads:
            thread.join(ORDER_SECONDS)
        for agent in self._agents.values():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(agent)
        self._ray.shutdown()


def _knock(address: str) -> None:
    """Raise an OSError if nothing listens at HOST:PORT: Ray itself would look for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()


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
    """Return the module.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            field="--cluster", got="no module ray", wanted="the package", fix="pip install 'grpo-trainer[ray]'"
        ) from None


@contextmanager
def joined(address: str | None, wanted: int) -> Iterator[RayCluster | None]:
    """Connect to a cluster within the block; without an address there is none."""
    if address is None:
        yield None
        return
    cluster = RayCluster(address, wanted)
    try:
        yield cluster
    finally:
        cluster.close()
