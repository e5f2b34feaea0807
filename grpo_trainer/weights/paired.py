"""Shared weights on several GPUs: each trainer process and its server are a pair on one copy of the weights.

Every rank has a `SharedBridge` to its own server. `PairedBridge` keeps them in step: rank 0 decides, all servers get
the same version, and no server resumes before every rank has written.

    rank 0   begin ─┐            ┌─▶ write ─┐              ┌─▶ end ─┐
                    ├─ all pause ┤          ├─ all written ┤        ├─ all confirm
    rank 1   begin ─┘            └─▶ write ─┘              └─▶ end ─┘

If a rank ends within the fences, the others report to their servers that their weights are torn, and the server of the
rank that ended detects it by its timeout. `--resume auto` writes a checkpoint's weights to all servers, which heals
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

from grpo_common.errors import Problem
from grpo_trainer.errors import BridgeError, CommonBridgeError, ServerError
from grpo_trainer.metrics.types import Sum
from grpo_trainer.optim.steps import sampled
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import SharedWeights
from grpo_trainer.weights.bridge import Published
from grpo_trainer.weights.common import CommonBridge
from grpo_trainer.weights.shared_weights import SharedBridge

T = TypeVar("T")


class PairedBridge(CommonBridge):
    """The `shared_vllm` bridge of a process that has a server with whole weights.

    Args:
        urls: address of each rank's server.
    """

    def __init__(self, own: SharedBridge, policy: SharedWeights, world: World, urls: Sequence[str]) -> None:
        super().__init__(own, policy, world)
        self._urls = urls
        self._slowest: dict[str, float] = {}

    def _connect(self, policy_version: int) -> int:
        self._check_pairs()
        restores = self._policy.loaded is not None
        wanted = self._each(lambda: self._own.look(policy_version))
        if not restores and len(set(wanted)) > 1:
            served = [f"{version} at {url}" for url, version in zip(self._urls, wanted, strict=True)]
            raise CommonBridgeError(
                "the servers hold weights of different versions",
                field="version",
                got=", ".join(served),
                wanted="one version",
                fix="write a checkpoint's weights into them with --resume auto, or restart the servers",
            )
        self._each(lambda: self._own.begin(max(wanted)))
        self._check_agreement("in its server's memory")
        return max(wanted)

    def _check_pairs(self) -> None:
        """Check that no two ranks are in the memory of one server, for example if their lists of servers differ."""
        boots = self._world.gather(self._policy.source.boot_id)
        if len(set(boots)) < len(boots):
            raise CommonBridgeError(
                "several trainer processes are in the memory of one server",
                field="boot_id",
                got=", ".join(boots),
                wanted="another server for each process",
                fix="give all processes the same --server.port and --server.also",
            )

    def _prove(self) -> float | None:
        gaps = self._each(self._own.prove)
        self._check_agreement("after the proof")
        return None if None in gaps else max(gap for gap in gaps if gap is not None)

    def _check_agreement(self, when: str) -> None:
        self._world.check_agreement(sampled(list(self._policy.model.parameters())), when)

    # ------------------------------------------------------------------------------------------- steps

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with ExitStack() as held:
            self._each(lambda: held.enter_context(self._own.updating()))
            yield
            self._own.finish_kernels()
            self._world.gather(None)  # no server resumes before all ranks have written
            rows = self._each(lambda: self._release(held))
        self._slowest = {name: max(row[name] for row in rows) for name in rows[0]}

    def _release(self, held: ExitStack) -> dict[str, float]:
        """Release the own server's fence, and return the figures of the update."""
        held.close()
        return {name: float(metric.value()) for name, metric in self._own.last_metrics.items()}

    def publish(self, version: int) -> Published:
        """Return the version that the fences have published; each metric is the largest of any server."""
        published = self._own.publish(version)
        slowest = {name: Sum(value) for name, value in self._slowest.items()}
        self._slowest = {}
        return replace(published, metrics={**published.metrics, **slowest})

    def _each(self, do: Callable[[], T]) -> list[T]:
        """Call `do` on all ranks, and return the results by rank.

        Raises:
            CommonBridgeError: it failed on a rank; on all ranks, naming the rank's server.
        """
        value, problems = None, ()
        try:
            value = do()
        except (BridgeError, ServerError) as error:
            problems = error.problems
        said: list[tuple[T, tuple[Problem, ...]]] = self._world.gather((value, problems))  # type: ignore[arg-type]
        found = [
            replace(problem, field=": ".join(filter(None, [f"server {url}", problem.field])))
            for url, (_, own) in zip(self._urls, said, strict=True)
            for problem in own
        ]
        if found:
            raise CommonBridgeError.of(found)
        return [own for own, _ in said]
