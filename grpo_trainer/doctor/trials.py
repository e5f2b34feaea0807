"""What can only be tried out, between two processes: `python -m grpo_trainer.doctor.trials ipc` (or `nccl`).

The first process starts the second one, and prints a JSON object. Neither is the doctor's own, so that the doctor never
opens a CUDA context.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

from grpo_common.processes import end_with_parent
from grpo_trainer.launch.process import HELD_SECONDS
from grpo_trainer.signals import running_time

SECONDS = 120
LOOK_SECONDS = 1.0
ELEMENTS = 1 << 20
MODULE = "grpo_trainer.doctor.trials"


def tried(what: str) -> str | None:
    """Make a trial; return why it failed, None: it did not."""
    ended = ran([sys.executable, "-m", MODULE, what])
    return f"no answer within {SECONDS} s" if ended is None else failure(*ended)


def ran(command: list[str]) -> tuple[int, str, str] | None:
    """Return a process's exit code and what it wrote; None: it took more than `SECONDS` of `running_time`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = running_time() + SECONDS
        while running_time() < until:
            with suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=LOOK_SECONDS)
                return process.returncode, *said
    finally:
        process.kill()
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(HELD_SECONDS)
    return None


def failure(code: int, out: str, err: str) -> str | None:
    """Return why a process's trial failed; None: its last line of JSON says `"ok": true`."""
    said = [line for line in out.splitlines() if line.startswith("{")]
    if code == 0 and said and json.loads(said[-1])["ok"]:
        return None
    return (err.strip().splitlines() or [f"exit code {code}"])[-1][:200]


def give_memory() -> bool:
    """Hand a tensor to a second process; True if that read it rightly and its writing is seen here."""
    import torch

    tensor = torch.arange(ELEMENTS, dtype=torch.int32, device="cuda:0")
    torch.cuda.synchronize()
    shared = tensor.untyped_storage()._share_cuda_()
    # Handles and events are bytes; JSON wants text.
    words = [each.hex() if isinstance(each, bytes) else each for each in shared]
    child = [sys.executable, "-m", MODULE, "ipc", json.dumps(words)]
    ended = ran(child)  # the memory must not be freed before
    if ended is None:
        return False
    sys.stderr.write(ended[2])
    torch.cuda.synchronize()
    return ended[0] == 0 and bool((tensor == 7).all())


def take_memory(words: list[Any]) -> bool:
    """Open the memory, look whether it is as the giver filled it, and write 7 everywhere."""
    import torch

    torch.cuda.init()
    torch.empty(1, device="cuda:0")  # a process that opens a handle without its own CUDA context crashes
    device, handle, size, offset, counter, counter_offset, event, sync = words
    opened: Any = torch.UntypedStorage._new_shared_cuda(
        device, bytes.fromhex(handle), size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event), sync
    )
    tensor = torch.empty(0, dtype=torch.int32, device="cuda:0").set_(opened, 0, (ELEMENTS,), (1,))
    right = bool((tensor == torch.arange(ELEMENTS, dtype=torch.int32, device="cuda:0")).all())
    tensor.fill_(7)
    torch.cuda.synchronize()
    return right


def give_broadcast() -> bool:
    """Broadcast to a second process; return whether the numbers arrived there."""
    import torch  # loads the NCCL library

    from vllm_server.protocol.group import unique_id

    torch.cuda.set_device(0)
    identity = unique_id()
    child = [sys.executable, "-m", MODULE, "nccl", identity.hex()]
    with subprocess.Popen(child, stdout=subprocess.DEVNULL) as process:
        try:
            # The second process ends by itself right after the broadcast, or `tried` ends this one.
            return broadcast(0, identity) and process.wait() == 0
        finally:
            process.kill()


def broadcast(rank: int, identity: bytes) -> bool:
    """Take part as a rank, on the GPU of that number; return whether rank 0's numbers are there."""
    import torch

    from vllm_server.protocol.group import Communicator

    torch.cuda.set_device(rank)
    start = 1 if rank == 0 else 0
    numbers = torch.arange(start, start + ELEMENTS, dtype=torch.int32, device="cuda")
    communicator = Communicator(identity, rank, 2)
    stream = torch.cuda.current_stream()
    communicator.broadcast(numbers.data_ptr(), numbers.nbytes, root=0, stream=stream.cuda_stream)
    communicator.wait(stream.query)
    arrived = bool((numbers == torch.arange(1, 1 + ELEMENTS, dtype=torch.int32, device="cuda")).all())
    communicator.abort()
    return arrived


def main(what: str, given: str = "") -> int:
    """Be the first process, or with what the first one has given the second; print whether it worked."""
    end_with_parent()  # `tried` kills the first process, which can't end the second one then
    if what == "ipc":
        worked = take_memory(json.loads(given)) if given else give_memory()
    else:
        worked = broadcast(1, bytes.fromhex(given)) if given else give_broadcast()
    print(json.dumps({"ok": worked}))
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
