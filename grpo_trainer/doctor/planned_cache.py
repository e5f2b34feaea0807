"""How large the server's key-value cache is to be, by the memory plan.

Left to itself, vLLM measures how much of a GPU is free while it starts. Nobody else may use that GPU then: memory that
is taken would be counted as the server's, and memory that is given back ends the server.
"""

from __future__ import annotations

import math

from grpo_common.models import find_folder
from grpo_trainer.config.run import RunConfig
from grpo_trainer.config.server import arguments
from grpo_trainer.doctor.machine import Machine
from grpo_trainer.doctor.memory import CACHE, Setup
from grpo_trainer.doctor.model import ModelShape, read_model
from grpo_trainer.doctor.run_checks import devices_of, server_spread
from grpo_trainer.errors import ModelError
from grpo_trainer.launch.plan import says_cache_size

PLANNED_WITHIN = 0.02
"""By this share the numbers in a model's files may differ from those that the plan counts."""
UNPLANNED = ("--enable-sleep-mode",)
"""Arguments of a server that uses other memory than the plan counts."""


def planned_cache(config: RunConfig, machine: Machine) -> int | None:
    """Return the bytes of the cache on each of the server's GPUs.

    None where nobody needs the GPU during the server's start, where the user has fixed the size, and where the plan
    does not know the model: vLLM measures then.
    """
    trainer = config.trainer
    flags = {flag for flag, _ in arguments(trainer.vllm.extra_args)}
    if trainer.owns_server or config.options.trainer_gpus > 1 or not machine.on_gpu:
        return None
    if trainer.vllm.in_8_bits or says_cache_size(trainer.vllm.extra_args) or flags.intersection(UNPLANNED):
        return None
    shape = _known_shape(trainer.model.name)
    if shape is None:
        return None
    plan = Setup(trainer, shape, server_spread(config), devices_of(machine)).plan()
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
