"""Sockets of a server whose temporary folder has a long path."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_server import sockets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("length", [20, 70])
def test_the_temporary_folder_is_taken_while_paths_fit(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
    monkeypatch.delenv(sockets.FOLDER_VARIABLE, raising=False)
    sockets.prepare()
    assert sockets.folder() == tempfile.gettempdir() and sockets.FOLDER_VARIABLE not in os.environ


def test_umlauts_count_as_the_kernel_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "ü" * 40)
    assert sockets.folder() == "/tmp"


def test_sockets_of_a_long_folder_lie_elsewhere_and_files_in_it(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = """
import multiprocessing.connection, os, tempfile
from vllm_server import sockets
sockets.prepare()
address = multiprocessing.connection.arbitrary_address("AF_UNIX")
multiprocessing.connection.Listener(address).close()
print(os.environ[sockets.FOLDER_VARIABLE], tempfile.gettempdir(), os.path.dirname(address))
"""
    environment = {name: value for name, value in os.environ.items() if name != sockets.FOLDER_VARIABLE}
    environment["TMPDIR"] = str(long)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    variable, files, sockets_folder = done.stdout.split()
    assert (variable, files) == ("/tmp", str(long))
    assert Path(sockets_folder).parent == Path("/tmp")
    assert not Path(sockets_folder).exists(), "it stays behind"
