"""Run one episode of an agent: a function that gets a client, or a command that finds the policy in its variables."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import select
import shlex
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import psutil

from environments.agent.front import POLICY, Session
from environments.config import ConfigError
from environments.scoring import Threads, error_of_code, in_thread, limited
from environments.user_modules import function_of, module_of
from grpo_common.errors import UserError
from grpo_common.processes import kill_group
from grpo_common.text import printable

TASK_FILE: Final = "{task_file}"
LAST_BYTES: Final = 64 * 1024
"""Of a command's output, that are kept."""
SHOWN: Final = 300
LOOK_MS: Final = 200
"""Between two looks, by who reads a command's output, whether its episode is over."""
HELD_S: Final = 1.0
"""What the output of a command that has ended may be held by a process of another user."""
LOOKS: Final = 5
"""For processes of an episode: each may have started others meanwhile."""
BETWEEN_LOOKS_S: Final = 0.1
CLOCK_S: Final = 1.0
"""Linux gives the time of a process's start to a second."""
LOOPBACK: Final = "127.0.0.1"


class EpisodeFailed(UserError, RuntimeError):
    """An agent failed: its episode is lost."""


Agent = Callable[[Mapping[str, Any], Session], Awaitable[Any]]
"""Runs an episode of a task; returns what the agent returned. Cancelled, it ends all but a plain function's thread."""


async def played(agent: Agent, task: Mapping[str, Any], own: Session, seconds: float) -> Any:
    """Return what an agent returned, or raise its error; one that would end the process is wrapped.

    Raise EpisodeFailed if it took longer than `seconds`, or cancelled itself. One that ignores this is left behind.
    """
    field, got, wanted = "--env.episode_timeout", f"{seconds:g} s", "the end of the episode"
    try:
        return await limited(seconds, agent(task, own), EpisodeFailed(field=field, got=got, wanted=wanted))
    except asyncio.CancelledError as error:
        error_of_code(error)  # raises it at the end of the program
        raise EpisodeFailed(field="the agent", got="its own cancellation", wanted="a result or an error") from None


def load_function(name: str, url: str) -> Agent:
    """Return the agent of `FILE.py:FUNCTION` or `MODULE:FUNCTION`.

    Raise a ConfigError if there is none, it does not take a task and a client, or `openai` is not installed.
    """
    field, (where, _, function_name) = f"--agent {name}", name.rpartition(":")
    if not where:
        raise ConfigError(field=field, got=name, wanted="FILE.py:FUNCTION or MODULE:FUNCTION", fix="add the function")
    function = function_of(field, module_of(field, where), function_name)
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        wanted = f"{function_name}(task, client)"
        raise ConfigError(field=field, got=error, wanted=wanted, fix="give it these two arguments") from None
    try:
        import openai
    except ImportError as error:
        raise ConfigError(field=field, got=error, wanted="the package openai", fix="pip install openai") from None
    is_async = inspect.iscoroutinefunction(function)
    kind = openai.AsyncOpenAI if is_async else openai.OpenAI
    http = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
    threads = Threads(sys.maxsize)  # of their own: no other episode waits for one that hangs
    certificates = ssl.create_default_context()  # loading them takes 50 ms, as long as ten calls

    async def run(task: Mapping[str, Any], own: Session) -> Any:
        connections: Any = http(verify=certificates, trust_env=False)  # no proxy leads to this machine
        client: Any = kind(base_url=url, api_key=own.key, http_client=connections)
        client.reward = own.reward
        if is_async:
            async with client:
                return await function(task, client)
        with client:
            return await threads.call(function, task, client)

    return run


def load_command(command: str, url: str) -> Agent:
    """Return the agent of a command, or raise ConfigError. `{task_file}` becomes the path of the task as JSON."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(field="--env.command", got=error, wanted="a shell's words", fix="close its quotes") from None
    if not words:
        raise ConfigError(field="--env.command", got="nothing", wanted="a command", fix="name a program")
    return partial(_command, words, url)


async def _command(words: Sequence[str], url: str, task: Mapping[str, Any], own: Session) -> str:
    """Run a command to its end; return its last line. Raise EpisodeFailed if it does not start, or fails."""
    with tempfile.TemporaryDirectory(prefix="grpo-agent-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(dict(task), default=str))
        direct = ",".join(filter(None, (os.environ.get("no_proxy"), os.environ.get("NO_PROXY"), LOOPBACK)))
        variables = {"NO_PROXY": direct, "no_proxy": direct, "OPENAI_BASE_URL": url}
        variables |= {"OPENAI_API_KEY": own.key, "OPENAI_MODEL": POLICY}
        began = time.time()
        try:  # here: a process of asyncio that is cancelled during its start keeps the event loop from ending
            process = subprocess.Popen(
                [word.replace(TASK_FILE, str(file)) for word in words],
                env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EpisodeFailed(field=words[0], got=error.strerror or error, wanted="a program") from None
        outputs: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
        over = Event()

        def keep_last(stream: Any, kept: bytearray) -> None:
            waiting = select.poll()
            waiting.register(stream, select.POLLIN)
            while not over.is_set():  # a process of another user may hold it for ever
                if waiting.poll(LOOK_MS):
                    if not (piece := stream.read1(LAST_BYTES)):
                        break
                    kept += piece
                    del kept[:-LAST_BYTES]
            stream.close()

        readers = [Thread(target=keep_last, args=each, daemon=True) for each in outputs.items()]

        def end() -> None:
            kill_group(process)
            _end_all(own.key, began)
            with suppress(subprocess.TimeoutExpired):  # one that has become another user's may not be killed
                process.wait(HELD_S)
            until = time.monotonic() + HELD_S
            for reader in readers:
                if reader.ident is not None:
                    reader.join(max(0.0, until - time.monotonic()))
            over.set()

        try:
            for reader in readers:
                reader.start()
            await in_thread(process.wait)
        finally:
            try:
                await in_thread(end)
            except RuntimeError:  # no thread can be started: the command must not stay behind
                end()
    said, complaint = (bytes(each).decode(errors="replace") for each in outputs.values())
    if process.returncode:
        shown = printable((complaint.strip() or said.strip())[-SHOWN:], SHOWN)
        raise EpisodeFailed(field=words[0], got=f"exit status {process.returncode}: {shown}", wanted="exit status 0")
    return said.strip().rpartition("\n")[2]


def _end_all(key: str, began: float) -> None:
    """End the processes that have an episode's key among their variables, also in other sessions.

    There are `LOOKS` looks at most: another one after each that ended a process, or saw one without variables that has
    started since the episode began.
    """
    for _ in range(LOOKS):
        again = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or it is another user's
                variables = process.environ()
                if not variables and process.create_time() > began - CLOCK_S:
                    again = True  # Linux shows them only at the end of exec
                if process.pid != os.getpid() and key in variables.values():
                    again = True  # before the kill, which fails for a number that was used again: the next look ends it
                    process.kill()
        if not again:
            return
        time.sleep(BETWEEN_LOOKS_S)
