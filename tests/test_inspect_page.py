"""The page of `inspect` in a real Chromium, with a hostile document. Skipped where there is no Chromium."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_common import SHORT

import twinkv_edge as tk
from twinkv_edge.cli.app import main
from twinkv_edge.inspect import Inspection, PolicyResult, nearest, render
from twinkv_edge.inspect.payload import payload

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = """<script>alert(1)</script> </script> <!-- <img src=x onerror="alert(2)"> {{ 7*7 }} ${8*8} &lt;b&gt;
A null \0 and a bell \7 here; עברית וגם العربية stand from right to left; 👩‍👩‍👧 🙂 are families.\tTab.
"""
PICTURES = {c: chr(0x2400 + c) for c in [*range(9), *range(0xB, 0x20)]}


@dataclass
class Browser:
    """A page that is open, and what it did."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def colours(self, policy: int = 0) -> list[str]:
        """Background of every token."""
        script = """p => [...document.querySelectorAll(`.row p:nth-child(${p + 1}) > span`)]
            .map(s => getComputedStyle(s).backgroundColor)"""
        found: list[str] = self.page.evaluate(script, policy)
        return found

    def slide(self, name: str, value: int) -> None:
        script = "([i, v]) => { const s = document.querySelector(i); s.value = v; s.dispatchEvent(new Event('input')) }"
        self.page.evaluate(script, ["#" + name, value])
        self.settle()

    def settle(self) -> None:
        """Until rows off the screen have their colours too."""
        self.page.wait_for_selector("#text[data-painted=all]")
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    document, page = folder / "a <b> & c.txt", folder / "page.html"
    document.write_text(HOSTILE + SHORT + HOSTILE + SHORT, encoding="utf-8")
    options = ["--policy", "snapkv", "--policy", "knorm", "--n-recent", "16", "--json", "-o", str(page)]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["inspect", str(document), *options]) == 0
    assert [p.name for p in folder.iterdir()] != [page.name]
    return page


@pytest.fixture(scope="module")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 tokens, 30 layers of 3 heads, two policies: random numbers, no model."""
    rng, shape = np.random.default_rng(0), (30, 3, 10_000)
    counts = rng.poisson(0.6, shape).astype(np.int32)
    lists = []
    for layer in counts:
        lengths = np.minimum(layer, 3).astype(np.uint8)
        many = int(lengths.sum())
        tokens = rng.integers(0, shape[-1], many).astype(np.int32)
        lists.append(nearest.TwinLists(lengths, tokens, rng.uniform(0.9, 1, many).astype(np.float32)))
    policies = [
        PolicyResult(
            settings=tk.Compression(policy=name),
            roles=rng.integers(0, 6, shape).astype(np.uint8),
            best=rng.uniform(0, 1, shape).astype(np.float32),
            **dict.fromkeys(("lost_before", "lost_after", "swaps", "orphans", "donors", "bytes_after"), 1),
        )
        for name in ("knorm", "snapkv")
    ]
    found = Inspection("random", 10_000, counts, lists, policies, 0.9, 32, "rope", 1, 3)
    texts = [f" word{i}" + "\n" * (i % 120 == 119) for i in range(10_000)]
    about = {"title": "long", "chips": [], "version": "1"}
    page = tmp_path_factory.mktemp("long") / "long.html"
    page.write_text(render(payload(found, texts, [], list(range(10_000)), about)), encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    profile = tmp_path_factory.mktemp("profile")
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1280, "height": 900},
            color_scheme="light",
            reduced_motion="reduce",
        )
        yield context
        context.close()


@pytest.fixture
def browser(chromium: Any, report: Path) -> Iterator[Browser]:
    yield from _open(chromium, report)


def _open(chromium: Any, report: Path) -> Iterator[Browser]:
    opened = Browser(chromium.new_page())
    page = opened.page
    page.on("console", lambda message: opened.problems.append(message.text))
    page.on("pageerror", lambda error: opened.problems.append(str(error)))
    page.on("dialog", lambda dialog: (opened.problems.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
    opened.settle()
    yield opened
    assert opened.problems == []  # whatever a test did: no error, no dialog, and nothing was loaded
    assert opened.requests == [report.as_uri()]
    page.close()


def test_text_is_shown_as_it_is(browser: Browser) -> None:
    script = "p => [...document.querySelectorAll(`.row p:nth-child(${p + 1}) > span`)].map(s => s.textContent).join('')"
    expected = (HOSTILE + SHORT + HOSTILE + SHORT).translate(PICTURES)
    for policy in (0, 1):
        assert browser.page.evaluate(script, policy) == expected
    assert browser.page.inner_text("h1") == "a <b> & c.txt"
    assert "a <b> & c.txt" in browser.page.title()
    assert browser.page.locator("img").count() == 0


def test_sliders_and_modes_change_colours(browser: Browser) -> None:
    page, everything = browser.page, browser.colours()
    assert len(set(everything)) > 4  # kept by many shares of the heads
    browser.slide("layer", 8)
    browser.slide("head", 2)
    one = browser.colours()
    assert one != everything
    assert len(set(one)) == 2  # kept or not
    kept = sum(colour != "rgba(0, 0, 0, 0)" for colour in one)
    assert kept == -(-len(one) // 2)
    assert page.inner_text("#layer-name") == "7"
    assert page.get_attribute("#head", "aria-valuetext") == "head 1"
    page.locator("#modes label", has_text="Roles").click()
    browser.settle()
    roles = browser.colours()
    assert roles != one
    assert browser.colours(policy=1) != roles
    assert "orphan" in page.inner_text("#legend")
    browser.slide("layer", 0)
    browser.slide("head", 0)
    page.keyboard.press("1")
    browser.settle()
    assert browser.colours() == everything


def test_hover_shows_numbers_and_twins(browser: Browser) -> None:
    page = browser.page
    page.keyboard.press("3")  # twins
    browser.settle()
    token = page.evaluate("""() => [...document.querySelectorAll('.row p:first-child > span')]
        .findIndex(s => s.className.startsWith('w') && !s.className.startsWith('w0') && s.textContent.trim())""")
    page.locator(".row p:first-child > span").nth(token).scroll_into_view_if_needed()
    page.locator(".row p:first-child > span").nth(token).hover()
    card = page.inner_text("#card")
    assert f"token {token} " in card
    assert re.search(r"kept \d+/90", card)
    assert re.search(r"a twin in [1-9]\d* of 90 heads", card)
    similarity, where = re.search(r"(0\.9\d\d|1\.000)\s+@(\d+) ×", card).groups()  # type: ignore[union-attr]
    assert float(similarity) >= 0.9
    assert abs(int(where) - token) > 32
    outlined = "[...document.querySelectorAll('.twin-of')].map(s => s.token)"
    assert int(where) in page.evaluate(outlined)
    page.mouse.move(2, 2)
    assert page.locator("#card").is_hidden()


def test_keyboard_walks_through_the_text(browser: Browser) -> None:
    page = browser.page
    current = "document.querySelector('.current').token"
    page.focus("#text")
    page.keyboard.press("Home")
    assert page.evaluate(current) == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(current) == 2
    page.keyboard.press("ArrowDown")
    below = page.evaluate(current)
    assert below > 3
    page.keyboard.press("ArrowUp")
    assert page.evaluate(current) < below
    page.keyboard.press("]")
    assert page.inner_text("#layer-name") == "0"
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()
    assert page.locator(".current").count() == 0


def test_theme_follows_the_system_and_the_button(browser: Browser) -> None:
    page = browser.page
    paper = "getComputedStyle(document.body).backgroundColor"
    pixels = "document.querySelector('canvas').toDataURL()"
    light, drawn = page.evaluate(paper), page.evaluate(pixels)
    page.click("#theme")
    assert page.evaluate(paper) != light
    assert page.evaluate(pixels) != drawn  # maps follow
    dark = page.evaluate(paper)
    page.click("#theme")
    assert page.evaluate(paper) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(paper) == light  # the button's word stays
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    assert page.evaluate(paper) == dark
    page.emulate_media(color_scheme="light")
    browser.requests.pop()  # the reload
    browser.settle()


def test_charts_choose_a_layer(browser: Browser) -> None:
    page = browser.page
    assert page.locator("#charts figure").count() == 4  # retention twice, prevalence, bytes
    assert page.locator("#charts figure:first-child .pick").count() == 30
    page.locator("#charts figure:first-child .pick").nth(12).click()
    assert page.inner_text("#layer-name") == "12"


@pytest.fixture
def long_browser(chromium: Any, long_report: Path) -> Iterator[Browser]:
    yield from _open(chromium, long_report)


def test_a_long_document_is_recoloured_where_one_looks(long_browser: Browser) -> None:
    page = long_browser.page
    assert page.locator("#text .row > p > span").count() == 20_000
    assert page.evaluate("document.querySelectorAll('*').length") < 22_000  # nothing per layer and head
    recoloured = """layer => {
        const slider = document.getElementById('layer'), rows = [...document.querySelectorAll('.row')].map(r => r.row);
        const before = Math.max(...rows.map(r => r.version));
        slider.value = layer;
        slider.dispatchEvent(new Event('input'));
        return rows.filter(r => r.version > before).length / rows.length; }"""
    at_once = page.evaluate(recoloured, 5)
    assert 0 < at_once < 0.3
    versions = "[...new Set([...document.querySelectorAll('.row')].map(r => r.row.version))].length"
    long_browser.settle()
    assert page.evaluate(versions) == 1  # and the rest when there was time
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    last = page.locator(".row p:first-child > span").last
    last.hover()
    assert "token 9,999 " in page.inner_text("#card")
