"""Durations of a run's start: those of the last start on this machine, and those of this one."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from grpo_trainer.cache import cache_folder
from grpo_trainer.config.run import RunConfig
from grpo_trainer.files import replace_file
from grpo_trainer.launch.watched import Watched
from grpo_trainer.phases import IN_WORDS, LOGGED, SERVER, STARTING, Wait

_VLLM_SAYS = {
    "weights": re.compile(r"Loading weights took ([\d.]+) seconds"),
    "compile": re.compile(r"torch\.compile t(?:ook|akes) ([\d.]+) s in total"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "engine": re.compile(r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s"),
}
"""Lines of vLLM's log; the time of `engine` includes `compile` and `graphs`."""


class StartReport(msgspec.Struct, frozen=True):
    """Durations of one start.

    Attributes:
        seconds: from the command to the first trained step.
        phases: seconds of each of the trainer's phases, which sum to `seconds`.
        servers: for each server, `ready`: the seconds from its own start to its first answer, and the phases of it that
            vLLM logs.
    """

    seconds: float
    phases: dict[str, float]
    servers: dict[str, dict[str, float]] = {}
    format: int = 1


class StartWatch:
    """Follows one start.

    Args:
        report: the file that the trainer writes at its first trained step.
        kept: file with the report of the last such start on this machine; None: there is no cache.

    Attributes:
        waits: what the processes do now, until the first step is trained.
        is_over: the first step is trained.
    """

    def __init__(self, report: Path, kept: Path | None) -> None:
        self._report = report
        self._kept = kept
        self._last = read_report(kept) if kept else None
        self._servers: dict[str, dict[str, float]] = {}
        self.waits: Sequence[Wait] = ()
        self.is_over = False
        report.unlink(missing_ok=True)  # left by an earlier start in the same folder

    def note_ready(self, name: str, seconds: float, log: Path) -> None:
        """Record that a server is ready, and the durations in its log."""
        try:
            said = log.read_text(errors="replace")
        except OSError:
            said = ""
        self._servers[name] = {"ready": round(seconds, 3), **server_phases(said)}

    def look(self, children: Sequence[Watched]) -> None:
        """Note what the processes do now; once the first step is trained, store the durations of this start."""
        if self.is_over:
            return
        if (found := read_report(self._report)) is None:
            self.waits = [*self._waits(children)]
            return
        self.waits = ()
        self.is_over = True
        whole = msgspec.json.encode(msgspec.structs.replace(found, servers=self._servers))
        for path in filter(None, (self._report, self._kept)):
            with suppress(OSError):  # the run does not depend on these files
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, msgspec.json.format(whole, indent=1))

    def _waits(self, children: Sequence[Watched]) -> Iterator[Wait]:
        """Yield what servers that are not ready, and the trainer, do now."""
        now = time.monotonic()
        known = self._last or StartReport(0.0, {})
        for child in children:
            if not child.ready:
                last_time = known.servers.get(child.name, {}).get("ready")
                yield Wait(child.name, STARTING, now - child.started, last_time, child.progress)
            elif child.spec.ends_run:
                phase, since = child.phase or (STARTING, child.started)
                if phase == SERVER and any(each.name.startswith("server") for each in children):
                    continue  # that server's own wait covers it
                what, last_time = IN_WORDS.get(phase, phase), known.phases.get(phase)
                yield Wait(child.name, what, now - since, last_time, logged=phase in LOGGED)


def server_phases(log: str) -> dict[str, float]:
    """Return the seconds of vLLM's phases, as far as the log has them.

    Args:
        log: the server's log; an earlier server may have written into the same file.
    """
    own = log[log.rfind("\n$ ") + 1 :]
    found = {name: pattern.search(own) for name, pattern in _VLLM_SAYS.items()}
    return {name: float(match[1]) for name, match in found.items() if match is not None}


def read_report(path: Path) -> StartReport | None:
    """Return the report in a file; None: there is no such file, or it is no report."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StartReport)
    except (OSError, msgspec.MsgspecError):
        return None


def kept_at(config: RunConfig, device: str, model_config: bytes | None) -> Path | None:
    """Return the cache file for starts of such a run; None: there is no cache.

    Args:
        device: name of the device that server and trainer run on.
        model_config: the model's config.json, which holds its shape; None: the model's name is used instead.
    """
    folder = cache_folder()
    if folder is None:
        return None
    bridge, server = config.trainer.bridge, config.server
    shape = hashlib.sha256(model_config).hexdigest() if model_config else config.trainer.model.name
    parts: list[Any] = [shape, device, config.trainer.shares_weights, server.replicas, server.enforce_eager]
    parts += [config.options.trainer_gpus, config.trainer.compute.compile, config.trainer.model.load_in_4bit]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return folder / "starts" / f"{bridge.mode}-{digest}.json"
