"""A server that gets its arguments later: its protocol, with nothing imported and nothing served."""

from __future__ import annotations

import io
import sys

import pytest

from vllm_server import forking, standby
from vllm_server.errors import IncompatibleError


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What it did, in order; `serve` answers 7."""
    did: list[object] = []

    def serve(argv: list[str]) -> int:
        did.append(argv)
        return 7

    monkeypatch.setattr(standby, "check_vllm", lambda: did.append("installed"))
    monkeypatch.setattr(forking, "start", lambda: did.append("forkserver"))
    monkeypatch.setattr(standby, "import_all", lambda: did.append("imports"))
    monkeypatch.setattr(standby, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["standby.py"])
    return did


def tell(monkeypatch: pytest.MonkeyPatch, text: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return standby.main()


def test_it_imports_first_and_then_serves_what_it_is_told(done: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    given = '["--model", "a b", "--port", "1"]\n'
    assert tell(monkeypatch, given + "more") == 7
    argv = ["--model", "a b", "--port", "1"]
    assert done == ["installed", "forkserver", "imports", argv]
    assert sys.argv == ["standby.py", *argv]


def test_it_ends_quietly_when_nobody_is_left_to_tell_it(
    done: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tell(monkeypatch, "") == 0
    assert done == ["installed", "forkserver", "imports"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("line", ["--model m\n", '{"model": "m"}\n', '["--port", 1]\n', "\n"])
def test_a_line_that_is_no_list_of_arguments_is_refused(
    done: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert tell(monkeypatch, line) == 2
    assert done[-1] == "imports"
    said = capsys.readouterr().err
    assert said.startswith("vllm_server: standard input: ") and repr(line.strip()) in said and "JSON" in said


def test_what_keeps_any_server_from_starting_is_one_line(
    done: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise IncompatibleError("no vLLM")

    monkeypatch.setattr(standby, "check_vllm", missing)
    assert tell(monkeypatch, "[]\n") == 1
    assert done == [] and capsys.readouterr().err == "vllm_server: no vLLM\n"
