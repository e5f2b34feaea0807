"""The status page in a real headless browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from environments.api.testing import running_server
from tests.integration.browsing import NEEDS_BROWSER, PHONE_WIDTH, Browser, browser

__all__ = ["browser"]  # a fixture

EVIL = "<img src=x onerror=\"document.title='pwned'\"></pre><script>document.title='pwned'</script>&amp;"

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        trainer = {
            **{"wandb_group": "g", "wandb_project": EVIL, "batch_size": 12, "max_token_len": 64, "num_steps": 9},
            **{"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 2},
        }
        assert api.post("/register", json=trainer).status_code == 200
        api.get("/batch")
        env = {"max_token_length": 64, "desired_name": EVIL, "weight": 1.0, "group_size": 8}
        assert api.post("/register-env", json=env).status_code == 200
        for score in (0.0, 0.5, 1.0):
            group = {
                "tokens": [[1, 2]] * 8,
                "masks": [[1, 2]] * 8,
                "scores": [score] * 8,
                "messages": [[{"role": "assistant", "content": EVIL + "x" * 500}]] * 8,
                "env_id": 0,
                "policy_versions": [1] * 8,
            }
            assert api.post("/scored_data", json=group).status_code == 200
        yield server.url


def test_the_page_tells_what_happens(browser: Browser, url: str):
    ask = browser(url)
    text = ask("document.body.innerText")
    for said in ("of 9", "24 sequences", "not ready", "Group 2", "score 1.000", "policy version 1", "alive"):
        assert said in text, (said, text)
    assert re.search(r"batch_size\b.*\b12\b.*\b8\b", text)
    assert ask("document.querySelectorAll('#chart polyline').length") == 1
    assert re.search(r"\b3 groups\b.*\b0\.000\b.*\b1\.000\b", text)


def test_what_models_and_environments_write_is_text_and_nothing_else(browser: Browser, url: str):
    ask = browser(url)
    assert EVIL in ask("document.querySelector('#samples pre').textContent")
    assert EVIL in ask("document.getElementById('run').textContent")
    assert ask("document.title") == "Rollout API"
    assert ask("document.querySelectorAll('img').length") == 0


def test_the_page_asks_nobody_else_and_fits_a_phone(browser: Browser, url: str):
    ask = browser(url)
    asked = ask("JSON.stringify(performance.getEntriesByType('resource').map(each => each.name))")
    assert {each.split("?")[0] for each in json.loads(asked)} <= {f"{url}/overview", f"{url}/favicon.ico"}
    assert ask("document.documentElement.scrollWidth") <= PHONE_WIDTH


def test_the_reference_lists_every_operation(browser: Browser, url: str):
    ask = browser(f"{url}/docs")
    text = ask("document.body.innerText")
    described = httpx.get(f"{url}/openapi.json").json()
    assert all(path in text for path in described["paths"])
    assert all(name in text for name in described["components"]["schemas"])
