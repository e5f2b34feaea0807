"""`python -m vllm_server.tune_lora MODEL [MODEL …] [--rank 16] [--out DIR]`: the fastest block sizes for this GPU.

vLLM's LoRA kernels (shrink: x A, expand: … B) take their block sizes from a table by GPU, number of merged slices,
tokens, and matrix sizes; without one they use defaults. Each candidate is timed in a CUDA graph, as it runs when
served, on random data of the layers' shapes: once with all tokens of one version, once with those of four versions
mixed, as they are while adapters are published often; the sum decides.
Compiling takes longest and is spread over processes.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_server.lora_kernels import FOLDER, file_name
from vllm_server.preflight import read_config

TOKENS = (16, 64, 128, 256, 512)
MAX_LORAS = 8
REPEATS = 40
MIX = (0.4, 0.3, 0.2, 0.1)  # shares of a batch's tokens by version while publishes come
SLICES_ALIKE = (
    4,
    5,
    6,
)  # layers merged of more parts: none is timed, and vLLM fails on a number that is not in the table


@dataclass(frozen=True)
class Layer:
    """A linear layer: inputs, and outputs of each merged slice."""

    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """One kernel configuration, by vLLM's names."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    num_ctas: int = 1
    group_size_m: int = 8
    max_nreg: int | None = None


def layers_of(config: dict[str, Any]) -> list[Layer]:
    """The linear layers of a decoder, as vLLM merges them, from its config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head
    inner = config["intermediate_size"]
    return [
        Layer(hidden, (heads * head, kv, kv)),
        Layer(heads * head, (hidden,)),
        Layer(hidden, (inner, inner)),
        Layer(inner, (hidden,)),
    ]


def candidates(kernel: str) -> Iterator[Blocks]:
    """What is tried: vLLM's own search space, without what never won."""
    if kernel == "shrink":
        for m, k, split, stages in itertools.product((16, 32, 64), (64, 128, 256), (4, 8, 16, 32), (2, 4)):
            if m * k < 64 * 256:  # more does not fit into shared memory with four stages
                yield Blocks(m, 16, k, num_warps=4, num_stages=stages, split_k=split)
        return
    for m, n, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256, 512), (4, 8), (1, 2, 3)):
        if m * n <= 64 * 256 and (n < 512 or warps == 8):  # more does not fit into the registers
            yield Blocks(m, n, 16, num_warps=warps, num_stages=stages)


def versions_of(tokens: int, shares: Sequence[float]) -> list[int]:
    """The version of each token in a batch that several share, as unevenly as `shares` says; they sum to 1."""
    ends = [round(tokens * total) for total in itertools.accumulate(shares)]
    return [version for version, (start, end) in enumerate(itertools.pairwise([0, *ends])) for _ in range(start, end)]


class Kernels:
    """vLLM's two kernels on one layer's random data."""

    def __init__(self, layer: Layer, tokens: int, rank: int) -> None:
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        self._modules: dict[str, Any] = {"shrink": lora_shrink_op, "expand": lora_expand_op}
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self._x = torch.randn(tokens, layer.inputs, **bf16)
        self._a = [torch.randn(MAX_LORAS, 1, rank, layer.inputs, **bf16) for _ in layer.outputs]
        self._b = [torch.randn(MAX_LORAS, 1, outputs, rank, **bf16) for outputs in layer.outputs]
        self._middle = torch.zeros(len(layer.outputs), tokens, rank, device="cuda")
        self._y = torch.zeros(tokens, sum(layer.outputs), **bf16)
        self._metas = []
        for shares in ((1.0,), MIX):
            meta = LoRAKernelMeta.make(MAX_LORAS, max(TOKENS), "cuda")
            meta.prepare_tensors(torch.tensor(versions_of(tokens, shares), dtype=torch.int32, device="cuda"))
            self._metas.append(meta.meta_args(tokens, False))

    def run(self, kernel: str, blocks: Blocks) -> None:
        """One call with these block sizes for each mix of versions."""
        for meta in self._metas:
            self._run(kernel, blocks, meta)

    def _run(self, kernel: str, blocks: Blocks, meta: Any) -> None:
        module = self._modules[kernel]
        module.get_lora_op_configs = lambda *_, **__: asdict(blocks)
        if kernel == "shrink":
            module._lora_shrink(self._x, self._a, self._middle, *meta, 1.0)
        else:
            module._lora_expand(self._middle, self._b, self._y, *meta, 0, True)

    def microseconds(self, kernel: str, blocks: Blocks) -> float:
        """Of one call of each mix within a CUDA graph; infinite where the kernel does not fit on the GPU."""
        from triton.runtime.errors import OutOfResources

        try:
            self.run(kernel, blocks)
        except OutOfResources:
            return math.inf
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                self.run(kernel, blocks)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / (2 * REPEATS) * 1e3


def compile_share(layers: list[Layer], rank: int, share: int, shares: int) -> None:
    """Compile every n-th candidate, into Triton's cache on disk."""
    from triton.runtime.errors import OutOfResources

    kernels = ("shrink", "expand")
    jobs = [(kernel, layer, blocks) for kernel in kernels for layer in layers for blocks in candidates(kernel)]
    for kernel, layer, blocks in jobs[share::shares]:
        try:
            Kernels(layer, 64, rank).run(kernel, blocks)
        except OutOfResources:
            continue  # the timing meets it again, and leaves it out


def tune(layers: list[Layer], rank: int) -> dict[str, dict[str, Any]]:
    """vLLM's two tables: `[max_loras][slices][tokens][k][n]`, k and n being a kernel's inner and outer size."""
    tables: dict[str, dict[str, Any]] = {"shrink": {}, "expand": {}}
    for tokens, layer, kernel in itertools.product(TOKENS, layers, tables):
        kernels = Kernels(layer, tokens, rank)
        timed = {blocks: kernels.microseconds(kernel, blocks) for blocks in candidates(kernel)}
        best = min(timed, key=timed.__getitem__)
        k, n = (layer.inputs, rank) if kernel == "shrink" else (rank, max(layer.outputs))
        place = tables[kernel].setdefault(str(MAX_LORAS + 1), {}).setdefault(str(len(layer.outputs)), {})
        place.setdefault(str(tokens), {}).setdefault(str(k), {})[str(n)] = asdict(best)
        print(f"{kernel} {layer.inputs} -> {layer.outputs}, {tokens} tokens: {timed[best]:.1f} us, {best}", flush=True)
    return tables


def with_more_slices(table: dict[str, Any]) -> dict[str, Any]:
    """Layers of more merged parts take what the largest number of parts has."""
    for slices in table.values():
        largest = max(slices, key=int)
        for more in SLICES_ALIKE:
            slices.setdefault(str(more), slices[largest])
    return table


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Nested tables, the new one's entries winning."""
    both = old | new
    return {key: merged(old[key], new[key]) if _tables(old.get(key), new.get(key)) else both[key] for key in both}


def _tables(*values: Any) -> bool:
    return all(isinstance(value, dict) and "block_m" not in value for value in values)


def main(argv: list[str]) -> int:
    """Tune, write the tables, say where."""
    parser = argparse.ArgumentParser("python -m vllm_server.tune_lora", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folders; only their config.json is read")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: 16)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the tables (default: the package's own)")
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: 8)")
    parser.add_argument("--compile-share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("got no GPU, wanted the one to tune for; run it there")
    layers = list(dict.fromkeys(layer for model in args.models for layer in layers_of(read_config(model))))
    if args.compile_share is not None:
        compile_share(layers, args.rank, args.compile_share, args.processes)
        return 0
    command = [sys.executable, "-m", "vllm_server.tune_lora", *argv, "--compile-share"]
    for process in [subprocess.Popen([*command, str(share)]) for share in range(args.processes)]:
        process.wait()
    args.out.mkdir(parents=True, exist_ok=True)
    for kernel, table in tune(layers, args.rank).items():
        name = file_name(torch.cuda.get_device_name(), "SHRINK" if kernel == "shrink" else "EXPAND_TRUE")
        path = args.out / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(with_more_slices(merged(old, table)), indent=1, sort_keys=True) + "\n")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
