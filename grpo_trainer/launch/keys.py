"""The key of a run's servers: every server that other machines can reach has one.

A key goes to the server by its environment, and to trainer and environments by configuration files that only their
owner may read. No command line and no log has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from grpo_trainer.config.run import RunConfig
from grpo_trainer.launch.places import HERE, Places


def with_key(config: RunConfig, places: Places, make: Callable[[], str] = secrets.token_urlsafe) -> RunConfig:
    """Return the run with a new key for its servers, if one of them listens beyond loopback, or may do so later.

    A key that the user has given stays. The rollout API listens on loopback: all its clients are on its machine.
    """
    trainer = config.trainer
    reachable = [name for name in config.server.names if not places.get(name, HERE).is_here]
    may_come = bool(places) and trainer.servers_may_change
    if not (reachable or may_come) or trainer.vllm.api_key:
        return config
    vllm = trainer.vllm.model_copy(update={"api_key": make()})
    return config.model_copy(update={"trainer": trainer.model_copy(update={"vllm": vllm})})
