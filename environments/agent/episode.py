"""Run one episode of an agent: a function that gets a client, or a command that finds the policy in its variables."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import signal
import ssl
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from environments.agent.front import POLICY, Session
from environments.config import ConfigError
from environments.user_modules import function_of, module_named, module_of_file
from grpo_common.errors import UserError
from grpo_common.text import printable

TASK_FILE: Final = "{task_file}"
LAST_BYTES: Final = 64 * 1024
"""Of a command's output, that are kept."""
SHOWN: Final = 300


class EpisodeFailed(UserError, RuntimeError):
    """An agent failed: its episode is lost."""


Agent = Callable[[Mapping[str, Any], Session], Awaitable[Any]]
"""Runs an episode of a task; returns what the agent returned. Cancelled, it ends all but a plain function's thread."""


def load_function(name: str, url: str) -> Agent:
    """Return the agent of `FILE.py:FUNCTION` or `MODULE:FUNCTION`.

    Raises:
        ConfigError: there is no such function, it does not take a task and a client, or `openai` is not installed.
    """
    field, (where, _, function_name) = f"--agent {name}", name.rpartition(":")
    if not where:
        raise ConfigError(field=field, got=name, wanted="FILE.py:FUNCTION or MODULE:FUNCTION", fix="add the function")
    module = module_of_file(field, where) if where.endswith(".py") else module_named(field, where)
    function = function_of(field, module, function_name)
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
    certificates = ssl.create_default_context()  # loading them takes 50 ms, as long as ten calls

    async def run(task: Mapping[str, Any], own: Session) -> Any:
        connections: Any = http(verify=certificates)
        client: Any = kind(base_url=url, api_key=own.key, http_client=connections)
        client.reward = own.reward
        if is_async:
            async with client:
                return await function(dict(task), client)
        return await _in_thread(partial(function, dict(task), client))

    return run


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a thread of its own, so that no other episode waits for one that hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not done.done():  # it was not given up
            done.set_exception(error) if error else done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # SystemExit, too, is only the agent's
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await done


def load_command(command: str, url: str) -> Agent:
    """Return the agent of a command. `{task_file}` becomes the path of the task as JSON.

    Raises:
        ConfigError: it is no command.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(field="--env.command", got=error, wanted="a shell's words", fix="close its quotes") from None
    if not words:
        raise ConfigError(field="--env.command", got="nothing", wanted="a command", fix="name a program")
    return partial(_command, words, url)


async def _command(words: Sequence[str], url: str, task: Mapping[str, Any], own: Session) -> str:
    """Run a command to its end; return its last line.

    Raises:
        EpisodeFailed: it does not start, or its exit status is not 0.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-agent-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(dict(task), default=str))
        pipe = asyncio.subprocess.PIPE
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": own.key, "OPENAI_MODEL": POLICY}
        try:
            process = await asyncio.create_subprocess_exec(
                *(word.replace(TASK_FILE, str(file)) for word in words),
                env={**os.environ, **variables}, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EpisodeFailed(field=words[0], got=error.strerror or error, wanted="a program") from None
        assert process.stdout is not None and process.stderr is not None, "they are pipes"
        try:
            said, complaint = await asyncio.gather(_last(process.stdout), _last(process.stderr))
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status:
        shown = printable((complaint.strip() or said.strip())[-SHOWN:], SHOWN)
        raise EpisodeFailed(field=words[0], got=f"exit status {status}: {shown}", wanted="exit status 0")
    return said.strip().rpartition("\n")[2]


async def _last(stream: asyncio.StreamReader) -> str:
    """Return the end of an output, of which any amount may come."""
    kept = b""
    while piece := await stream.read(LAST_BYTES):
        kept = (kept + piece)[-LAST_BYTES:]
    return kept.decode(errors="replace")
