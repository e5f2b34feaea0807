"""What `grpo servers` asks of a running `grpo run`: a file for each request and its answer, in `RUN_DIR/servers`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from uuid import uuid4

import msgspec

from grpo_common.formats import FormatError, check_format
from grpo_trainer.errors import ServerError
from grpo_trainer.files import replace_file

FOLDER = "requests"
FORMAT = 1
"""Number of the format of requests."""
ANSWER_SECONDS = 60.0
"""Time for `grpo run` to answer: it may wait for the answer of a machine of its cluster."""
POLL_SECONDS = 0.1


class Request(msgspec.Struct, frozen=True):
    """A change of a run's servers.

    Attributes:
        server: the name or URL of the server to drop, or the URL of a running one to add; None: start one.
        gpus: CUDA_VISIBLE_DEVICES of a server that is started.
    """

    action: Literal["add", "drop"]
    server: str | None = None
    gpus: str | None = None
    format: int = 1


class Answer(msgspec.Struct, frozen=True):
    """What came of a request."""

    done: bool
    text: str


def request(servers: Path, wanted: Request, seconds: float = ANSWER_SECONDS) -> Answer:
    """Ask a running `grpo run`, and return its answer.

    Args:
        servers: the run's folder of servers.

    Raises:
        ServerError: no answer came.
    """
    folder = servers / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns()}-{uuid4().hex[:8]}"
    question, answered = folder / f"{name}.json", folder / f"{name}.answer"
    replace_file(question, msgspec.json.encode(msgspec.structs.replace(wanted, format=FORMAT)))
    deadline = time.monotonic() + seconds
    while not answered.exists():
        if time.monotonic() > deadline:
            question.unlink(missing_ok=True)
            raise ServerError(
                f"no answer of grpo run within {seconds:.0f} s",
                field=str(servers),
                fix="is it running? `grpo servers` shows whether it has done what was asked",
            )
        time.sleep(POLL_SECONDS)
    answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    answered.unlink()
    return answer


def answer_all(servers: Path, obey: Callable[[Request], Answer]) -> None:
    """Answer the requests that have come, the oldest first."""
    for question in sorted((servers / FOLDER).glob("*.json")):
        try:
            content = question.read_bytes()
            question.unlink()
        except FileNotFoundError:  # the command that asked has stopped waiting
            continue
        try:
            wanted = msgspec.json.decode(content, type=Request)
            check_format(question.name, wanted.format, FORMAT)
            answer = obey(wanted)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            answer = Answer(False, f"{question.name} is no request: {error}")
        except FormatError as error:
            answer = Answer(False, str(error))
        replace_file(question.with_suffix(".answer"), msgspec.json.encode(answer))
