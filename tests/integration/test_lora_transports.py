"""The bridge's contract over every transport that works on a CPU, and what only a CPU shows."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.errors import ServerError
from tests.bridge_contract import PROMISES, Contract, Trainer, contract
from tests.integration.serving import serving, shared_server
from tests.processes import free_port
from tests.unit.tiny_lora import fill_b
from vllm_server.protocol import LoraLoadRequest

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server


@pytest.fixture(scope="module", params=["disk", "memory", "gloo"])
def made(request: pytest.FixtureRequest) -> Iterator[Contract]:
    with contract(shared_server(), request.param) as opened:
        yield opened


@pytest.mark.parametrize("promise", PROMISES)
def test_contract(made: Contract, promise: str) -> None:
    made.first = made.trainer.swap.connect(1)
    getattr(made, promise)()


@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_a_server_on_a_cpu_refuses_channels_and_goes_on(kind: str) -> None:
    with contract(shared_server(), "memory") as made:
        made.publish(made.first)
        layout = made.layout()
        there: dict[str, Any] = {"boot_id": made.trainer.client.wait_until_ready().boot_id}
        there |= {"buckets": [b64encode(layout.headers[0]).decode()], "adapter_config": layout.settings}
        spec = {"kind": "cuda_ipc", "gpu_uuid": "GPU-of-the-trainer", "storages": [[0, "AA=="]]}
        if kind == "nccl":
            spec = {"kind": "group", "backend": "nccl", "meet": "A" * 172, "world_size": 2}
        there["spec"] = spec
        refused = made.server.post("/channels", there)
        assert refused.status_code == 422, refused.text
        error = refused.json()["error"]
        assert error["param"] == "channel"
        assert ("GPU-of-the-trainer" if kind == "cuda_ipc" else "libnccl.so.2") in error["got"]
        made.assert_serves(made.first)


def test_a_server_that_ends_is_an_error_and_one_that_came_back_serves_what_is_published_to_it(tmp_path: Path) -> None:
    port = free_port()
    with serving(tmp_path, port=port) as server:
        trainer = Trainer(server)
        trainer.swap.connect(1)
        fill_b(trainer.model, seed=1)
        trainer.swap.publish(1)
    with trainer.swap:
        with pytest.raises(ServerError) as gone:
            trainer.swap.publish(2)
        assert gone.value.field.startswith("POST http://") and gone.value.fix
        with serving(tmp_path, port=port):
            fill_b(trainer.model, seed=3)
            trainer.swap.publish(3)
            assert [v.version for v in trainer.client.lora_status().versions] == [3]
            probe, answered = trainer.ask()
            assert answered == 3 and trainer.gap(probe) < 1e-3
            with pytest.raises(ServerError) as refused:
                trainer.client.load_adapter(LoraLoadRequest(channel="c0ffee", version=4))
            assert "404" in refused.value.summary and refused.value.got.startswith("c0ffee")
