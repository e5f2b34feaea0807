"""Where the LoRA bridge starts: on a server that was used before, or one that can't take it.

What it promises once it is open is in `tests/bridge_contract.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainer.errors import BridgeError
from tests.bridge_contract import Trainer
from tests.integration.serving import RANK, shared_server

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server


def test_a_trainer_that_comes_to_a_used_server_goes_on_counting() -> None:
    trainer, other = Trainer(shared_server()), Trainer(shared_server())
    with trainer.swap:
        first = trainer.swap.connect(1)
        trainer.swap.publish(first)
    with other.swap:
        assert other.swap.connect(0) == first + 1
        assert other.swap.connect(first + 50) == first + 50  # a resumed trainer that is further keeps its count
        assert other.swap.publish(first + 1).version == first + 1


@pytest.mark.parametrize(
    ("options", "field", "got", "wanted"),
    [
        ({"lora_r": 16}, "--max-lora-rank", f"{RANK}", "16"),
        ({"lora_name": "other"}, "--lora-name", "other", "policy"),
    ],
)
def test_a_server_that_cannot_take_the_bridge_is_refused_before_training(
    options: dict[str, Any], field: str, got: str, wanted: str
) -> None:
    trainer = Trainer(shared_server(), **options)
    with trainer.swap, pytest.raises(BridgeError) as error:
        trainer.swap.connect(0)
    assert (error.value.field, error.value.got) == (field, got) and wanted in error.value.wanted
