"""Keep each message of outputs unchanged until zmq has sent it.

vLLM 0.25 encodes every message into a buffer that it uses again. A message with arrays has several frames, the buffer
first. vLLM waits until the last frame is sent, not until the buffer is. A long message is then overwritten by the next
one while it is sent: the server fails to decode it, or gives its requests another message's tokens.
"""

from __future__ import annotations

from vllm_server import seams


def keep_until_sent() -> None:
    """Give each message its own bytes. Call this in the engine's process, before it takes requests.

    vLLM with pull request 50053 waits for the buffer, and stays as it is.

    Raises:
        FatalError: this vLLM encodes outputs elsewhere.
    """
    if hasattr(seams.found("vllm.v1.engine.core", "EngineCoreProc"), "_send_msg_tracking_payload"):
        return
    encoder = seams.found("vllm.v1.serial_utils", "MsgpackEncoder", "encode_into")
    encoder.encode_into = lambda self, outputs, _buffer: self.encode(outputs)
