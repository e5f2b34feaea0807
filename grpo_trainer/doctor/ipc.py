"""CUDA IPC between two processes, tried out: `python -m grpo_trainer.doctor.ipc` prints one JSON object.

One process fills a tensor and hands its memory to a second one, which reads it and writes back: what shared weights
and the transport `cuda_ipc` live on. Apart from the doctor's own process, so that this never opens a CUDA context.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from grpo_trainer.doctor.findings import Finding, fail, failure, ok, skip

SECONDS = 120
ELEMENTS = 1 << 20
WANTED = "a second process that reads the first one's memory"
FIX = "run both in one container with --ipc=host (not WSL), without MIG and without expandable segments"


def check_cuda_ipc(*, on_gpu: bool, needed: bool) -> Finding:
    """Try it.

    Args:
        needed: the run shares weights; otherwise its failure leaves slower transports.
    """
    if not on_gpu:
        return skip("CUDA IPC", "no GPU; on a CPU processes map one file")
    command = [sys.executable, "-m", "grpo_trainer.doctor.ipc"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return fail("CUDA IPC", f"no answer within {SECONDS} s", WANTED, FIX)
    finding = judge(done.returncode, done.stdout, done.stderr)
    if finding.status == "fail" and not needed:
        return Finding(finding.name, "warn", finding.got, finding.wanted, f"{FIX}; or --lora-transport memory")
    return finding


def judge(code: int, out: str, err: str) -> Finding:
    """What the two processes said."""
    if (why := failure(code, out, err)) is not None:
        return fail("CUDA IPC", why, WANTED, FIX)
    return ok("CUDA IPC", "a second process read and wrote this one's memory")


def give() -> bool:
    """Hand a tensor to a process of its own; True if that read it rightly and its writing is seen here."""
    import torch

    tensor = torch.arange(ELEMENTS, dtype=torch.int32, device="cuda:0")
    torch.cuda.synchronize()
    shared = tensor.untyped_storage()._share_cuda_()
    # Handles and events are bytes; JSON wants text.
    words = [each.hex() if isinstance(each, bytes) else each for each in shared]
    child = [sys.executable, "-m", "grpo_trainer.doctor.ipc", "take", json.dumps(words)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=SECONDS, check=False)
    sys.stderr.write(done.stderr)
    torch.cuda.synchronize()
    return done.returncode == 0 and bool((tensor == 7).all())


def take(words: list[Any]) -> bool:
    """Open the memory, look whether it is as the giver filled it, and write 7 everywhere."""
    import torch

    torch.cuda.init()
    torch.empty(1, device="cuda:0")  # without a context of its own the process crashes when it opens a handle
    device, handle, size, offset, counter, counter_offset, event, sync = words
    opened: Any = torch.UntypedStorage._new_shared_cuda(
        device, bytes.fromhex(handle), size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event), sync
    )
    tensor = torch.empty(0, dtype=torch.int32, device="cuda:0").set_(opened, 0, (ELEMENTS,), (1,))
    right = bool((tensor == torch.arange(ELEMENTS, dtype=torch.int32, device="cuda:0")).all())
    tensor.fill_(7)
    torch.cuda.synchronize()
    return right


def main(argv: list[str]) -> int:
    """Give, or take what a giver offers; prints whether it went well."""
    went_well = take(json.loads(argv[1])) if argv[:1] == ["take"] else give()
    print(json.dumps({"ok": went_well}))
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
