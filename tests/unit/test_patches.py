"""What this server replaces in vLLM: only in the table, only when asked, each once, and all of it in the docs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import ROOT
from vllm_server import patches, seams
from vllm_server.errors import IncompatibleError

SCRIPT = """
import importlib, pkgutil, vllm_server
from vllm_server import patches

def place(name):
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)

on_cpu = [each for each in patches.PATCHES if each.device != "cuda" and ":" in each.by]
places = {name: place(name) for each in on_cpu for name in each.replaces.split()}
"""


def run(code: str) -> str:
    environment = {**os.environ, "GRPO_ROUTED_EXPERTS": "1"}
    command = [sys.executable, "-c", SCRIPT + code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_patches_come_with_no_import_and_each_once() -> None:
    """In one process what three kinds of processes do; a place that has moved is an error."""
    pytest.importorskip("vllm")
    said = run("""
for module in pkgutil.walk_packages(vllm_server.__path__, "vllm_server."):
    if "preload" not in module.name and "__main__" not in module.name and "lora_kernels" not in module.name:
        importlib.import_module(module.name)
imported = [name for name in places if place(name) is not places[name]]
for process in ("server", "engine", "worker"):
    patches.patch_vllm(process)
unwritable = [name for name in places if place(name) is places[name]]
patches.SharingWorker
once = {name: place(name) for name in places}
patches.patch_vllm("worker", writable=True)
print([imported, unwritable, [name for name in places if place(name) is places[name]],
       [name for name in places if place(name) is not once[name]]])
""")
    imported, unwritable, untouched, again = eval(said)  # printed by the script above
    plain = [name for each in patches.PATCHES if each.writable and ":" in each.by for name in each.replaces.split()]
    assert (imported, unwritable, untouched, again) == ([], plain, [], [])


def test_patches_are_in_the_docs_and_have_tests() -> None:
    rows = [
        line.split("|") for line in (ROOT / "docs/server.md").read_text().splitlines() if line.startswith("| `vllm.")
    ]
    names = [row[1].split("`")[1] for row in rows]
    assert names == [patch.replaces.split()[0] for patch in patches.PATCHES]
    for patch in patches.PATCHES:
        assert (ROOT / "tests" / patch.test).exists() and patch.why and patch.until


def test_probe_names_all_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    seams.probe(writable=True)
    monkeypatch.setitem(seams.SEAMS, "vllm.sampling_params", {"SamplingParams.gone": (), "Gone": ("x",)})
    monkeypatch.setitem(seams.SEAMS, "vllm.gone", {"anything": ()})
    monkeypatch.setitem(seams.SEAMS, "vllm.v1.engine.async_llm", {"AsyncLLM.sleep": ("level", "depth")})
    with pytest.raises(IncompatibleError) as error:
        seams.probe()
    for symbol in (
        "sampling_params.SamplingParams.gone",
        "sampling_params.Gone",
        "vllm.gone.anything",
        "AsyncLLM.sleep(depth)",
    ):
        assert symbol in str(error.value)


@pytest.mark.parametrize("change", ["no salt", "frozen", "nothing"])
def test_probe_sees_whether_salts_are_part_of_cache_keys(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    def keys(*_: object) -> tuple[Any, int]:
        return (None if change == "no salt" else ("salt",)), 0

    request = SimpleNamespace(
        __struct_fields__=("cache_salt",), __struct_config__=SimpleNamespace(frozen=change == "frozen")
    )
    found = {"EngineCoreRequest": request, "generate_block_hash_extra_keys": keys}
    monkeypatch.setattr(seams, "require", lambda module, name: found[name])
    assert seams._salts_cache_keys() is (change == "nothing")
