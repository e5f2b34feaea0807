"""How GPUs are connected, as the doctor reads it."""

from __future__ import annotations

from grpo_trainer.doctor.gpu_links import described, read_links

FOUR = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def test_the_links_of_each_pair() -> None:
    links = read_links(FOUR)
    assert links == {(0, 1): "NV12", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "NV12"}
    words = described(links)
    assert words.index("NVLink between 0 and 1, 2 and 3") < words.index("both CPUs between 0 and 2, 0 and 3")


def test_links_of_one_kind_are_not_listed() -> None:
    assert described({(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}) == "NVLink between all GPUs"
    assert described(read_links("nvidia-smi: unknown option")) == described({})
