"""Which transport opens the channel: the first that reaches the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.weights import broadcast
from grpo_trainer.weights.broadcast import BroadcastBridge
from grpo_trainer.weights.build import weights_folder
from grpo_trainer.weights.gpus import TrainerPlace
from tests.unit.factories import bridge_info, worker
from vllm_server.protocol import BridgeInfo, DiskSource, Staging, WeightsOpenRequest, WeightsOpenResponse

UNREACHED = BridgeError("the workers did not join", field="--broadcast-transport", got="nccl")


class Server:
    """One that opens every channel, or refuses."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.said: list[str] = []

    def open_weights(self, asked: WeightsOpenRequest) -> WeightsOpenResponse:
        assert isinstance(asked.source, DiskSource)
        self.said.append(f"open {asked.source.folder}")
        self.staging = asked.staging
        if self.refusal is not None:
            raise self.refusal
        return WeightsOpenResponse(channel="c", staged=False, staging_bytes=0)

    def close_weights(self, name: str) -> None:
        self.said.append(f"close {name}")


class Sender:
    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error, self.closed = name, error, False
        self.source = DiskSource(folder=name)

    def join(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


def reach(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    *senders: Sender,
    staging: Staging = "off",
    info: BridgeInfo | None = None,
    gpus: tuple[str, ...] = (),
) -> Any:
    """Open a channel from a trainer on the GPU `own`, whose processes are on `gpus`."""

    def found(*_: Any) -> Iterator[Any]:
        yield from senders

    monkeypatch.setattr(broadcast, "senders", found)
    monkeypatch.setattr(broadcast, "REASON_SECONDS", 5.0)
    monkeypatch.setattr(broadcast.TrainerPlace, "of", lambda tensor: TrainerPlace("own", "here"))
    config: Any = SimpleNamespace(broadcast_transport="auto", broadcast_staging=staging, in_flight="keep")
    nothing: Any = None
    talks: Any = server
    url, folder = "http://host", Path("/none")
    bridge = BroadcastBridge(config, nothing, nothing, talks, url, folder, 8, "float32", gpus=gpus)
    stored = {"w": torch.zeros(1)}
    way: Any = SimpleNamespace(info=info or bridge_info(), buckets=SimpleNamespace(headers=[b"header"]), stored=stored)
    return bridge._reach(way)[0]  # pyright: ignore[reportPrivateUsage]


def test_the_first_that_reaches_the_server_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server, first, second = Server(), Sender("nccl"), Sender("gloo")
    assert reach(server, monkeypatch, first, second) is first
    assert server.said == ["open nccl"] and not first.closed


def test_the_next_is_tried_when_the_server_no_longer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    server, first, second = Server(), Sender("nccl", UNREACHED), Sender("gloo")
    assert reach(server, monkeypatch, first, second) is second
    assert server.said[-2:] == ["close ", "open gloo"]
    assert first.closed and not second.closed


@pytest.mark.parametrize("error", [UNREACHED, ServerError("refused", field="weights")])
def test_the_last_ones_error_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    last = Sender("gloo", error)
    with pytest.raises(type(error)) as raised:
        reach(Server(), monkeypatch, Sender("nccl", UNREACHED), last)
    assert raised.value is error and last.closed
    with pytest.raises(ServerError) as refused:  # by the server's side
        reach(Server(ServerError("refused", field="weights")), monkeypatch, Sender("gloo"))
    assert refused.value.field == "weights"


@pytest.mark.parametrize(
    ("gpu", "gpus", "asked", "wanted"),
    [
        ("own", (), "auto", "off"),
        ("second", ("own", "second"), "auto", "off"),
        ("third", ("own", "second"), "auto", "auto"),
        ("own", (), "on", "on"),
    ],
)
def test_memory_that_a_trainer_process_plans_to_use_is_not_taken_for_staging(
    gpu: str, gpus: tuple[str, ...], asked: Staging, wanted: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, info = Server(), bridge_info(worker(uuid=gpu))
    reach(server, monkeypatch, Sender("gloo"), staging=asked, info=info, gpus=gpus)
    assert server.staging == wanted


def test_the_folder_for_disk_is_the_runs_own(tmp_path: Path) -> None:
    """It is deleted at the end, so it is never the folder that the user names, nor another run's."""
    root, one, other = tmp_path / "root", tmp_path / "one", tmp_path / "other"
    asked = BridgeConfig(weight_bridge_mode="broadcast", broadcast_transport="disk", broadcast_root=root)
    first = weights_folder(asked, one)
    assert first.parent == root and first == weights_folder(asked, one) != weights_folder(asked, other)
    assert (
        weights_folder(BridgeConfig(weight_bridge_mode="broadcast", broadcast_transport="disk"), one) == one / "weights"
    )
