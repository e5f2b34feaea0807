"""The command line that every environment has: ``serve``, ``process`` with its page, ``evaluate`` and ``try``."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from html import escape
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from environments.api import wire
from environments.config import ConfigError, Settings, parse_settings, refuse_data
from environments.peers.http import PeerError
from environments.peers.rollout_api import RolloutApi
from environments.peers.roster import servers
from environments.running.groups import UNSCORED_IN_A_ROW, EnvironmentFailed, GroupMaker, set_up
from environments.running.metrics import open_lines
from environments.running.runner import Runner, until
from environments.running.trial import fail_and_exit, report, try_out
from environments.scoring import ScoreTimeout, gathered, watch_loop
from environments.tokenizers import load_tokenizer
from environments.trajectory import trained_tokens
from grpo_common.formats import FormatError
from grpo_common.pages.document import PAGE_STYLE, document
from grpo_common.status import OWN
from grpo_common.text import PrintableFormatter

if TYPE_CHECKING:
    from environments.base import BaseEnv

log = logging.getLogger(__name__)

COMMANDS: Final = {
    "serve": "supply a trainer with scored groups through the rollout API",
    "process": "write scored groups to a JSONL file and an HTML page; needs no trainer and no rollout API",
    "evaluate": "print the policy's metrics as one line of JSON",
    "try": "check the environment without a server: setup, a prompt, the scores of made-up answers",
}
PROCESSED_AT_ONCE: Final = 64
"""Groups that `process` generates at the same time, without `--env.max_concurrent_groups`."""
CLOSE_S = 10.0
"""Longest time for `close()`, and then for the environment's other code."""
BLOCKED_S: Final = 2.5
"""Seconds after a signal at which a process ends whose event loop is blocked: just before a run would kill it."""
SAY_EVERY: Final = 10
"""Groups between lines of `process` about its progress."""
CALLED_AS: Final = "GRPO_CALLED_AS"
"""Environment variable with the command that replaced itself by this one, if any: `grpo env NAME`. Messages show it."""


def main(env_cls: type[BaseEnv[Any, Any]], arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 failed, 2 wrong command line.

    Python code, such as a notebook's cell, gives `arguments` and gets `SystemExit`: its process is not ended from
    another thread or a signal handler. None: the process is this command's, and so are its arguments.
    """
    module = inspect.getmodule(env_cls)
    by_module = f"python -m {module.__spec__.name}" if module is not None and module.__spec__ is not None else ""
    prog = os.environ.pop(CALLED_AS, None) or by_module or Path(sys.argv[0]).name
    try:
        _run(env_cls, prog, list(sys.argv[1:] if arguments is None else arguments), owns_process=arguments is None)
        sys.exit(0)
    except (ConfigError, FormatError, PeerError, ScoreTimeout) as error:  # others show where user code failed
        fail_and_exit(error, prog)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(env_cls: type[BaseEnv[Any, Any]], prog: str, arguments: list[str], *, owns_process: bool) -> None:
    command = arguments[0] if arguments else None
    if command in ("-h", "--help"):
        summary = inspect.cleandoc(env_cls.__doc__ or env_cls.__name__).partition("\n")[0]
        print(f"usage: {prog} COMMAND [--env.… …] [--openai.… …] [--config FILE.toml]\n\n{summary}\n")
        print("\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items()))
        print(f"\nOptions of a command: {prog} serve --help")
        return
    if command not in COMMANDS:
        got = "nothing" if command is None else repr(command)
        raise ConfigError(field="COMMAND", got=got, wanted=f"one of {', '.join(COMMANDS)}")
    settings = parse_settings(Settings[env_cls.env_config_cls], f"{prog} {command}", arguments[1:])
    if not env_cls.takes_data:
        refuse_data(env_cls.name, settings.data.path is not None, bool(settings.rewards))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    OWN.open()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if settings.env.use_wandb:
        log.warning("--env.use_wandb has no effect: the trainer logs to W&B (--log-to wandb)")
    # The tokenizer is loaded before the event loop starts: that takes seconds, in which signals would be ignored.
    report().doing("loading the tokenizer")
    tokenizer = load_tokenizer(settings.env.tokenizer_name)
    if command == "try":
        found = asyncio.run(try_out(env_cls, settings, tokenizer))
        report().write(found=found)
        print(f"{env_cls.name}: {found}", flush=True)
    else:
        asyncio.run(_command(command, env_cls, settings, tokenizer, owns_process=owns_process))


async def _command(
    command: str, env_cls: type[BaseEnv[Any, Any]], settings: Settings[Any], tokenizer: Any, *, owns_process: bool
) -> None:
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        if owns_process:
            stack.push(_end_soon)
        server = servers(settings.openai, patience=settings.env.retry_timeout)
        stack.push_async_callback(server.close)
        env = env_cls(settings.env, server, tokenizer)
        env.data, env.rewards = settings.data, settings.rewards
        if env.teacher is not None:
            stack.push_async_callback(env.teacher.close)
        if owns_process:
            _stop_on_signals(stop, status=0 if command == "serve" else 1)
            watching = asyncio.create_task(watch_loop(settings.env.score_timeout, lambda: env.is_set_up))
            stack.callback(watching.cancel)
        stack.push_async_callback(_close, env)
        if command == "serve":
            api = RolloutApi(settings.env)
            stack.push_async_callback(api.close)
            await until(stop, Runner(env, api).run())
        else:
            work = process(env, settings.groups) if command == "process" else evaluate(env)
            if not await until(stop, work):
                raise PeerError("stopped before it was done")


async def _close(env: BaseEnv[Any, Any]) -> None:
    """Close an environment. Its errors are logged, so that what else is open is closed too."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await env.close()
    except TimeoutError:
        log.warning("close() of the environment is given up after %g s", CLOSE_S)
    except Exception:
        log.exception("close() of the environment failed")


def _end_soon(_: object, error: BaseException | None, __: object) -> None:
    """End this process soon if code of the environment ignores its cancellation, or hangs in a thread: Python waits."""

    def end() -> None:
        log.warning("code of the environment has not ended within %g s, so this process ends without it", CLOSE_S)
        if error is not None:
            print(error, file=sys.stderr)
        os._exit(0 if error is None else getattr(error, "exit_code", 1))

    _call_after(CLOSE_S, end)


def _call_after(seconds: float, function: Callable[[], None]) -> None:
    """Call a function later, in a thread that keeps no process alive."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


def _stop_on_signals(stop: asyncio.Event, status: int) -> None:
    """Have SIGINT and SIGTERM set `stop`; if the event loop is blocked, end the process with an exit status. A second
    SIGINT ends it at once; a second SIGTERM does not, as the kernel may send several."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            if number == signal.SIGINT:  # a second Ctrl-C: the environment's code may never end
                os._exit(128 + number)
            return
        if loop.is_closed():
            sys.exit(status)
        loop.call_soon_threadsafe(stop.set)
        _call_after(BLOCKED_S, end_if_blocked)

    def end_if_blocked() -> None:
        if not stop.is_set():
            log.warning("asked to stop; the event loop has been blocked for %g s, so this process ends", BLOCKED_S)
            os._exit(status)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


async def process(env: BaseEnv[Any, Any], groups: int) -> None:
    """Write scored groups to the file in the settings. Raise ConfigError if none is set or it can't be written, and
    EnvironmentFailed if there are not enough items."""
    path = env.config.data_path_to_save_groups
    if path is None:
        raise ConfigError("required by process", field="--env.data_path_to_save_groups", fix="name a JSONL file")
    await set_up(env)
    file = open_lines("--env.data_path_to_save_groups", path, "x")
    written, dropped = list[wire.ScoredData](), Counter[str]()
    maker, unused = GroupMaker(env, dropped), 0

    async def make(item: object) -> None:
        if (group := await maker.make(item)) is not None:
            file.write(msgspec.json.encode(group).decode() + "\n")
            written.append(group)
            maker.used()
            if len(written) % SAY_EVERY == 0:
                log.info("%d of %d groups written", len(written), groups)

    try:
        while len(written) < groups:
            before = len(written)
            at_once = min(groups - len(written), env.config.max_concurrent_groups or PROCESSED_AT_ONCE)
            items = [item for _ in range(at_once) if (item := await maker.next_item()) is not None]
            if not items:
                got, wanted = f"{len(written)} groups", f"{groups} groups"
                raise EnvironmentFailed("no more items", field=env.name, got=got, wanted=wanted)
            await gathered(map(make, items))
            unused = unused + len(items) if len(written) == before else 0
            if unused >= UNSCORED_IN_A_ROW:  # a trainer would wait for better ones; here nobody sees it
                raise EnvironmentFailed(f"nothing came of {unused} groups in a row", field=env.name, got=dict(dropped))
    finally:
        file.close()
        page = path.with_name(f"{path.stem}.page.html") if path.suffix == ".html" else path.with_suffix(".html")
        page.write_text(groups_page(f"{env.name}: {path.name}", written))
    skipped = "".join(f", {count} dropped ({reason})" for reason, count in dropped.items())
    measured = "".join(f", {name} {value:.3f}" for name, value in env.measures.take().items())
    log.info("%s and %s: %d groups written%s%s", path, page, len(written), measured, skipped)


async def evaluate(env: BaseEnv[Any, Any]) -> None:
    """Print the environment's metrics as one line of JSON, or raise ConfigError if it has none."""
    await set_up(env)
    if not (metrics := await env.evaluate()):
        field, fix = f"{env.name}: evaluate()", "write evaluate(self)"
        raise ConfigError(field=field, got="no metrics", wanted="metrics by name", fix=fix)
    print(json.dumps({"env": env.name, **metrics}, default=float), flush=True)


MOST_GROUPS: Final = 200
"""Limit of groups on a page: a browser must hold them in memory."""
STYLE: Final = (
    PAGE_STYLE
    + """
body { max-width: 60rem } .answer { border-top: 1px solid var(--line); padding: .5rem 0 }
.role { display: block; text-transform: uppercase; letter-spacing: .05em }
"""
)


def groups_page(title: str, groups: Sequence[wire.ScoredData]) -> str:
    """Return one self-contained HTML page: figures of all groups, then each with its prompt once, answers by score."""
    scores = [score for group in groups for score in wire.counted_scores(group)]
    figures = {"groups": f"{len(groups):,}", "answers": f"{len(scores):,}"}
    if scores:
        lengths = [trained_tokens(mask) for group in groups for mask in group.masks]
        same = sum(len(set(wire.counted_scores(group))) <= 1 for group in groups)
        figures |= {"mean score": f"{fmean(scores):.3f}", "scores": f"{min(scores):.3g} to {max(scores):.3g}"}
        figures |= {"mean length in tokens": f"{fmean(lengths):,.1f}"}
        figures["groups that teach"] = f"{1 - same / len(groups):.0%}"
    tiles = (f'<div class="tile"><small>{name}</small><b>{value}</b></div>' for name, value in figures.items())
    body = [f'<h1>{escape(title)}</h1><div class="tiles">{"".join(tiles)}</div>']
    body += [_group(number, group) for number, group in enumerate(groups[:MOST_GROUPS], start=1)]
    if len(groups) > MOST_GROUPS:
        body.append(f'<p class="dim">{len(groups) - MOST_GROUPS} more groups are in the JSONL file.</p>')
    return document(title, "".join(body), style=STYLE)


def _group(number: int, group: wire.ScoredData) -> str:
    conversations = group.messages or [[] for _ in group.scores]
    shared = 0  # first messages that all conversations share; the policy's are never shared, even if equal
    for messages in zip(*conversations, strict=False):
        if messages[0].get("role") == "assistant" or any(message != messages[0] for message in messages):
            break
        shared += 1
    mean = fmean(wire.counted_scores(group) or [0.0])
    order = sorted(range(len(group.scores)), key=lambda index: -group.scores[index])
    answers = "".join(_answer(group, index, conversations[index][shared:], mean) for index in order)
    first = conversations[0][shared - 1].get("content") if shared else None
    opening = escape(textwrap.shorten(_text(first), 100, placeholder=" …")) if first else "no text was kept"
    return (
        f"<details{' open' if number == 1 else ''}><summary><b>{number}</b> · mean {mean:.3f} · {opening}</summary>"
        f"{_messages(conversations[0][:shared])}{answers}</details>"
    )


def _answer(group: wire.ScoredData, index: int, messages: Sequence[dict[str, Any]], mean: float) -> str:
    score, is_unscored = group.scores[index], ((group.overrides or [])[index:] or [{}])[0].get(wire.UNSCORED)
    side = "" if is_unscored or score == mean else "good" if score > mean else "bad"
    version = f", policy {group.policy_versions[index]}" if group.policy_versions else ""
    tokens = f"{trained_tokens(group.masks[index])} of {len(group.tokens[index])} tokens trained{version}"
    shown = "no reward" if is_unscored else f"{score:.3f}"
    return f'<div class="answer"><b class="{side}">{shown}</b> <small>{tokens}</small>{_messages(messages)}</div>'


def _messages(messages: Sequence[dict[str, Any]]) -> str:
    pairs = [(str(message.get("role")), _text(message.get("content"))) for message in messages]
    extras = [message["extra"] for message in messages if isinstance(message.get("extra"), dict)]
    pairs += [(str(name), str(value)) for extra in extras for name, value in extra.items()]
    return "".join(f'<small class="role">{escape(role)}</small><pre>{escape(text)}</pre>' for role, text in pairs)


def _text(content: Any) -> str:
    """Return a message's content; for a multimodal message, the texts of its parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
