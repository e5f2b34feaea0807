"""The bridge proof against a real server in which faults are planted: each is caught, and named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_trainer.errors import BridgeError
from tests.bridge_contract import Trainer
from tests.integration.serving import Serving, serving
from tests.processes import ROOT
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
    path = f"{ROOT / 'tests/integration/faulty'}:{ROOT}"
    with serving(folder, env={"PYTHONPATH": path, "GRPO_TEST_FAULT": str(file)}) as server:
        yield Faulty(server, file)


@pytest.mark.parametrize("fresh", [True, False])
def test_an_honest_server_is_proved(faulty: Faulty, fresh: bool) -> None:
    faulty.prove("none", fresh=fresh)


LACKS = r"serves? the (whole )?adapter,? (without|but 0 % of) "


@pytest.mark.parametrize(
    ("fault", "fresh", "said"),
    [
        ("base", True, r"\(synthetic adapter\): the server does not serve the adapter: it answers as the base model"),
        ("base", False, r"\(present adapter\): the server does not serve the adapter: it answers as the base model"),
        ("stale prefix cache", True, r"\(synthetic adapter\): .*long prompt alone .*a stale prefix cache"),
        ("stale prefix cache", False, r"adapter\): the server .*long prompt alone .*a stale prefix cache"),
        ("twice", True, r"\(synthetic adapter\): the server serves the adapter at 4 times its scale \(applied twice\)"),
        ("twice", False, r"\(present adapter\): the server serves the adapter at 4 times its scale \(applied twice\)"),
        ("without layers.1.mlp.up_proj", True, rf"\(synthetic adapter\): .*{LACKS}model.layers.1.mlp.up_proj"),
        (
            "without layers.0.self_attn.q_proj",
            True,
            rf"\(synthetic .*{LACKS}model.layers.0.self_attn.q_proj",
        ),
        ("without layers.0.self_attn.k_proj", False, rf".*{LACKS}model.layers.0.self_attn.k_proj"),
        ("without v_proj", False, rf"\(present adapter\): .*{LACKS}every v_proj"),
        ("newest", True, "asked for policy-proof-present-.*, answered by "),
        ("other adapter", True, r"\(synthetic adapter\): the server .*(base model|published before \(present\))"),
        ("other adapter", False, r"\(synthetic adapter\): the server still serves the adapter .* before \(present\)"),
    ],
)
def test_each_fault_is_caught_and_named(faulty: Faulty, fault: str, fresh: bool, said: str) -> None:
    with pytest.raises(BridgeError, match=f"bridge proof failed.*{said}"):
        faulty.prove(fault, fresh=fresh)
    faulty.prove("none", fresh=fresh)
