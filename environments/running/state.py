"""An environment's saved state in the trainer's checkpoint folder, so that a resumed run continues from it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

FOLDER: Final = "environments"
"""Subfolder of the trainer's checkpoint folder."""
CHECKPOINT: Final = re.compile(r"(?:^|_)step_(\d+)$")
"""Name of a checkpoint's folder; a complete one has a state.json."""
KEPT_BLINDLY: Final = 100
"""States that are kept where the trainer's checkpoints are on another machine."""


class StateFiles:
    """`FOLDER/NAME/step-N.json`, one for each step at which state was saved.

    Args:
        folder: is created with the first save.
        name: the environment's.
        checkpoints: the trainer's checkpoint folder, which says which states are needed; None: not visible here.
    """

    def __init__(self, folder: Path, name: str, checkpoints: Path | None = None) -> None:
        self._folder = folder / re.sub(r"^\.|[^\w.-]", "_", name)
        self._checkpoints = checkpoints

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state at a step of the trainer. If that fails, log a warning and continue."""
        path = self._folder / f"step-{step}.json"
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(state))
            partial.replace(path)
            self._prune()
        except OSError as error:
            # The trainer's folder may be on another machine. A run without saved state is better than a failed run.
            log.warning("state at step %d not saved to %s (%s); --env.state_dir names a folder", step, path, error)

    def newest(
        self, step: int, restore: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> dict[str, Any] | None:
        """Return the newest state that is not later than a step, and that `restore` takes; None if there is none."""
        saved = self._saved()
        for at in sorted((at for at in saved if at <= step), reverse=True):
            try:
                state = json.loads(saved[at].read_bytes())
                if not isinstance(state, dict):
                    raise ValueError("no JSON object")
                restore(state)
            except Exception as error:  # an environment's code may fail in any way on a damaged state
                log.warning("the state in %s can't be read, an older one is looked for: %r", saved[at], error)
                continue
            log.info("state of step %d read from %s", at, saved[at])
            return state
        return None

    def _saved(self) -> dict[int, Path]:
        names = ((re.fullmatch(r"step-([0-9]{1,15})", path.stem), path) for path in self._folder.glob("step-*.json"))
        return {int(name[1]): path for name, path in names if name}

    def _prune(self) -> None:
        """Delete the states that no checkpoint needs: each needs the newest that is not later than itself. Where
        checkpoints are not visible, the newest states are kept."""
        saved = self._saved()
        if self._checkpoints is None:
            dropped = sorted(saved)[:-KEPT_BLINDLY]
        else:
            names = (path.parent.name for path in self._checkpoints.glob("*/state.json"))
            checkpoints = [int(match[1]) for name in names if (match := CHECKPOINT.search(name))]
            needed = {max((at for at in saved if at <= step), default=None) for step in checkpoints}
            # A checkpoint to come may need any state that is later than the last one.
            dropped = [at for at in saved.keys() - needed if at < max(checkpoints, default=0)]
        for at in dropped:
            saved[at].unlink(missing_ok=True)
