"""Which process of a run goes to which machine and GPUs: a pure function of the run and the machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from grpo_trainer.config.processes import RunConfig
from grpo_trainer.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """A machine of a cluster."""

    name: str
    address: str
    """By which the others reach it."""
    gpus: int = 0
    cpus: float = 1.0
    id: str = ""
    """By which the cluster knows it."""
    is_head: bool = False
    """`grpo run` runs there, and the run's folder is there."""


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    node: Node | None = None
    """None: this machine, without a cluster."""
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs among those of its room."""
    room: str = ""
    """What the run holds of that machine: empty for all processes of the start, later a room for each process."""

    @property
    def is_here(self) -> bool:
        """Whether it is the machine of `grpo run`."""
        return self.node is None or self.node.is_head

    @property
    def address(self) -> str:
        """Where the process listens, and is reached: loopback on the head, because all its clients are there."""
        return LOOPBACK if self.node is None or self.node.is_head else self.node.address


HERE = Place()
Places = Mapping[str, Place]
"""The places of processes by their names; a process without an entry runs here."""
NO_PLACES: Places = MappingProxyType({})


def trainer_names(processes: int) -> tuple[str, ...]:
    """Return the names of trainer processes: trainer, trainer-1, …"""
    return ("trainer", *(f"trainer-{rank}" for rank in range(1, processes)))


def meeting_address(places: Places) -> str:
    """Return the address at which trainer processes meet: the head's, as the nodes of the others reach it."""
    trainers = [place for name, place in places.items() if name.startswith("trainer")]
    if not trainers or trainers[0].node is None or all(place.is_here for place in trainers):
        return LOOPBACK
    return trainers[0].node.address


def place_run(config: RunConfig, nodes: Sequence[Node], *, on_gpu: bool) -> Places:
    """Return the places of trainers and servers; all other processes run on the head.

    Trainer processes fill the head first, then the node with the most free GPUs, and so on, so that they are on few
    nodes. Each server goes to the first node with enough free GPUs. A server that shares its weights is on the
    trainer's GPU. On CPUs a process takes one core, a server is on the node with the most free ones, and a node may
    have more processes than cores. The head is the first of the nodes.

    Raises:
        ConfigError: the nodes have too few GPUs.
    """
    head, *others = nodes
    free: dict[Node, float] = {node: node.gpus if on_gpu else node.cpus for node in nodes}
    names, size = trainer_names(config.options.trainer_gpus), config.server.degree
    places: dict[str, Place] = {}

    def take(node: Node, gpus: int) -> Place:
        first, free[node] = int(node.gpus - free[node]), free[node] - (gpus if on_gpu else 1)
        return Place(node, tuple(range(first, first + gpus)) if on_gpu else ())

    if on_gpu and not head.gpus:
        raise ConfigError(
            "the trainer's first process writes into the run's folder, and needs a GPU on the head",
            field="--cluster",
            got=f"no GPU on the head, {head.name}",
            wanted="a head with a GPU",
            fix="start `grpo run` on a node with GPUs",
        )
    rest = sorted(others, key=lambda node: -free[node]) if on_gpu else others
    for name in names:
        room = (node for node in (head, *rest) if free[node] >= 1)
        node = next(room, None) if on_gpu or places else head
        if node is None and on_gpu:
            raise _too_few(config, nodes)
        places[name] = take(node or head, 1)
    for number, name in enumerate(config.server.names):
        if number == 0 and config.trainer.shares_weights:
            places[name] = places["trainer"]
            continue
        node = (
            next((node for node in nodes if free[node] >= size), None) if on_gpu else max(nodes, key=free.__getitem__)
        )
        if node is None:
            raise _too_few(config, nodes)
        places[name] = take(node, size)
    return places


def _too_few(config: RunConfig, nodes: Sequence[Node]) -> ConfigError:
    size = config.server.degree
    each = f", {size} of one server on one node" if size > 1 else ""
    trainers = config.options.trainer_gpus
    return ConfigError(
        "too few GPUs in the cluster",
        field="--cluster",
        got=", ".join(f"{node.name} {node.gpus}" for node in nodes),
        wanted=f"{gpus_of_run(config)} GPUs: {trainers} for the trainer, the rest for servers{each}",
        fix="add nodes and --cluster-nodes, or lower --trainer-gpus or --server.replicas",
    )


def gpus_of_run(config: RunConfig) -> int:
    """Return the number of GPUs of all trainers and servers."""
    servers = config.server.replicas - (1 if config.trainer.shares_weights else 0)
    return config.options.trainer_gpus + servers * config.server.degree


def free_nodes(nodes: Sequence[Node], taken: Iterable[Place], gpus: int) -> list[Node]:
    """Return the nodes with room for one more process beside a run's places, the emptiest first.

    It needs GPUs, or else a core, of which a node may give more than it has.
    """
    in_use: dict[str, set[tuple[str, int]]] = {node.id: set() for node in nodes}
    processes = dict.fromkeys(in_use, 0)
    for place in taken:
        if place.node is not None and place.node.id in in_use:
            in_use[place.node.id] |= {(place.room, number) for number in place.gpus}
            processes[place.node.id] += 1
    if gpus:
        free = {node: node.gpus - len(in_use[node.id]) for node in nodes}
        return sorted((node for node in nodes if free[node] >= gpus), key=lambda node: -free[node])
    return sorted(nodes, key=lambda node: processes[node.id] - node.cpus)
