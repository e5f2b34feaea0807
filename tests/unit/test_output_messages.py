"""Messages of outputs, encoded as by an engine that may reuse their buffer while they are sent."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_server.worker import messages


def encoded_twice() -> list[list[np.ndarray]]:
    """What two messages contain after both were encoded with one buffer."""
    encoder, buffer = MsgpackEncoder(), bytearray()
    sent = [encoder.encode_into([np.full(100, number), np.full(1, number)], buffer) for number in (1.0, 2.0)]
    return [MsgpackDecoder(list[np.ndarray]).decode(frames) for frames in sent]


def test_a_message_stays_as_it_is_when_the_next_one_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MsgpackEncoder, "encode_into", MsgpackEncoder.encode_into)  # so that it comes back
    monkeypatch.delattr(EngineCoreProc, "_send_msg_tracking_payload", raising=False)  # as in vLLM 0.25
    (_, overwritten), _ = encoded_twice()
    assert overwritten.tolist() == [2.0]
    messages.keep_until_sent()
    for number, arrays in enumerate(encoded_twice(), start=1):
        assert [set(array) for array in arrays] == [{number}, {number}]
