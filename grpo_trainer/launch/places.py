"""Which process of a run goes to which machine and GPUs: a pure function of the run and the machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from grpo_trainer.config.run import RunConfig
from grpo_trainer.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """A machine of a cluster.

    Attributes:
        address: by which the others reach it.
        id: by which the cluster knows it.
        is_head: `grpo run` runs there, and the run's folder is there.
    """

    name: str
    address: str
    gpus: int = 0
    cpus: float = 1.0
    id: str = ""
    is_head: bool = False


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        node: None: this machine, without a cluster.
        gpus: numbers of its GPUs among those of its room.
        room: what the run holds of that machine: empty for all processes of the start, later a room for each process.
    """

    node: Node | None = None
    gpus: tuple[int, ...] = ()
    room: str = ""

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
    trainer's GPU. On CPUs a process takes one core, and a node may have more processes than cores.

    Args:
        nodes: the head is the first.

    Raises:
        ConfigError: the nodes have too few GPUs.
    """
    free = _FreeGpus(config, nodes) if on_gpu else _FreeCores(nodes)
    trainers = free.trainers(config.options.trainer_gpus)
    places = dict(zip(trainer_names(len(trainers)), trainers, strict=True))
    for number, name in enumerate(config.server.names):
        shares = number == 0 and config.trainer.shares_weights
        places[name] = places["trainer"] if shares else free.server()
    return places


def gpus_of_server(config: RunConfig) -> int:
    vllm = config.trainer.vllm
    return vllm.tensor_parallel_size * vllm.pipeline_parallel_size * vllm.data_parallel_size


def gpus_of_run(config: RunConfig) -> int:
    """Return the number of GPUs of all trainers and servers."""
    servers = config.server.replicas - (1 if config.trainer.shares_weights else 0)
    return config.options.trainer_gpus + servers * gpus_of_server(config)


def free_nodes(nodes: Sequence[Node], taken: Iterable[Place], gpus: int) -> list[Node]:
    """Return the nodes on which one more process of a run has room, the emptiest first.

    Args:
        taken: the places that the run has.
        gpus: that the process needs; 0: a core, of which a node may give more than it has.
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


class _FreeGpus:
    """The GPUs that no process has yet."""

    def __init__(self, config: RunConfig, nodes: Sequence[Node]) -> None:
        self._config = config
        self._free = {node: list(range(node.gpus)) for node in nodes}
        self._head = nodes[0]

    def trainers(self, wanted: int) -> list[Place]:
        """Return a place with one GPU for each trainer process, rank 0 on the head."""
        if not self._free[self._head]:
            raise ConfigError(
                "the trainer's first process writes into the run's folder, and needs a GPU on the head",
                field="--cluster",
                got=f"no GPU on the head, {self._head.name}",
                wanted="a head with a GPU",
                fix="start `grpo run` on a node with GPUs",
            )
        found: list[Place] = []
        others = sorted((node for node in self._free if node != self._head), key=lambda node: -len(self._free[node]))
        for node in (self._head, *others):
            while self._free[node] and len(found) < wanted:
                found.append(Place(node, (self._free[node].pop(0),)))
        if len(found) < wanted:
            raise self._too_few()
        return found

    def server(self) -> Place:
        """Return a place for one server, whose GPUs are all on one node."""
        size = gpus_of_server(self._config)
        for node, free in self._free.items():
            if len(free) >= size:
                taken, self._free[node] = tuple(free[:size]), free[size:]
                return Place(node, taken)
        raise self._too_few()

    def _too_few(self) -> ConfigError:
        there = ", ".join(f"{node.name} {node.gpus}" for node in self._free)
        size, wanted = gpus_of_server(self._config), gpus_of_run(self._config)
        each = f", {size} of one server on one node" if size > 1 else ""
        return ConfigError(
            "too few GPUs in the cluster",
            field="--cluster",
            got=there,
            wanted=f"{wanted} GPUs: {self._config.options.trainer_gpus} for the trainer, the rest for servers{each}",
            fix="add nodes and --cluster-nodes, or lower --trainer-gpus or --server.replicas",
        )


class _FreeCores:
    """The cores that no process has yet; fewer than none where processes share cores."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._free = {node: node.cpus for node in nodes}
        self._head = nodes[0]

    def trainers(self, wanted: int) -> list[Place]:
        """Return the head for as many trainer processes as it has cores, at least one, then the next nodes."""
        found: list[Place] = []
        for node in self._free:
            while len(found) < wanted and (self._free[node] >= 1 or not found):
                self._free[node] -= 1
                found.append(Place(node))
        found += [Place(self._head)] * (wanted - len(found))
        return found

    def server(self) -> Place:
        """Return the node with the most free cores."""
        node = max(self._free, key=lambda each: self._free[each])
        self._free[node] -= 1
        return Place(node)
