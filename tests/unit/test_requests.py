"""What `grpo servers` asks of a running `grpo run`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from grpo_trainer.launch.requests import FOLDER, Answer, Request, answer_all


def test_a_request_that_is_withdrawn_or_unreadable_does_not_end_a_run(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    drops = {name: msgspec.json.encode(Request("drop", f"http://{name}:1")) for name in ("b", "c")}
    for name, content in {"a": b"{", **drops}.items():
        (folder / f"{name}.json").write_bytes(content)
    obeyed: list[str | None] = []

    def obey(request: Request) -> Answer:
        obeyed.append(request.server)
        (folder / "c.json").unlink()  # who asked has stopped waiting meanwhile
        return Answer(True, "done")

    answer_all(tmp_path, obey)
    assert obeyed == ["http://b:1"]
    answers = {path.stem: msgspec.json.decode(path.read_bytes(), type=Answer).done for path in folder.iterdir()}
    assert answers == {"a": False, "b": True}
