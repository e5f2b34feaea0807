"""An environment's own state beside the trainer's checkpoints, so that a resumed run goes on where it stood."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FOLDER = "environments"
"""Within the trainer's folder of checkpoints."""


class StateFiles:
    """`FOLDER/NAME/step-N.json`, one for each step at which state was saved."""

    def __init__(self, folder: Path, name: str) -> None:
        """`folder` is made when something is saved; `name` is the environment's."""
        self._folder = folder / re.sub(r"[^\w.-]", "_", name)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes the state as of a step of the trainer; what can't be written is told and the run goes on."""
        path = self._folder / f"step-{step}.json"
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(state))
            partial.replace(path)
        except OSError as error:
            # The trainer's folder may be on another machine: a run without saved state is better than none.
            log.warning("state at step %d not saved to %s (%s); --env.state_dir names a folder", step, path, error)

    def newest(self, step: int) -> dict[str, Any] | None:
        """The newest state that is not from after a step."""
        saved = {int(path.stem.removeprefix("step-")): path for path in self._folder.glob("step-*.json")}
        known = [at for at in saved if at <= step]
        if not known:
            return None
        log.info("state of step %d read from %s", max(known), saved[max(known)])
        return json.loads(saved[max(known)].read_text())
