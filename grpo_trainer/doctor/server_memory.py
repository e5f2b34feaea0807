"""How much of a GPU's memory the server gets, and how large its key-value cache is to be, by the memory plan.

The default share leaves a trainer of all weights too little room on some GPUs. So it is lowered where that helps, and
kept where the user has chosen it.

Left to itself, vLLM measures how much of a GPU is free while it starts. Nobody else may use that GPU then: memory that
is taken would be counted as the server's, and memory that is given back ends the server.
"""

from __future__ import annotations

import logging
import math

from grpo_common.models import find_folder
from grpo_trainer.config.options import key_of
from grpo_trainer.config.run import RunConfig
from grpo_trainer.config.server import arguments
from grpo_trainer.doctor.memory_advice import other_shares
from grpo_trainer.doctor.run_checks import check_memory, planned_memory, server_spread
from grpo_trainer.errors import ModelError
from grpo_trainer.launch.plan import CACHE_FLAG
from grpo_trainer.machine import Machine
from grpo_trainer.memory import CACHE
from grpo_trainer.model.shape import ModelShape, read_model

log = logging.getLogger(__name__)

PLANNED_WITHIN = 0.02
"""By this share the numbers in a model's files may differ from those that the plan counts."""
SHARE = "gpu_memory_utilization"
SIZES = frozenset(map(key_of, (CACHE_FLAG, "--enable-sleep-mode")))
"""Arguments with which a server uses other memory than the plan counts."""


def with_room(config: RunConfig, machine: Machine, shape: ModelShape | None) -> RunConfig:
    """Return the run with a share of the GPU's memory for its server that leaves the trainer enough.

    It is the default, or the largest smaller share with which the memory plan fits. A share that the user has chosen
    stays; so does the default where no share is enough, and where the plan does not know the GPUs (`is_planned`).
    """
    if shape is None or not is_planned(config, machine) or SHARE in config.server.model_fields_set:
        return config
    now = planned_memory(config, shape, machine)
    if now.fits:
        return config
    smaller = (each for each in reversed(other_shares(now)) if each.server.gpu_share < now.server.gpu_share)
    fitting = next((each for each in smaller if each.fits), None)
    if fitting is None:
        return config
    update = {SHARE: fitting.server.gpu_share}
    vllm = config.trainer.vllm.model_copy(update=update)
    if not config.trainer.owns_server:  # the trainer's file says what the user has set
        vllm.model_fields_set.discard(SHARE)
    trainer = config.trainer.model_copy(update={"vllm": vllm})
    return config.model_copy(update={"trainer": trainer, "server": config.server.model_copy(update=update)})


def warn_of_memory(config: RunConfig, machine: Machine, shape: ModelShape | None) -> None:
    """Warn before the start of a run that needs more of a GPU's memory than there is."""
    if shape is None or not is_planned(config, machine):
        return
    found, _ = check_memory(config, shape, machine)
    if found.status == "fail":
        log.warning("the run may not fit: %s, wanted %s; %s", found.got, found.wanted, found.fix)


def is_planned(config: RunConfig, machine: Machine) -> bool:
    """Return whether the memory plan knows the run's GPUs, and what its server uses of them.

    It does not know those of a cluster, and those that `--server.gpus` names by anything but numbers.
    """
    unnumbered = config.server.gpus is not None and server_spread(config).placed is None
    return _knows_server(config, machine) and not (config.options.cluster or unnumbered)


def _knows_server(config: RunConfig, machine: Machine) -> bool:
    """Return whether the memory plan knows how much of a GPU the server uses. It does unless `SIZES` are given."""
    given = {key_of(flag) for flag, _ in arguments(config.trainer.vllm.extra_args)}
    return machine.on_gpu and not given & SIZES


def planned_cache(config: RunConfig, machine: Machine) -> int | None:
    """Return the bytes of the cache on each of the server's GPUs.

    None where nobody needs the GPU during the server's start, where the user has fixed the size, and where the plan
    does not know the model: vLLM measures then.
    """
    trainer = config.trainer
    if trainer.owns_server or not _knows_server(config, machine):
        return None
    if trainer.vllm.in_8_bits:  # the plan's weights and tokens have 16
        return None
    shape = _known_shape(trainer.model.name)
    if shape is None:
        return None
    plan = planned_memory(config, shape, machine).plan()
    sizes = [row.nbytes for row in plan.rows if (row.owner, row.what) == ("server", CACHE)]
    return min(sizes) if sizes and not plan.problems else None


def _known_shape(model: str) -> ModelShape | None:
    """The model's sizes; None: it is not here yet, or its files hold something else than such a model has."""
    folder = find_folder(model)
    if folder is None:
        return None
    try:
        files = read_model(folder)
        shape = ModelShape.from_config(files.config)
    except (ModelError, ValueError):
        return None
    is_coarse = files.config.get("quantization_config") or files.config.get("compression_config")
    stored = sum(math.prod(tensor) for tensor in files.shapes.values())
    return None if is_coarse or abs(stored - shape.parameters) > PLANNED_WITHIN * stored else shape
