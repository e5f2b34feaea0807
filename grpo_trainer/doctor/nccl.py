"""NCCL between two GPUs, tried out, and how the GPUs are connected.

`python -m grpo_trainer.doctor.nccl` broadcasts a tensor from the first GPU to a second process on the next GPU, as the
transport `nccl` of `broadcast` and `lora_only` does, and prints a JSON object. The doctor
starts it as a process, so that the doctor itself never opens a CUDA context.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from grpo_trainer.doctor.findings import Finding, failure, ok, skip, warn

SECONDS = 120
ELEMENTS = 1 << 20
WANTED = "a broadcast from the first GPU to the second"
FIX = "set NCCL_DEBUG=INFO to see why; until then use --broadcast-transport gloo or --lora-transport memory"

LINKS: Mapping[str, str] = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through one NUMA node",
    "SYS": "PCIe through both CPUs",
}
"""What `nvidia-smi topo -m` calls a connection, and what it is, from the fastest to the slowest."""


def check_nccl(*, gpus: int) -> Finding:
    """Try a broadcast between the first two visible GPUs; also say how all GPUs of the machine are connected.

    A failure is a warning, because slower transports remain.
    """
    if gpus < 2:
        return skip("NCCL", "fewer than two GPUs")
    command = [sys.executable, "-m", "grpo_trainer.doctor.nccl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return warn("NCCL", f"no answer within {SECONDS} s; {_links()}", WANTED, FIX)
    return judge(done.returncode, done.stdout, done.stderr, _links())


def judge(code: int, out: str, err: str, links: str) -> Finding:
    """Return the finding for what the two processes said.

    Args:
        links: how the GPUs are connected, in words.
    """
    if (why := failure(code, out, err)) is not None:
        return warn("NCCL", f"{why}; {links}", WANTED, FIX)
    return ok("NCCL", f"a broadcast reached a second GPU; {links}")


def _links() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no nvidia-smi to ask about links"
    done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=SECONDS, check=False)
    return described(read_links(done.stdout))


def read_links(matrix: str) -> dict[tuple[int, int], str]:
    """Return the connection of each pair of GPUs, by nvidia-smi's numbers, from the output of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]  # the heading is underlined
    rows = {int(words[0][3:]): words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0])}
    rows = {gpu: cells for gpu, cells in rows.items() if "X" in cells}  # the heading has names only
    columns = sorted(rows)
    return {
        (gpu, other): cells[columns.index(other)]
        for gpu, cells in sorted(rows.items())
        for other in columns
        if other > gpu and len(cells) >= len(columns)
    }


def described(links: Mapping[tuple[int, int], str]) -> str:
    """Return the pairs of GPUs in words, by connection, the fastest first."""
    if not links:
        return "their links are unknown"
    parts = []
    for prefix, words in LINKS.items():
        of_it = [pair for pair, link in links.items() if link.startswith(prefix)]
        if len(of_it) == len(links):
            return f"{words} between all GPUs"
        if of_it:
            parts.append(f"{words} between {', '.join(f'{one} and {other}' for one, other in of_it)}")
    return "; ".join(parts) or "their links are unknown"


def broadcast(rank: int, identity: bytes) -> bool:
    """Take part as a rank, on the GPU of that number; return whether rank 0's numbers are there."""
    import torch

    from vllm_server.protocol.nccl import Communicator

    torch.cuda.set_device(rank)
    start = 1 if rank == 0 else 0
    numbers = torch.arange(start, start + ELEMENTS, dtype=torch.int32, device="cuda")
    communicator = Communicator(identity, rank, 2)
    stream = torch.cuda.current_stream()
    communicator.broadcast(numbers.data_ptr(), numbers.nbytes, root=0, stream=stream.cuda_stream)
    communicator.wait(stream.query)
    arrived = bool((numbers == torch.arange(1, 1 + ELEMENTS, dtype=torch.int32, device="cuda")).all())
    communicator.close()
    return arrived


def give() -> bool:
    """Broadcast to a second process; return whether the numbers arrived there."""
    import torch  # loads the NCCL library

    from vllm_server.protocol.nccl import unique_id

    torch.cuda.set_device(0)
    identity = unique_id()
    child = [sys.executable, "-m", "grpo_trainer.doctor.nccl", "take", identity.hex()]
    with subprocess.Popen(child, stdout=subprocess.DEVNULL) as process:
        try:
            return broadcast(0, identity) and process.wait(SECONDS) == 0
        finally:
            process.kill()


def main(argv: list[str]) -> int:
    """Broadcast, or receive what another process broadcasts; print whether it worked."""
    worked = broadcast(1, bytes.fromhex(argv[1])) if argv[:1] == ["take"] else give()
    print(json.dumps({"ok": worked}))
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
