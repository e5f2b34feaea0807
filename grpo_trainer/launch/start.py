"""What a start waits for, how long that took the last time on this machine, and what it took this time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from grpo_trainer.cache import cache_folder
from grpo_trainer.config.run import RunConfig
from grpo_trainer.files import replace_file

_VLLM_SAYS = {
    "weights": re.compile(r"Loading weights took ([\d.]+) seconds"),
    "compile": re.compile(r"torch\.compile t(?:ook|akes) ([\d.]+) s in total"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "engine": re.compile(r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s"),
}
"""Lines of vLLM's log; `engine` has `compile` and `graphs` in it."""


class StartReport(msgspec.Struct, frozen=True):
    """A start.

    Attributes:
        seconds: from the command to the first trained step.
        phases: seconds of each of the trainer's phases, which sum to `seconds`.
        servers: of each server, `ready`: the seconds from its own start until it answered; and what vLLM says of those.
    """

    seconds: float
    phases: dict[str, float]
    servers: dict[str, dict[str, float]] = {}


class StartWatch:
    """Follows one start.

    Args:
        report: the file that the trainer writes at its first trained step.
        kept: where the last start of such a run on this machine is kept; None: nowhere.
    """

    def __init__(self, report: Path, kept: Path | None) -> None:
        self._report = report
        self._kept = kept
        self._last = read_report(kept) if kept else None
        self._servers: dict[str, dict[str, float]] = {}
        self.is_over = False
        report.unlink(missing_ok=True)  # of an earlier start in the same folder

    def note_ready(self, name: str, seconds: float, log: Path) -> None:
        """A server answers; its log has what it has said until now."""
        try:
            said = log.read_text(errors="replace")
        except OSError:
            said = ""
        self._servers[name] = {"ready": round(seconds, 3), **server_phases(said)}

    def server_last_time(self, name: str) -> str:
        """Return how long a server took to be ready, in words; empty if that is not known."""
        return _last_time(self._last.servers.get(name, {}) if self._last else {}, "ready")

    def phase_last_time(self, name: str) -> str:
        """Return how long a phase of the trainer took, in words; empty if that is not known."""
        return _last_time(self._last.phases if self._last else {}, name)

    def look(self) -> None:
        """See whether the first step is trained; if so, keep what the start took."""
        if self.is_over or (found := read_report(self._report)) is None:
            return
        self.is_over = True
        whole = msgspec.json.encode(msgspec.structs.replace(found, servers=self._servers))
        for path in filter(None, (self._report, self._kept)):
            with suppress(OSError):  # the run needs neither
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, msgspec.json.format(whole, indent=1))


def server_phases(log: str) -> dict[str, float]:
    """Return the seconds that vLLM says its phases have taken, as far as it does.

    Args:
        log: of the server; an earlier server may have written into the same file.
    """
    own = log[log.rfind("\n$ ") + 1 :]
    found = {name: pattern.search(own) for name, pattern in _VLLM_SAYS.items()}
    return {name: float(match[1]) for name, match in found.items() if match is not None}


def read_report(path: Path) -> StartReport | None:
    """Return what a start took; None: there is no such file, or it is no report."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StartReport)
    except (OSError, msgspec.MsgspecError):
        return None


def kept_at(config: RunConfig, device: str, model_config: bytes | None) -> Path | None:
    """Return where starts of such a run are kept; None: nowhere.

    Args:
        device: what server and trainer run on, by its name.
        model_config: the model's config.json, which has its shape; None: it is known by its name alone.
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


def _last_time(known: Mapping[str, float], name: str) -> str:
    return f" ({known[name]:.0f} s last time)" if name in known else ""
