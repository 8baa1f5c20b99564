"""The report holds what the run's files say, needs no network, and works in a browser."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_run
import pytest

from lowprec.jobs.rundir import RunDirectory
from lowprec.observe import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return made_run.make(tmp_path_factory.mktemp("run"), failed="int8")


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> Path:
    pytest.importorskip("plotly")
    path = run.file("report.html")
    report.write(run.path, path)
    return path


def test_collects_what_the_files_say(run: RunDirectory) -> None:
    data = report.collect(run)
    assert [row["recipe"] for row in data["rows"]] == list(made_run.RECIPES)
    assert data["curves"]["bf16"]["step"]["steps"] == list(range(60))
    assert data["curves"]["bf16"]["validation"]["steps"] == [19, 39, 59]
    low, mean, high = (data["curves"]["bf16"]["step"][key][0] for key in ("low", "mean", "high"))
    assert (low, mean, high) == (5.5, 5.51, 5.52)
    heat = data["heat"]["fp8"]["grad_output"]
    assert heat["modules"] == made_run.MODULES
    assert [row[0] for row in heat["flushed"]] == [0.1 * i for i in range(12)] or heat["flushed"][11][0] == 1.1
    assert heat["scale"][3][0] == -11
    assert data["history"]["fp8"]["skipped"] == [{"step": 7, "reason": "Inf in blocks.0.mlp.up.weight"}]


def test_long_curves_are_thinned_but_keep_their_ends(tmp_path: Path) -> None:
    data = report.collect(made_run.make(tmp_path / "long", steps=1500, seeds=1))
    steps = data["curves"]["fp32"]["step"]["steps"]
    assert len(steps) <= report.POINTS and steps[0] == 0 and steps[-1] == 1499


def test_page_is_self_contained_and_escaped(page: Path) -> None:
    text = page.read_text()
    own = text[: text.index("<script>")]
    assert not re.search(r"(?:src|href)=[\"'](?:https?:)?//", own)
    assert "{{" not in own
    assert "skipped by &#x27;lm_head&#x27; &lt;here&gt;" in own
    assert "<here>" not in own
    assert "no such luck" in own


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    directory = made_run.make(tmp_path / "run", steps=1, seeds=1)
    directory.file("metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="has no metrics yet"):
        report.collect(directory)
    with pytest.raises(OSError, match="there is no run folder"):
        report.write(tmp_path / "nowhere", tmp_path / "x.html")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    directory = made_run.make(tmp_path / "run", steps=2, seeds=1)
    with directory.file("metrics.jsonl").open("a") as file:
        file.write('{"torn')
    assert report.collect(directory)["steps"] == 2
    with directory.file("metrics.jsonl").open("a") as file:
        file.write(" line\n{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line \d+ is damaged"):
        report.collect(directory)


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


def _open(browser: Any, page: Path, **context: Any) -> tuple[Any, list[str]]:
    tab = browser.new_page(**context)
    troubles: list[str] = []
    tab.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: troubles.append(str(e)))
    tab.on("request", lambda r: troubles.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
    tab.goto(page.resolve().as_uri())
    tab.wait_for_selector("body[data-drawn=yes]")
    return tab, troubles


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (820, "light"), (1280, "dark")])
def test_opens_at_every_width(browser: Any, page: Path, width: int, scheme: str) -> None:
    tab, troubles = _open(browser, page, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for plot in ("loss", "tradeoff", "memory", "layers", "norm", "scale"):
        tab.wait_for_selector(f"#plot-{plot} .main-svg")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    if folder := os.environ.get("LOWPREC_SCREENSHOTS"):
        tab.screenshot(path=f"{folder}/{width}-{scheme}.png", full_page=True)
    tab.close()
    assert troubles == []


def test_filters_work(browser: Any, page: Path) -> None:
    tab, troubles = _open(browser, page, viewport={"width": 1280, "height": 900})
    lines = "document.querySelectorAll('#plot-loss .scatterlayer .trace').length"
    before = tab.evaluate(lines)
    tab.uncheck("#loss-recipes input[data-recipe=nvfp4]")
    assert tab.evaluate(lines) < before
    tab.select_option("#loss-kind", "validation")
    tab.select_option("#loss-view", "difference")
    assert "%" in tab.text_content("#plot-loss .ytitle")
    # the heat map opens on the tensor with most to see, and follows the choice
    assert tab.input_value("#heat-role") == "grad_output"
    assert "1.1 % in blocks.2.mlp.down" in tab.text_content("#heat-words")
    tab.select_option("#heat-role", "weight")
    tab.select_option("#heat-what", "saturated")
    assert "0.02 %" in tab.text_content("#heat-words")
    assert "fp8 skipped step 7" in tab.text_content("#skipped-words")
    tab.close()
    assert troubles == []


def test_keyboard_theme_and_names(browser: Any, page: Path) -> None:
    tab, troubles = _open(browser, page, viewport={"width": 820, "height": 900}, color_scheme="light")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.focus("#theme")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    unnamed = tab.evaluate(
        "[...document.querySelectorAll('select, input, button')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim())).length"
    )
    assert unnamed == 0
    assert all(
        tab.evaluate(
            "[...document.querySelectorAll('.plot:not([hidden])')].map(p => p.getAttribute('aria-label').length > 20)"
        )
    )
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    tab.close()
    assert troubles == []


def test_prints_in_light(browser: Any, page: Path, tmp_path: Path) -> None:
    tab, troubles = _open(browser, page, viewport={"width": 820, "height": 900}, color_scheme="dark")
    tab.emulate_media(media="print")
    tab.wait_for_function("document.documentElement.dataset.theme === 'light'")
    assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.pdf(path=str(tmp_path / "page.pdf"))
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    tab.close()
    assert troubles == []
