"""The status page in a real headless browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_common.pages.document import document
from tests.integration.browsing import NEEDS_BROWSER, PHONE_WIDTH, Browser, browser, wait_for
from tests.rollout_api import running_server

__all__ = ["browser"]  # a fixture

EVIL = "<img src=x onerror=\"document.title='pwned'\"></pre><script>document.title='pwned'</script>&amp;"

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        register(api, batch_size=12)
        for score in (0.0, 0.5, 1.0):
            assert api.post("/scored_data", json=a_group(score)).status_code == 200
        yield server.url


def register(api: httpx.Client, batch_size: int) -> None:
    """A trainer and an environment."""
    trainer = {
        **{"wandb_group": "g", "wandb_project": EVIL, "batch_size": batch_size, "max_token_len": 64, "num_steps": 9},
        **{"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 2},
    }
    assert api.post("/register", json=trainer).status_code == 200
    api.get("/batch")
    env = {"max_token_length": 64, "desired_name": EVIL, "weight": 1.0, "group_size": 8}
    assert api.post("/register-env", json=env).status_code == 200


def a_group(score: float) -> dict[str, Any]:
    return {
        **{"tokens": [[1, 2]] * 8, "masks": [[1, 2]] * 8, "scores": [score] * 8},
        "messages": [[{"role": "assistant", "content": EVIL + "x" * 500}]] * 8,
        **{"env_id": 0, "policy_versions": [1] * 8},
    }


@pytest.fixture(autouse=True)
def no_error_on_the_console(browser: Browser) -> Iterator[None]:
    yield
    assert browser.errors == []


def test_the_page_tells_what_happens(browser: Browser, url: str):
    ask = browser(url, width=1200)
    text = ask("document.body.innerText")
    for said in ("of 9", "24 of 12 sequences", "Group 2", "score 1.000", "policy version 1", "alive"):
        assert said in text, (said, text)
    assert re.search(r"batch_size\b.*\b12\b.*\b8\b", text)
    wait_for(lambda: ask("document.querySelectorAll('#plots canvas').length") == 2)
    reward = "document.querySelector('#plots .legend').innerText.split('\\n').map(each => each.trim())"
    assert ask(f"{reward}.join(' ')").split() == ["highest", "group", "1", "mean", "0.5", "lowest", "group", "0"]


def test_steps_refusals_and_the_report(browser: Browser, tmp_path: Path):
    with running_server("--run-dir", str(tmp_path / "sums")) as server, httpx.Client(base_url=server.url) as api:
        register(api, batch_size=8)
        assert api.post("/scored_data", json={"tokens": EVIL}).status_code == 422
        text = "document.body.innerText"
        ask = browser(server.url)
        assert ask("document.querySelector('h1').textContent") == "sums"
        left = "[...document.querySelectorAll('.tile')].find(each => each.innerText.startsWith('time left'))"
        assert "POST /scored_data: 422" in ask(text) and ask(f"{left}.children[1].textContent") == "–"
        assert f"grpo report {tmp_path / 'sums'}" in ask(text), "there is none yet"
        assert api.get("/report").status_code == 404
        for _ in range(2):
            assert api.post("/scored_data", json=a_group(1.0)).status_code == 200
            assert api.get("/batch").json()["batch"] is not None
        (tmp_path / "sums").mkdir()
        (tmp_path / "sums" / "report.html").write_text(document("of sums", ""))
        wait_for(lambda: ask("!!document.querySelector('#report a')"))
        assert re.fullmatch(r"\d+ s", ask(f"{left}.children[1].textContent")), "of 9 steps 4 are done, two of them here"
        ask("document.querySelector('#report a').click()")
        wait_for(lambda: ask("document.title") == "of sums")


def test_what_models_and_environments_write_is_text_and_nothing_else(browser: Browser, url: str):
    ask = browser(url)
    assert EVIL in ask("document.querySelector('#samples pre').textContent")
    assert EVIL in ask("document.getElementById('run').textContent")
    assert ask("document.title").startswith(EVIL)
    assert ask("document.querySelectorAll('img').length") == 0


def test_the_page_asks_nobody_else_and_fits_a_phone(browser: Browser, url: str):
    ask = browser(url)
    asked = ask("JSON.stringify(performance.getEntriesByType('resource').map(each => each.name))")
    assert {*json.loads(asked)} == {f"{url}/overview"}
    assert ask("document.documentElement.scrollWidth") <= PHONE_WIDTH
