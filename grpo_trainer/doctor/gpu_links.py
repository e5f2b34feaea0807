"""How the machine's GPUs are connected, as `nvidia-smi topo -m` says it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from grpo_trainer.machine import nvidia_smi

LINKS: Mapping[str, str] = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through one NUMA node",
    "SYS": "PCIe through both CPUs",
}
"""What `nvidia-smi topo -m` calls a connection, and what it is, from the fastest to the slowest."""


def links_in_words() -> str:
    """Return which GPUs have which connection between them."""
    done = nvidia_smi("topo", "-m")
    return described(read_links(done.stdout)) if done else "no nvidia-smi to ask about links"


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
