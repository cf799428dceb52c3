"""The page in a real browser: nothing in its console, no request to anywhere, everything within its width, and usable
with a mouse, with keys, with 5,000 checkpoints and with names that want to be markup.

ASYNCCKPT_PICTURES=folder keeps pictures of what was seen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.observe.facts import report_of
from asyncckpt.observe.page import page_of
from tests.observed.browser import Browser, open_browser
from tests.observed.directories import HOSTILE, extremes, long_run
from tests.observed.test_serve import served

CHARTS = ("timeline", "stalls", "sizes", "chains")
DRAWN = "return document.querySelector('#stalls svg') !== null"
# Of all texts that are shown: those that stick out of the window, or lie over another one of their chart.
STICKS_OUT = """
const wide = [...document.querySelectorAll("h1,h2,p,dt,dd,td,th,button,li,text")].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && (box.left < -1 || box.right > innerWidth + 1) && !element.closest(".scroll");
});
return wide.map((element) => element.textContent);
"""
OVERLAPS = """
return [...document.querySelectorAll("svg")].flatMap((chart) => {
  const boxes = [...chart.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
    p.left < q.right - 1 && q.left < p.right - 1 && p.top + 2 < q.bottom - 2 && q.top + 2 < p.bottom - 2
  ).map(([b]) => `${a} / ${b}`));
});
"""
TIP = """
const tip = document.getElementById("tip");
return tip.hidden ? null : tip.getBoundingClientRect().toJSON();
"""
# Contrast of all texts with what they stand on, as WCAG 2 computes it.
FAINT = """
const channel = (value) => { const c = value / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
function behind(element) {
  for (let e = element; e; e = e.parentElement) {
    const colour = numbers(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
}
const found = new Set();
for (const element of document.querySelectorAll("h1,h2,h3,p,dt,dd,td,th,button:enabled,li,span,text")) {
  if (!element.textContent.trim() || !element.getBoundingClientRect().width) continue;
  const style = getComputedStyle(element);
  const a = light(numbers(element.tagName === "text" ? style.fill : style.color)), b = light(behind(element));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.add(`${element.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
}
return [...found];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.show("about:blank")
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of 120 and 5,000 checkpoints, of hostile names, of one checkpoint and of none."""
    folder = tmp_path_factory.mktemp("pages")
    known = {
        "usual": long_run(120),
        "long": long_run(5000),
        "hostile": long_run(120, names=HOSTILE),
        "one": dict(list(long_run(20).items())[3:4]),
        "none": {},
        "extreme": extremes(),
        "damaged": dict(list(long_run(20).items())[13:14]),
    }
    for name, found in known.items():
        page = page_of(report_of(Path("/data/runs") / name, found), title=name)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return folder


def look(browser: Browser, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    """Open a page, and check what holds for all of them."""
    browser.show(page.as_uri(), width=width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(STICKS_OUT) == []
    assert browser.run(OVERLAPS) == []
    assert browser.run(FAINT) == []
    silent(browser, page.as_uri())
    if "ASYNCCKPT_PICTURES" in os.environ:
        theme = "dark" if dark else "light"
        browser.picture(Path(os.environ["ASYNCCKPT_PICTURES"]) / f"{page.stem}-{width}-{theme}.png")


def silent(browser: Browser, *own: str) -> None:
    """Check that the console says nothing, and that nothing was asked for but pages of our own."""
    assert browser.console() == []
    assert [url for url in browser.requests() if not url.startswith((*own, "data:,", "chrome:"))] == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["usual", "long", "hostile", "one", "none", "damaged", "extreme"])
def test_a_page_is_whole_at_every_width_and_in_both_themes(
    browser: Browser, pages: Path, name: str, width: int, dark: bool
) -> None:
    look(browser, pages / f"{name}.html", width=width, dark=dark)
    backgrounds = {False: "rgb(246, 247, 249)", True: "rgb(15, 18, 21)"}
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == backgrounds[dark]
    assert browser.run("return document.getElementById('none').hidden") is (name != "none")


def test_hostile_names_are_shown_and_never_run(browser: Browser, pages: Path) -> None:
    look(browser, pages / "hostile.html")
    shown = browser.run("return document.getElementById('tables').textContent")
    assert all(name in shown for name in HOSTILE[:-1])
    assert "\\u{202e}gnp.exe\\u{0}\\u{2028}" in shown
    assert browser.run("return document.title") == "hostile - asyncckpt"
    assert browser.run("return document.querySelectorAll('main img, main script, main svg[onload]').length") == 0


def test_a_script_that_is_slipped_in_does_not_run(browser: Browser, pages: Path, tmp_path: Path) -> None:
    """The second line of defence: the policy. The control shows that console and title would tell."""
    slipped = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
    page = (pages / "one.html").read_text(encoding="utf-8").replace("<main", slipped + "<main")
    for name, text in (("kept", page), ("open", page.replace("Content-Security-Policy", "X-None"))):
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    browser.show((tmp_path / "kept.html").as_uri())
    browser.until(DRAWN)
    assert browser.run("return document.title") != "ran"
    assert len([line for line in browser.console() if "Content Security Policy" in line]) >= 2
    browser.show((tmp_path / "open.html").as_uri())
    browser.until("return document.title === 'ran'")


def test_5000_checkpoints_stay_usable(browser: Browser, pages: Path) -> None:
    """All are drawn as few elements, and the page goes through all of them."""
    look(browser, pages / "long.html")
    browser.run("[...document.querySelectorAll('#ranges button')].find((b) => b.textContent.startsWith('All')).click()")
    silent(browser)
    assert browser.run("return document.querySelectorAll('*').length") < 1500
    assert browser.run(OVERLAPS) == []
    for chart in CHARTS:
        drawn = f"[...document.querySelectorAll('#{chart} path')].map((path) => path.getAttribute('d')).join('')"
        assert browser.run(f"return ({drawn}.match(/[ML]/g) ?? []).length") >= 4900
    browser.run("document.querySelectorAll('#pages button')[1].click()")
    assert browser.run("return document.querySelector('#steps tbody tr').dataset.step") == str(500 * (5000 - 15))


@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_can_be_used_with_keys_alone(browser: Browser, pages: Path, chart: str) -> None:
    browser.show((pages / "usual.html").as_uri())
    browser.run(f"document.querySelector('#{chart} [role=slider]').focus()")
    said = "return document.activeElement.getAttribute('aria-valuetext')"
    browser.press("End")
    assert browser.run(said).startswith("step 60,000,")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        browser.press(key)
    assert browser.run(said).startswith("step 59,500,")
    assert browser.run("return document.getElementById('tip').innerText").startswith("step 59,500\n")
    browser.press("Enter")
    assert browser.run("return document.querySelector('#details h2').textContent").startswith("Step 59,500")
    browser.press("Escape")
    assert browser.run("return document.getElementById('tip').hidden")
    silent(browser, (pages / "usual.html").as_uri())


def test_what_the_mouse_points_at_is_told_within_the_window(browser: Browser, pages: Path) -> None:
    for width in (1280, 400):
        browser.show((pages / "usual.html").as_uri(), width=width)
        browser.run("document.getElementById('stalls').scrollIntoView({ block: 'center' })")
        for share in (0.02, 0.5, 0.98):
            box = browser.run("return document.querySelector('#stalls svg').getBoundingClientRect().toJSON()")
            browser.move(box["left"] + share * box["width"], box["top"] + box["height"] / 2)
            tip = browser.until(TIP)
            assert tip["left"] >= 0
            assert tip["right"] <= width


def test_details_lead_down_the_chain(browser: Browser, pages: Path) -> None:
    browser.show((pages / "usual.html").as_uri())
    browser.run("document.querySelector('#details dd button').click()")
    assert browser.run("return document.querySelector('#details h2').textContent").startswith("Step 59,500")
    assert browser.run("return document.querySelector('[aria-selected=true]').dataset.step") == "59500"


def test_a_live_page_shows_what_is_saved_and_asks_its_own_server_alone(browser: Browser, tmp_path: Path) -> None:
    table = asyncckpt.HashTable(HOSTILE[0], dim=2)
    with served(tmp_path / "run") as port:
        own = f"http://127.0.0.1:{port}/"
        browser.show(own)
        browser.until("return !document.getElementById('none').hidden")
        with asyncckpt.Saver(
            path=tmp_path / "run", hashtables={"user": table}, deltas=asyncckpt.DeltaPolicy(bytes_share_max=99.0)
        ) as saver:
            for step in (1, 2, 3):
                table.insert(torch.tensor([step]), torch.ones(1, 2))
                saver.save_async(step).result()
                browser.until(f"return document.querySelectorAll('#steps tbody tr').length === {step}")
        assert browser.run("return document.querySelector('#details h2').textContent").startswith("Step 3")
        browser.run("document.querySelectorAll('#steps tbody tr')[2].click()")
        asyncckpt.save(tmp_path / "run", {"a": 1}, step=4)
        browser.until("return document.querySelectorAll('#steps tbody tr').length === 4")
        assert browser.run("return document.querySelector('#details h2').textContent").startswith("Step 1")
        assert browser.run("return document.getElementById('status').className") == "status live"
        silent(browser, own)
        shutil.rmtree(tmp_path / "run")
        browser.until("return !document.getElementById('none').hidden")
        browser.show("about:blank")
