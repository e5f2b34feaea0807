"""How errors read that come from the trainer's dealings with a model and an inference server."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.alignment.drift import DriftAlarm, Recheck, SampleGap
from grpo_trainer.errors import BridgeError, DriftError, ServerError
from grpo_trainer.server_client import ATTEMPTS
from grpo_trainer.shared.names import NamesError, bind_names
from grpo_trainer.weights.gpus import TrainerPlace
from grpo_trainer.weights.packed import PackedAdapter
from grpo_trainer.weights.transports import choose
from tests.unit.test_drift import LIMIT, NOTHING_FITS, gap
from tests.unit.test_proof import FakeServer, prove
from tests.unit.test_server_client import Answer, server
from tests.unit.test_transports import OTHER, OURS, info, worker
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.errors import ServeError
from vllm_server.protocol import Transport


def test_parameters_that_can_not_be_bound() -> None:
    with pytest.raises(NamesError) as error:
        bind_names({"a.weight": (2, 3), "a.q_proj.weight": (4, 4)}, {"a.qkv_proj.weight": (12, 4), "b.weight": (3,)})
    assert str(error.value).splitlines() == [
        "--model-name: the trainer's parameters can't be bound to vLLM's; got 4 problems, wanted each parameter of "
        "both sides exactly once; serve the model of --model-name; if shared_vllm does not know it, use "
        "--weight-bridge-mode lora_only or none",
        "a.q_proj.weight [4, 4]: does not fit; got no a.k_proj.weight, wanted all parts of vLLM's a.qkv_proj.weight",
        "a.weight [2, 3]: got none, wanted one place in vLLM",
        "vLLM's a.qkv_proj.weight [12, 4]: got no owner of rows 0 to 12, wanted a parameter of the trainer's",
        "vLLM's b.weight [3]: got no owner of rows 0 to 3, wanted a parameter of the trainer's",
    ]


# drift -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "recheck", "text"),
    [
        (
            [gap(5, 0.6), gap(5, 0.2)],
            NOTHING_FITS,
            "the server generates with other weights or in another precision than the trainer's, or the environment "
            "trains on tokens that the server did not sample; got 2 of 2 samples, of version 5, 0.4 nats a token off, "
            "wanted at most 0.1; compare --model-name, --dtype and --seq-len of both sides, and the environment's "
            "masks; run the proof again by restarting the trainer",
        ),
        (
            [gap(5, 0.6), gap(5, 0.6)],
            Recheck(0.6, 0.001, None),
            "the samples have the base model's logprobs: the server does not apply the adapter; got 2 of 2 samples, "
            "of version 5, 0.6 nats a token off, wanted at most 0.1; let the environment ask for the served model's "
            "name or `policy_version`; if it does, restart the server",
        ),
        (
            [gap(4, 0.001), gap(5, 0.6)],
            NOTHING_FITS,
            "samples of older versions agree with the trainer: the server holds other weights under this one; got 1 "
            "of 2 samples, of version 5, 0.6 nats a token off, wanted at most 0.1; look at the server's log around "
            "the publish of this version; restart the server",
        ),
        (
            [SampleGap(5, 1, math.nan)],
            NOTHING_FITS,
            "logprobs of the samples are not finite; got 1 of 1 samples, of version 5; look at train/loss and "
            "logprobs/ in metrics.jsonl; lower --lr if they are the trainer's, restart the server if they are the "
            "server's",
        ),
    ],
)
def test_drift(gaps: list[SampleGap], recheck: Recheck, text: str) -> None:
    with pytest.raises(DriftError) as error:
        DriftAlarm(LIMIT, "stop", "lora_only").check_samples(1, gaps, 5, lambda version: recheck)
    assert str(error.value) == f"drift on bridge lora_only: {text}"


# proofs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("base served", "does not serve the adapter: it answers as the base model does"),
        ("scaled twice", "serves the adapter at 4 times its scale (applied twice)"),
        ("without k_proj", "serves the adapter without every k_proj"),
        (
            "without layers.0.self_attn",
            "serves other weights than the trainer's (another base model, a damaged adapter?)",
        ),
    ],
)
def test_a_proof_that_failed(fault: str, what: str) -> None:
    trainer = tiny_lora()
    fill_b(trainer)
    served: Any = FakeServer(trainer, fault)
    with pytest.raises(BridgeError) as error:
        prove(trainer, served)
    own, of_base = re.findall(r"\d[\d.e-]*", error.value.got)
    assert str(error.value) == (
        f"bridge proof failed (present adapter): the server {what}; got mean |server - trainer| of {own} nats a token, "
        f"|server - base model| {of_base}, wanted at most 0.001; nothing was trained; use one base model and dtype on "
        "both sides; --no-proof trains all the same"
    )


# servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            Answer(409, ServeError(409, "version", got=3, wanted="4", fix="ask again").response()),
            "version: the inference server refuses GET URL with 409; got 3, wanted 4; ask again",
        ),
        (
            Answer(500, {"error": {"message": "broken", "type": "InternalServerError", "code": 500}}),
            "the inference server refuses GET URL with 500; got broken",
        ),
        (Answer(502, "bad gateway"), 'the inference server refuses GET URL with 502; got "bad gateway"'),
        (
            {"of": "another kind"},
            "GET URL: not the answer of `grpo serve`: Object missing required field `lora_available`",
        ),
        (
            None,
            "GET URL: no answer from the inference server; got RemoteProtocolError: Server disconnected without "
            "sending a response.; see in its log whether it still runs",
        ),
    ],
)
def test_a_server_that_refuses(answer: object, text: str) -> None:
    with server([answer] if answer else [None] * ATTEMPTS) as (client, _), pytest.raises(ServerError) as error:
        client.lora_status()
    said = re.sub(r"http://127.0.0.1:\d+/lora/status", "URL", str(error.value))
    assert said == text


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        (
            "nccl",
            [
                "--lora-transport: adapters can't go to the server; got nccl; "
                "use --lora-transport auto, which takes the fastest that works",
                "not nccl: rank: no room; got 64",
            ],
        ),
        (
            None,
            [
                "--lora-transport: adapters can't go to the server; got auto",
                f"not cuda_ipc: CUDA_VISIBLE_DEVICES of the server's worker 0: got {OTHER}, wanted {OURS}",
                "not nccl: rank: no room; got 64",
                "not memory: rank: no room; got 64",
                "not disk: rank: no room; got 64",
            ],
        ),
    ],
)
def test_no_transport_that_works(monkeypatch: pytest.MonkeyPatch, wanted: Transport | None, lines: list[str]) -> None:
    def refuse(*_: object) -> Any:
        raise ServerError("no room", field="rank", got=64)

    monkeypatch.setattr(choose, "OPENERS", dict.fromkeys(choose.OPENERS, refuse))
    monkeypatch.setattr(TrainerPlace, "of", lambda tensor: TrainerPlace(OURS, "here"))
    nothing: Any = None
    packed = PackedAdapter(tiny_lora(), torch.float32)
    with pytest.raises(BridgeError) as error:
        choose.open_transport(wanted, packed, nothing, info(worker(uuid=OTHER)), Path(), 2)
    assert str(error.value).splitlines() == lines
