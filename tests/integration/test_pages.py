"""The pages in a real headless browser: the report, and the status page of the rollout API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from grpo_common.pages.document import document
from grpo_trainer.report.figures import TIME_SPLIT
from grpo_trainer.report.page import write_report
from tests.integration.browsing import NEEDS_BROWSER, PHONE_WIDTH, Browser, Page, browser, wait_for
from tests.rollout_api import running_server
from tests.stand_ins import registration
from tests.unit.test_report import EVIL, a_sample, row, write_run

__all__ = ["browser"]  # a fixture

pytestmark = NEEDS_BROWSER


@pytest.fixture(autouse=True)
def no_error_on_the_console(browser: Browser) -> Iterator[None]:
    yield
    assert browser.errors == []


# the report --------------------------------------------------------------------------------------------------


@pytest.fixture
def url(file: str, request: pytest.FixtureRequest) -> str:
    """One for each test: what is remembered of one is not of another."""
    return f"{file}?{request.node.name}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [row(n, **({"train/resumed": 1.0} if n == 40 else {}), **{EVIL: n}) for n in range(1, 80)]
    for number, each in enumerate(rows):
        each["train/loss"] = 1e6 if number == 30 else number % 7 / 100
    folder = write_run(tmp_path_factory.mktemp("runs") / ("long_name_" * 9), rows, wandb_project=EVIL)
    evil = {"prompt": EVIL, "pieces": [EVIL, "word " * 200], "ratios": [0.5, 1.0], "trained": [True, True]}
    samples = [a_sample(), a_sample(step=70, reward=0.25, **evil), a_sample(step=70, reward=0.5)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    write_report([folder], folder / "report.html")
    return f"file://{folder}/report.html"


def plot(ask: Page, title: str) -> str:
    """An expression for a figure, scrolled to and drawn."""
    found = f"[...document.querySelectorAll('figure')].find(each => each.querySelector('b').textContent === '{title}')"
    ask(f"{found}.scrollIntoView()")
    wait_for(lambda: ask(f"!!{found}.querySelector('canvas')"))
    return found


def press(ask: Page, figure: str, key: str) -> None:
    ask(f"{figure}.querySelector('.plot').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")


def test_it_fits_a_phone_and_asks_nobody(browser: Browser, url: str) -> None:
    ask = browser(url)
    ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    wait_for(lambda: ask("!!document.querySelector('.sample pre')"))
    assert ask("document.documentElement.scrollWidth") <= PHONE_WIDTH
    assert ask("performance.getEntriesByType('resource').length") == 0
    assert ask("document.title").endswith("grpo report") and ask("document.querySelectorAll('img').length") == 0
    assert EVIL in ask("document.getElementById('found').textContent")
    assert EVIL in ask("document.getElementById('plots').textContent"), "a metric's name"


def test_both_schemes_can_be_read(browser: Browser, url: str) -> None:
    brightness = "getComputedStyle(document.body).%s.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    for scheme, darker in (("light", "color"), ("dark", "backgroundColor")):
        ask = browser(url, scheme=scheme)
        both = {part: ask(brightness % part) for part in ("color", "backgroundColor")}
        assert min(both, key=lambda part: both[part]) == darker and abs(both["color"] - both["backgroundColor"]) > 450
        line = ask(f"{plot(ask, 'Reward')}.querySelector('.legend line').getAttribute('stroke')")
        assert line == ask("getComputedStyle(document.documentElement).getPropertyValue('--c0')")


def test_keys_move_a_cursor_that_all_plots_share(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    reward, loss = plot(ask, "Reward"), plot(ask, "Loss")
    value = "{}.querySelector('.legend b').textContent"
    assert ask(value.format(reward)) == "7.9", "without a cursor the last"
    press(ask, reward, "ArrowLeft")
    assert ask(value.format(reward)) == "7.8"
    assert "step 78" in ask(f"{loss}.querySelector('small').textContent")


def test_zoom_in_one_plot_is_zoom_in_all_and_can_be_typed(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    reward = plot(ask, "Reward")
    press(ask, reward, "ArrowLeft")
    press(ask, reward, "+")
    # 78 in the middle, and 0.3 of 78 steps to either side
    assert float(ask("document.forms.controls.elements.from.value")) == pytest.approx(78 - 0.3 * 78, abs=0.1)
    press(ask, reward, "0")
    assert ask("document.forms.controls.elements.from.value") == ""


def test_an_extreme_value_does_not_stretch_the_axis_unless_that_is_wanted(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    loss = plot(ask, "Loss")
    note = f"{loss}.querySelector('.clipped')"
    wait_for(lambda: not ask(f"{note}.hidden"))
    assert ask(f"{note}.textContent").startswith("1 ")
    ask("document.forms.controls.elements.whole.click()")
    wait_for(lambda: ask(f"{note}.hidden"))


def test_shares_of_a_whole_have_no_logarithmic_scale(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    ask("document.forms.controls.elements.log.click()")
    scales = {plot(ask, title): title for title in (TIME_SPLIT, "Throughput")}
    found = "figures.find(each => each.element === {}).chart.scales.y.distr"
    assert {title: ask(found.format(element)) for element, title in scales.items()} == {TIME_SPLIT: 1, "Throughput": 3}


def test_samples_by_step_and_by_text(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    shown = "[...document.querySelectorAll('#found summary')].map(each => each.textContent.split(',')[0])"
    assert ask(shown) == ["Step 70: reward 0.25", "Step 70: reward 0.5"]
    ask("document.forms.find.elements.order.value = '-reward'; document.forms.find.elements.before.click()")
    assert ask(shown) == ["Step 1: reward 1"]
    ask("document.querySelector('#found details').open = true")
    wait_for(lambda: ask("!!document.querySelector('#found pre')"))
    token = "document.querySelector('#found pre:last-child span')"
    assert (ask(f"{token}.className"), ask(f"{token}.title")) == ("p4", "ratio 2.0")
    assert ask("document.querySelector('#found pre:last-child').textContent") == "2! … 7 more tokens"
    search = "document.forms.find.elements.text"
    ask(f"{search}.value = '1+1'; {search}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert ask(shown) == ["Step 1: reward 1", "Step 70: reward 0.5"]
    press(ask, plot(ask, "Reward"), "Enter")
    assert ask(shown) == ["Step 70: reward 0.5", "Step 70: reward 0.25"], "the step nearest to the cursor"


def test_a_page_that_is_loaded_again_looks_as_before(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    ask("document.forms.controls.elements.log.click(); document.forms.find.elements.text.value = '1+1'")
    ask("document.querySelector('#plots > details').open = true")
    press(ask, plot(ask, "Reward"), "-")
    end = ask("document.forms.controls.elements.to.value")
    again = browser(url, width=1200)
    assert again("document.forms.controls.elements.log.checked")
    assert again("document.forms.controls.elements.to.value") == end != ""
    assert again("document.querySelectorAll('#found summary').length") == 2
    assert again("document.querySelector('#plots > details').open")


def test_a_run_can_be_hidden(browser: Browser, tmp_path: Path) -> None:
    ratios = ({"grpo/mean_ratio": 1, "grpo/max_ratio": 3}, {"grpo/mean_ratio": 2, "grpo/max_ratio": 4})
    rows = [[row(1), row(2, **ratio)] for ratio in ratios]
    folders = [write_run(tmp_path / name, own) for name, own in zip(("one", "two"), rows, strict=True)]
    write_report(folders, tmp_path / "both.html")
    ask = browser(f"file://{tmp_path}/both.html", width=1200)
    names = f"[...{plot(ask, 'Reward')}.querySelectorAll('.legend button')].map(each => each.textContent)"
    assert ask(names) == ["one0.2", "two0.2"]
    table = f"[...{plot(ask, 'Ratio')}.querySelectorAll('.legend tr')].map(each => each.innerText.trim().split(/\\s+/))"
    assert ask(table) == [["one", "two"], ["mean", "1", "2"], ["largest", "3", "4"]]
    ask("document.querySelector('input[data-run]').click()")
    assert ask(names) == ["two0.2"]


def test_a_long_run_is_a_page_of_reasonable_size(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", [row(n) for n in range(1, 10_001)])
    words = ["word "] * 100
    sample = a_sample(pieces=words, ratios=[1.01] * 100, trained=[True] * 100)
    lines = [json.dumps({**sample, "step": 2 * n}) for n in range(1, 5001)]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    write_report([folder], folder / "report.html")
    assert (folder / "report.html").stat().st_size < 1_500_000
    ask = browser(f"file://{folder}/report.html", width=1200)
    assert plot(ask, "Reward") and "of 5000" in ask("document.forms.find.elements.count.value")


# the status page --------------------------------------------------------------------------------------------

MARKUP = "<img src=x onerror=\"document.title='pwned'\"></pre><script>document.title='pwned'</script>&amp;"


@pytest.fixture(scope="module")
def status_url() -> Iterator[str]:
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        register(api, batch_size=12)
        for score in (0.0, 0.5, 1.0):
            assert api.post("/scored_data", json=a_group(score)).status_code == 200
        yield server.url


def register(api: httpx.Client, batch_size: int) -> None:
    """A trainer and an environment."""
    trainer = registration(batch_size, wandb_project=MARKUP, starting_step=2, num_steps=9)
    assert api.post("/register", json=msgspec.to_builtins(trainer)).status_code == 200
    api.get("/batch")
    env = {"max_token_length": 64, "desired_name": MARKUP, "weight": 1.0, "group_size": 8}
    assert api.post("/register-env", json=env).status_code == 200


def a_group(score: float) -> dict[str, Any]:
    return {
        **{"tokens": [[1, 2]] * 8, "masks": [[1, 2]] * 8, "scores": [score] * 8},
        "messages": [[{"role": "assistant", "content": MARKUP + "x" * 500}]] * 8,
        **{"env_id": 0, "policy_versions": [1] * 8},
    }


def test_status_page_tells_what_happens(browser: Browser, status_url: str) -> None:
    ask = browser(status_url, width=1200)
    text = ask("document.body.innerText")
    for said in ("of 9", "24 of 12 sequences", "Group 2", "score 1.000", "policy version 1", "alive"):
        assert said in text, (said, text)
    assert re.search(r"batch_size\b.*\b12\b.*\b8\b", text)
    wait_for(lambda: ask("document.querySelectorAll('#plots canvas').length") == 2)
    reward = "document.querySelector('#plots .legend').innerText.split('\\n').map(each => each.trim())"
    assert ask(f"{reward}.join(' ')").split() == ["highest", "group", "1", "mean", "0.5", "lowest", "group", "0"]


def test_status_page_has_steps_refusals_and_the_report(browser: Browser, tmp_path: Path) -> None:
    with running_server("--run-dir", str(tmp_path / "sums")) as server, httpx.Client(base_url=server.url) as api:
        register(api, batch_size=8)
        assert api.post("/scored_data", json={"tokens": MARKUP}).status_code == 422
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


def test_status_page_shows_what_models_and_environments_write_as_text(browser: Browser, status_url: str) -> None:
    ask = browser(status_url)
    assert MARKUP in ask("document.querySelector('#samples pre').textContent")
    assert MARKUP in ask("document.getElementById('run').textContent")
    assert ask("document.title").startswith(MARKUP)
    assert ask("document.querySelectorAll('img').length") == 0


def test_status_page_asks_nobody_else_and_fits_a_phone(browser: Browser, status_url: str) -> None:
    ask = browser(status_url)
    asked = ask("JSON.stringify(performance.getEntriesByType('resource').map(each => each.name))")
    assert {*json.loads(asked)} == {f"{status_url}/overview"}
    assert ask("document.documentElement.scrollWidth") <= PHONE_WIDTH
