"""Plans processes of a running run again: on another machine once their own is lost, or one server more."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from grpo_trainer.config.run import RunConfig
from grpo_trainer.config.server import server_names
from grpo_trainer.errors import ConfigError
from grpo_trainer.launch.crew import started_again
from grpo_trainer.launch.places import HERE, Place, Places, gpus_of_server
from grpo_trainer.launch.plan import ProcessSpec, RunPlan
from grpo_trainer.launch.ports import claim_ports

PlanAgain = Callable[[RunConfig, Mapping[str, int], Places], RunPlan]
"""Returns the plan of a run with these ports and places."""


class Machines(Protocol):
    """The machines of a cluster (`ray_cluster.RayCluster`)."""

    def is_lost(self, place: Place) -> bool:
        """Return whether a place's machine, or what the run held of it, is gone."""
        ...

    def room_for(self, name: str, gpus: int, places: Places) -> Place | None:
        """Hold room for a process on a machine, and return it; None: no machine has room."""
        ...

    def claim(self, wanted: Mapping[str, int], places: Places) -> dict[str, int]:
        """Return free ports of processes on their machines."""
        ...


class Replanner:
    """Knows the present places and ports of a run's processes.

    Args:
        machines: those of a cluster; None: this machine alone.
        on_gpu: whether servers and trainers need GPUs.
    """

    def __init__(
        self,
        config: RunConfig,
        ports: Mapping[str, int],
        places: Places,
        plan: PlanAgain,
        *,
        machines: Machines | None = None,
        on_gpu: bool = False,
    ) -> None:
        self._config = config
        self._ports = dict(ports)
        self._places = dict(places)
        self._plan = plan
        self._machines = machines
        self._on_gpu = on_gpu

    def placed(self, specs: Sequence[ProcessSpec]) -> Sequence[ProcessSpec] | None:
        """Return processes as they start again; those of a lost machine get another one.

        Returns:
            None: no machine has room.

        Raises:
            PortBusyError: their new machine has no free port.
        """
        machines = self._machines
        lost = [spec.name for spec in specs if machines and spec.place.node and machines.is_lost(spec.place)]
        if machines is None or not lost:
            return started_again(specs)
        places = {name: place for name, place in self._places.items() if name not in lost}
        for name in lost:
            is_server = name in self._config.server.names
            size = gpus_of_server(self._config) if is_server else 1
            if (place := machines.room_for(name, size if self._on_gpu else 0, places)) is None:
                return None
            places[name] = place
        self._places = places
        self._ports |= machines.claim({name: 0 for name in lost if name in self._ports}, places)
        return started_again(self._planned([spec.name for spec in specs]))

    def another_server(self, gpus: str | None) -> ProcessSpec | None:
        """Return one more server.

        Args:
            gpus: its CUDA_VISIBLE_DEVICES, without a cluster.

        Returns:
            None: no machine has room.

        Raises:
            ConfigError: the options do not suit one more server, such as no GPU for it.
        """
        server = self._config.server
        name = server_names(server.replicas + 1)[-1]
        sets = [server.gpus, gpus]
        if self._machines is None and self._on_gpu:
            if gpus is None:
                raise ConfigError(field="--gpus", got="none", wanted="the GPUs of the new server", fix="add --gpus 1")
            sets[0] = server.gpus or _first_visible(gpus_of_server(self._config))
        more = {"replicas": server.replicas + 1, "gpus": ";".join(filter(None, sets)) or None}
        config = self._config.model_copy(update={"server": server.model_copy(update=more)})
        places = dict(self._places)
        if self._machines is not None:
            place = self._machines.room_for(name, gpus_of_server(config) if self._on_gpu else 0, places)
            if place is None:
                return None
            places[name] = place
            port = self._machines.claim({name: 0}, places)
        else:
            port = claim_ports({name: 0}, HERE.address)
        before = self._config, self._ports, self._places
        self._config, self._ports, self._places = config, {**self._ports, **port}, places
        try:
            return self._planned([name])[0]
        except ValueError:
            self._config, self._ports, self._places = before
            raise

    def _planned(self, names: Sequence[str]) -> list[ProcessSpec]:
        plan = self._plan(self._config, self._ports, self._places)
        by_name = {process.name: process for process in plan.processes}
        return [by_name[name] for name in names]


def _first_visible(count: int) -> str:
    """Return the GPUs of the only server of a run that names none: the first that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(seen.split(",")[:count] if seen else map(str, range(count)))
