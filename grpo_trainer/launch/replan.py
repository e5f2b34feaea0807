"""Plans processes of a running run again: on another machine once their own is lost, or one server more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.server import server_names
from grpo_trainer.errors import ConfigError, PortBusyError, ProcessFailedError
from grpo_trainer.launch.places import HERE, Place, Places
from grpo_trainer.launch.plan import ProcessSpec, RunPlan
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.ray_cluster import RayCluster

PlanAgain = Callable[[RunConfig, Mapping[str, int], Places], RunPlan]
"""Returns the plan of a run with these ports and places."""


@dataclass(eq=False, repr=False)
class Replanner:
    """Knows the present places and ports of a run's processes."""

    config: RunConfig
    ports: Mapping[str, int]
    places: Places
    plan: PlanAgain
    _: KW_ONLY
    machines: RayCluster | None = None
    """Those of a cluster; None: this machine alone."""
    on_gpu: bool = False
    """Whether servers and trainers need GPUs."""
    _vacant: list[Place] = field(default_factory=list, init=False)

    def placed(self, specs: Sequence[ProcessSpec]) -> Sequence[ProcessSpec] | None:
        """Return processes as they start; those of a lost machine, and new servers of a cluster, get a machine.

        None: no machine has room yet, or a free port.
        """
        machines = self.machines
        if machines is None:
            return specs
        new = [name for name in self.config.server.names if name not in self.places]
        homeless = [spec.name for spec in specs if spec.name in new or machines.is_lost(spec.place)]
        if not homeless:
            return specs
        places = {name: place for name, place in self.places.items() if name not in homeless}
        for name in homeless:
            if (place := self._room(machines, name, places.values())) is not None:
                places[name] = place
        found = [name for name in homeless if name in places]
        try:
            ports = machines.claim({name: 0 for name in found if name in self.ports}, places)
        except (ProcessFailedError, PortBusyError):  # its machine does not answer, or has no free port
            ports = None
        if ports is None or found != homeless:
            self._vacant += [places[name] for name in found]
            return None
        self.ports, self.places = {**self.ports, **ports}, places
        return self._planned([spec.name for spec in specs])

    def _room(self, machines: RayCluster, name: str, taken: Iterable[Place]) -> Place | None:
        """Return a place of the run that no process has any more, or one that a machine gives."""
        size = self.config.server.degree if name in self.config.server.names else 1
        size = size if self.on_gpu else 0
        self._vacant = [place for place in self._vacant if not machines.is_lost(place)]
        fitting = [place for place in self._vacant if len(place.gpus) >= size]
        if not fitting:
            return machines.room_for(name, size, [*taken, *self._vacant])
        machines.forget(name)
        place = min(fitting, key=lambda place: len(place.gpus))
        self._vacant.remove(place)
        if rest := place.gpus[size:]:
            self._vacant.append(replace(place, gpus=rest))
        return replace(place, gpus=place.gpus[:size])

    def another_server(self, gpus: str | None) -> ProcessSpec:
        """Return one more server. On a cluster it gets a machine and a port when it is placed, else the named GPUs.

        Raises:
            ConfigError: the options do not suit one more server, such as no GPU for it.
        """
        server = self.config.server
        name = server_names(server.replicas + 1)[-1]
        sets = [server.gpus, gpus]
        if self.machines is None and self.on_gpu:
            if gpus is None:
                raise ConfigError(field="--gpus", got="none", wanted="the GPUs of the new server", fix="add --gpus 1")
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")  # a server without named GPUs has the first of these
            visible = seen.split(",") if seen else map(str, range(server.degree))
            sets[0] = server.gpus or ",".join([*visible][: server.degree])
        more = {"replicas": server.replicas + 1, "gpus": ";".join(filter(None, sets)) or None}
        port = {name: 0} if self.machines else claim_ports({name: 0}, HERE.address)
        before = self.config, self.ports
        trainer = self.config.trainer.model_copy(update={"server": server.model_copy(update=more)})
        self.config = self.config.model_copy(update={"trainer": trainer})
        self.ports = {**self.ports, **port}
        try:
            return self._planned([name])[0]
        except ValueError:
            self.config, self.ports = before
            raise

    def vacate(self, name: str) -> None:
        """Note that a server has left for good: another process may have its place."""
        if self.machines is not None:
            self.machines.forget(name)
            if name in self.places:
                self._vacant.append(self.places[name])
                self.places = {known: place for known, place in self.places.items() if known != name}

    def _planned(self, names: Sequence[str]) -> list[ProcessSpec]:
        plan = self.plan(self.config, self.ports, self.places)
        by_name = {process.name: process for process in plan.processes}
        return [by_name[name] for name in names]
