"""Broadcast bytes from the first GPU to all others by NCCL and print GB/s, to compare with `grpo bench sync`.

torchrun --standalone --nproc-per-node 2 scripts/bench_link.py --gb 15.2
"""

from __future__ import annotations

import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import typer


def main(gb: float = 15.2, repeat: int = 5) -> None:
    """Send `gb` GB (10^9 bytes) in pieces of 256 MiB, `repeat` times after one warm-up; the slowest rank counts."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    piece = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    pieces = max(1, round(gb * 1e9 / piece.numel()))
    seconds: list[float] = []
    for _ in range(repeat + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(pieces):
            dist.broadcast(piece, src=0)
        torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    if dist.get_rank() == 0:
        median = statistics.median(seconds[1:])
        sent = pieces * piece.numel() / 1e9
        print(json.dumps({"gb": round(sent, 2), "seconds": round(median, 4), "gb_per_s": round(sent / median, 1)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
