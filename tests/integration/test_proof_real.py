"""The bridge proof against a real server in which faults are planted: each is caught, and named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_trainer.alignment.adapter import EARLIER, STALE_CACHE
from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.alignment.proof import BASE_MODEL
from grpo_trainer.errors import BridgeError
from tests import warm
from tests.bridge_contract import Trainer
from tests.integration.serving import Serving, serving
from tests.unit.tiny_lora import fill_b

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server


@dataclass
class Faulty:
    """A server that does wrong what its file of faults says."""

    server: Serving
    file: Path

    def prove(self, fault: str, *, fresh: bool) -> None:
        """A trainer proves its bridge to the server with this fault.

        Args:
            fresh: the adapter is still without effect, as at the start of a training.
        """
        trainer = Trainer(self.server)
        with trainer.swap:
            first = trainer.swap.connect(1)
            if not fresh:
                fill_b(trainer.model)
                self.file.write_text("none")
                trainer.swap.publish(first)
            self.file.write_text(fault)
            try:
                trainer.swap.prove()
            finally:
                self.file.write_text("none")
                left = [v.name for v in trainer.client.lora_status().versions if "-proof-" in v.name]
                assert left == [], "a proof leaves nothing behind"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    file = folder / "fault"
    file.write_text("none")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(warm.COLD, raising=False)  # the engine has the faults of the server that it is forked from
        with serving(folder, env={"GRPO_TEST_FAULT": str(file)}, module="tests.integration.faulty") as server:
            yield Faulty(server, file)


@pytest.mark.parametrize("fresh", [True, False])
def test_an_honest_server_is_proved(faulty: Faulty, fresh: bool) -> None:
    faulty.prove("none", fresh=fresh)


SYNTHETIC, PRESENT = "(synthetic adapter)", "(present adapter)"


@pytest.mark.parametrize(
    ("fault", "fresh", "tried", "found"),
    [
        ("base", True, SYNTHETIC, BASE_MODEL),
        ("base", False, PRESENT, BASE_MODEL),
        ("stale prefix cache", True, SYNTHETIC, STALE_CACHE),
        ("stale prefix cache", False, "adapter)", STALE_CACHE),
        ("twice", True, SYNTHETIC, "4 times (applied twice)"),
        ("twice", False, PRESENT, "4 times (applied twice)"),
        ("without layers.1.mlp.up_proj", True, SYNTHETIC, "model.layers.1.mlp.up_proj"),
        ("without layers.0.self_attn.q_proj", True, SYNTHETIC, "model.layers.0.self_attn.q_proj"),
        ("without layers.0.self_attn.k_proj", False, "adapter)", "model.layers.0.self_attn.k_proj"),
        ("without v_proj", False, PRESENT, "v_proj"),
        ("newest", True, "model", "policy-proof-present"),
        ("other adapter", True, SYNTHETIC, ""),  # the base model, or the one before: both are other weights
        ("other adapter", False, SYNTHETIC, f"{EARLIER} (present)"),
    ],
)
def test_each_fault_is_caught_and_named(faulty: Faulty, fault: str, fresh: bool, tried: str, found: str) -> None:
    with pytest.raises(BridgeError) as failed:
        faulty.prove(fault, fresh=fresh)
    error = failed.value
    assert error.field.startswith(FAILED) and tried in error.field
    assert set(found.split()) <= set(f"{error.summary} {error.got}".split()) or found in error.wanted
    faulty.prove("none", fresh=fresh)
