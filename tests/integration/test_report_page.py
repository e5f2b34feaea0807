"""The report in a real headless browser: a phone, light and dark."""

from __future__ import annotations

import json

import pytest

from grpo_trainer.report.command import write_report
from tests.integration.browsing import NEEDS_BROWSER, PHONE_WIDTH, Browser, browser
from tests.unit.test_report import EVIL, a_sample, row, write_run

__all__ = ["browser"]  # a fixture

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(
        tmp_path_factory.mktemp("runs") / ("long_name_" * 9), [row(n) for n in range(1, 80)], wandb_project=EVIL
    )
    samples = [a_sample(), a_sample(prompt=EVIL, pieces=[EVIL, "word " * 200], ratios=[0.5, 1.0], trained=[True, True])]
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    write_report([folder], folder / "report.html")
    return f"file://{folder}/report.html"


def test_it_fits_a_phone_and_asks_nobody(browser: Browser, url: str) -> None:
    ask = browser(url)
    ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert ask("document.documentElement.scrollWidth") <= PHONE_WIDTH
    assert ask("performance.getEntriesByType('resource').length") == 0
    assert ask("document.title").endswith("grpo report") and ask("document.querySelectorAll('img').length") == 0
    assert EVIL in ask("document.body.textContent")


def test_both_schemes_can_be_read(browser: Browser, url: str) -> None:
    brightness = "getComputedStyle(document.body).%s.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    for scheme, darker in (("light", "color"), ("dark", "backgroundColor")):
        ask = browser(url, scheme=scheme)
        both = {part: ask(brightness % part) for part in ("color", "backgroundColor")}
        assert min(both, key=lambda part: both[part]) == darker and abs(both["color"] - both["backgroundColor"]) > 450
        line = ask("getComputedStyle(document.querySelector('polyline.c0')).stroke")
        assert line != ask("getComputedStyle(document.body).backgroundColor")


def test_the_pointer_reads_values(browser: Browser, url: str) -> None:
    ask = browser(url, width=1200)
    ask(
        "const svg = document.querySelector('figure svg'), box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 2, clientY: box.top + 20}))"
    )
    assert ask("document.querySelector('.readout').textContent") == "step 79: 7.9"
    ask("document.querySelector('figure svg').dispatchEvent(new PointerEvent('pointerleave'))")
    assert ask("document.querySelector('.readout').hidden") is True
