"""A real `grpo run --cluster` over two nodes of a Ray cluster on this machine: trainer here, vLLM on the other node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import alive, family, tail
from tests.runs import finished, of_mode, rows, started, wait_for_step

Cluster = pytest.importorskip("ray.cluster_utils").Cluster
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The head has one core, which the trainer takes, so that the server goes to the other node."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


def vllm_servers(cluster: Any) -> dict[int, dict[str, str]]:
    """The environments of the servers on the cluster's nodes, by their process ids."""
    found: dict[int, dict[str, str]] = {}
    for node in cluster.list_all_nodes():
        (raylet,) = node.all_processes["raylet"]
        for pid, line in family(raylet.process.pid).items():
            if "-m vllm_server" in line:
                found[pid] = psutil.Process(pid).environ()
    return found


def test_a_run_over_two_nodes_learns_and_ends(demo_model: Path, tmp_path: Path, cluster: Any) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = of_mode("lora_only", **{"max-staleness": 1, "cluster": cluster.address, "cluster-nodes": 2})
    with started(demo_model, run_dir, log, **options) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        servers = vllm_servers(cluster)
        assert servers and not servers.keys() & members.keys(), "the server is a process of the other node's agent"
        keys = {env["VLLM_API_KEY"] for env in servers.values()}
        assert finished(process, log, 400) == 0, tail(log)
    assert not alive([*members, *servers])
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3] and done[-1]["publish/version"] >= 2
    fresh = [row for row in done if row["rollout/staleness_max"] == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)
    (key,) = keys
    written = {path: path.read_text(errors="replace") for path in [log, *run_dir.glob("logs/*.log")]}
    assert not [path for path, text in written.items() if key in text], "a log shows the key"
    assert re.search(r"\$ .*-m vllm_server ", written[run_dir / "logs" / "server.log"])
    assert json.dumps(key) in (run_dir / "config" / "trainer.toml").read_text()
