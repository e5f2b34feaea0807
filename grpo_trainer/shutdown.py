"""Saves a run that ends early.

At that moment the weights are those of the last counted step, those of one step more, or unknown. In the first two
cases they are saved, and `--resume auto` continues from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from grpo_trainer.errors import DriftError, GrpoError, HungError, PeerGoneError, StoppedError
from grpo_trainer.parallel.world import World
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)

AT_ONCE = (StoppedError, HungError, DriftError)
"""Errors after which a checkpoint is saved even if this process has trained no step."""


class Writes:
    """Enters a bridge's fence around each write of the weights, and records whether the write was complete."""

    def __init__(self, updating: Callable[[], AbstractContextManager[None]]) -> None:
        self._updating = updating
        self.refused = False  # a write was asked for and has not begun
        self.landed = False  # a write is complete, so the weights are those of the next step
        self.torn = False  # a write began and is not complete, so the weights are neither the old nor the new ones

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enter the bridge's fence for a write."""
        self.refused = True
        with self._updating():
            self.refused, self.torn = False, True
            yield
            self.torn, self.landed = False, True


def counts_as_trained(end: Exception, writes: Writes, trainer: Trainer, world: World) -> bool:
    """Return whether the batch of a step that failed is in what is saved: in the weights, or in prepared ones."""
    return writes.landed or (writes.refused and trainer.optimizer.prepared and world.is_common(end))


@dataclass(frozen=True)
class RunState:
    """The state of a run when an error ends it."""

    start: Progress  # at this process's start
    progress: Progress  # of the weights, as counted in steps
    writes: Writes | None  # of the current step; None: no step has begun
    saves: bool = True  # the run writes checkpoints


def save_on_exit(
    end: Exception, state: RunState, checkpoints: Checkpoints, settle: Callable[[Sequence[str]], None], world: World
) -> None:
    """Save a checkpoint if the weights are consistent, and add the run's step and the way to continue to the error.

    All processes that have raised the error call this together. It raises nothing, so that the user sees the error that
    ended the run. `settle` acknowledges the batches that are saved.
    """
    if (why := _unsaved_because(end, state, world)) is None:
        try:
            saved = checkpoints.save(state.progress)
        except Exception as error:
            world.failed_after(end, error)
            log.info("the run's end could not be saved", exc_info=error)
            why = f"nothing could be saved ({type(error).__name__}: {error})"
        else:
            if world.leads:
                _say(end, state.progress, f"saved {saved}, continue with --resume auto", saved=True)
            settle(state.progress.batches)
            return
    if why and (world.leads or not world.is_common(end)):  # what all have met is rank 0's to report
        before = checkpoints.safe_path
        goes_on = "start again" if before is None else f"continue from {before} with --resume auto"
        _say(end, state.progress, f"{why}; {goes_on}")


def _unsaved_because(end: Exception, state: RunState, world: World) -> str | None:
    """Return why no checkpoint is saved; empty: there is nothing new to save; None: a checkpoint is saved."""
    if isinstance(end, GrpoError) and end.spoils_weights:
        return "the weights are not saved, since they can't be relied on"
    if state.writes is not None and state.writes.torn:
        return "the weights are not saved, since writing them did not come to its end"
    if isinstance(end, PeerGoneError) or not world.is_common(end):
        return "nothing is saved, since that takes the other trainer processes"
    if state.progress.step == state.start.step and not isinstance(end, AT_ONCE):
        return ""  # for example a failed proof or a missing server: no step was trained since the start
    return None if state.saves else "nothing is saved (--checkpoint-interval never)"


def _say(end: Exception, progress: Progress, outcome: str, *, saved: bool = False) -> None:
    """Add the outcome to the error's message; an error that is not a `GrpoError` gets a note in its traceback."""
    stopped = f"stopped at step {progress.step}"
    match end:
        case StoppedError():
            end.add(summary=f" at step {progress.step}", fix=outcome)
        case DriftError():
            end.add(fix=f"{stopped}, before training on these samples; {outcome}")
        case GrpoError():
            end.add(fix=f"{stopped}; {outcome}")
        case _:
            end.add_note(f"{stopped}; {outcome}")
    if not (saved and isinstance(end, StoppedError)):  # `grpo run` shows this line, and reports as an event
        log.error("the run ends: %s", " ".join([str(end), *getattr(end, "__notes__", ())]))
