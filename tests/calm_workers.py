"""Workers of a tensor-parallel server sleep as soon as they have nothing to read.

vLLM lets them spin for a second after each message, on cores that other tests need. `tests.warm` imports this module
into the process from which servers of tests are forked.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SPIN_SECONDS = 0.005
SpinCondition.__init__.__defaults__ = (SPIN_SECONDS,)  # of `busy_loop_s`, the only parameter with a default
