"""Workers of a tensor-parallel server start forked, and sleep as soon as they have nothing to read.

On a CPU vLLM spawns these workers, so each worker repeats the imports of its engine. After each message a worker spins
for a second, on cores that other tests need. `tests.warm` imports this module into the process from which servers of
tests are forked.
"""

from __future__ import annotations

import multiprocessing

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor import multiproc_executor

SPIN_SECONDS = 0.005
SpinCondition.__init__.__defaults__ = (SPIN_SECONDS,)  # of `busy_loop_s`, the only parameter with a default
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # pyright: ignore[reportPrivateImportUsage]
