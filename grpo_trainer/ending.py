"""How a run that ends early keeps what it has learnt.

Whatever ends it, one of three things is true of the weights: they are those that the last counted step led to, a step
more than that, or nobody knows. In the first two cases they are saved, and `--resume auto` goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from grpo_trainer.distributed import PeerGoneError, World
from grpo_trainer.errors import DriftError, GrpoError, HungError, StoppedError
from grpo_trainer.feed import BatchFeed
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import Progress

log = logging.getLogger(__name__)

AT_ONCE = (StoppedError, HungError, DriftError)
"""Whoever asked for one of these ends expects a checkpoint, though no step may have been trained."""


class Writes:
    """Enters a bridge's fence around each write of the weights, and remembers how far it came.

    Attributes:
        landed: a write came to its end: the weights are not those of before any more.
        torn: one did not: they are neither.
    """

    def __init__(self, updating: Callable[[], AbstractContextManager[None]]) -> None:
        self._updating = updating
        self.landed = False
        self.torn = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The bridge's fence."""
        with self._updating():
            self.torn = True
            yield
            self.torn, self.landed = False, True


@dataclass(frozen=True)
class Standing:
    """Where a run stands when something ends it.

    Attributes:
        start: of this process.
        progress: of the weights, as far as steps are counted.
        writes: of the step under way; None: there was none yet.
    """

    start: Progress
    progress: Progress
    writes: Writes | None


def conclude(end: Exception, standing: Standing, checkpoints: Checkpoints, feed: BatchFeed, world: World) -> None:
    """Save what can be relied on, and add to the error where the run stands and how it goes on.

    Nothing is raised here: what ended the run is what its user must hear of.
    """
    if (why := _unsaved_because(end, standing, world)) is None:
        try:
            saved = checkpoints.save(standing.progress)
        except Exception as error:
            log.warning("the run's end could not be saved", exc_info=error)
            why = f"nothing could be saved ({type(error).__name__}: {error})"
        else:
            _say(end, standing.progress, f"saved {saved}, go on with --resume auto")
            feed.settle(standing.progress.batches, patient=False)
            return
    if why:
        before = checkpoints.safe_path
        goes_on = "start anew" if before is None else f"go on from {before} with --resume auto"
        _say(end, standing.progress, f"{why}; {goes_on}")


def _unsaved_because(end: Exception, standing: Standing, world: World) -> str | None:
    """Why nothing is saved: empty where there is nothing to save; None: it is."""
    if isinstance(end, GrpoError) and end.spoils_weights:
        return "the weights are not saved, since they can't be relied on"
    if standing.writes is not None and standing.writes.torn:
        return "the weights are not saved, since writing them did not come to its end"
    if isinstance(end, PeerGoneError) or world.is_working:
        return "nothing is saved, since that takes the other trainer processes"
    if standing.progress.step == standing.start.step and not isinstance(end, AT_ONCE):
        return ""  # no proof, no server: nothing was learnt since the start
    return None


def _say(end: Exception, progress: Progress, outcome: str) -> None:
    """Add it to the error. One that no user can mend keeps its message, and the traceback has the note."""
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
    if not isinstance(end, StoppedError):  # an event of the run, as a report shows it
        log.error("the run ends: %s", " ".join([str(end), *getattr(end, "__notes__", ())]))
