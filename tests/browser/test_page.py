"""The page in a real browser. Debian's `chromium` and `chromium-driver` are enough; without them this is skipped."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folder import write_run

from takifugu.report.page import page
from takifugu.report.read import read

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium: install Debian's chromium and chromium-driver",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
NASTY = [
    "<script>window.ran=1</script>",
    "</script><img src=x onerror='window.ran=2'>",
    "<b>bold</b>",
    "plain",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver is named: nothing may be looked for, let alone downloaded.
    service = webdriver.ChromeService(executable_path=DRIVER, env={**os.environ, "SE_OFFLINE": "true"})
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("pages")
    small = write_run(base / "small", nodes=8, rounds=30, baselines=9)
    sources = {
        "small": small,
        "large": write_run(base / "large", nodes=120, rounds=60, baselines=2),
        "open": write_run(base / "open", nodes=3, rounds=6, baselines=0, finished=False),
        "plan": small / "plan.json",
        "nasty": write_run(base / "nasty", names=NASTY, policy=NASTY[0], baselines=1),
    }
    for name, source in sources.items():
        (base / f"{name}.html").write_text(page(read(source)), encoding="utf-8")
    return {name: base / f"{name}.html" for name in sources}


def show(browser: Any, path: Path, width: int = 1440, scheme: str = "light") -> None:
    """Opens the page and waits until its charts are drawn."""
    emulate(browser, width, scheme)
    browser.get_log("browser"), browser.get_log("performance")  # what an earlier page left
    browser.get(path.as_uri())
    drawn(browser, scheme)


def emulate(browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})


def drawn(browser: Any, scheme: str) -> None:
    script = "return document.documentElement.dataset.drawn"
    WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda b: b.execute_script(script) == scheme)


def requests(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two opaque colours as a browser computes them: rgb(r, g, b)."""

    def luminance(colour: str) -> float:
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("name", ["small", "large", "open", "plan"])
def test_it_fits_and_is_readable(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    show(browser, pages[name], width, scheme)
    size = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert size[0] <= size[1] == width
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    assert [u for u in requests(browser) if not u.startswith(("file:", "data:", "blob:"))] == []
    looks = browser.execute_script(
        """
        const colour = (selector) => {
          const style = getComputedStyle(document.querySelector(selector));
          return document.querySelector(selector) instanceof SVGElement ? style.fill : style.color;
        };
        return {
          paper: getComputedStyle(document.body).backgroundColor,
          texts: ["body", ".note", ".xtick text", ".ytick text", ".xtitle", ".annotation-text"].map(colour),
        };
        """
    )
    for colour in looks["texts"]:
        assert contrast(colour, looks["paper"]) >= 4.5


@pytest.mark.parametrize("name", ["small", "large", "plan"])
def test_charts_are_there_and_labelled(browser: Any, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name])
    found = browser.execute_script(
        """
        return [...document.querySelectorAll(".plot")].map((plot) => ({
          id: plot.id,
          label: plot.getAttribute("aria-label"),
          x: plot.querySelector(".xtitle")?.textContent,
          marks: plot.querySelectorAll(".point, .scatterlayer .trace path, .heatmaplayer image").length,
          keys: plot.closest("figure").querySelectorAll(".keys button").length,
        }));
        """
    )
    assert [chart["id"] for chart in found] == [
        "timeline", "loss-over-time", "loss-over-energy", "energy-by-node", "bytes-by-round"
    ]  # fmt: skip
    for chart in found:
        assert chart["label"]
        assert chart["marks"] > 0
        assert chart["keys"] > 0
    titles = [re.sub(r"\(\w+\)", "(unit)", chart["x"]) for chart in found]
    assert titles == ["time (unit)", "time (unit)", "energy spent (unit)", "energy (unit)", "round"]


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("name", ["small", "large"])
def test_labels_of_ticks_do_not_overlap(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    show(browser, pages[name], width)
    boxes = browser.execute_script(
        """
        const side = (plot, selector, from, to) => [...plot.querySelectorAll(selector)].map((text) => {
          const box = text.getBoundingClientRect();
          return [box[from], box[to]];
        });
        return [...document.querySelectorAll(".plot")].flatMap((plot) => [
          side(plot, ".xtick text", "left", "right"), side(plot, ".ytick text", "top", "bottom")]);
        """
    )
    for axis in boxes:
        assert len(axis) >= 2
        ordered = sorted(axis)
        # A text's box is a little taller than its letters.
        assert all(first[1] <= second[0] + 2 for first, second in itertools.pairwise(ordered))


def test_the_scheme_changes_under_way(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["small"])
    fill = "return getComputedStyle(document.querySelector('#timeline .xtick text')).fill"
    light = browser.execute_script(fill)
    emulate(browser, 1440, "dark")
    drawn(browser, "dark")
    assert browser.execute_script(fill) != light


def test_a_key_hides_its_traces(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["small"])
    count = "return document.querySelectorAll('#bytes-by-round .point').length"
    before = browser.execute_script(count)
    press = (
        "document.querySelector('#bytes-by-round').closest('figure').querySelector('.keys button').click()"
    )
    browser.execute_script(press)
    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda b: b.execute_script(count) < before)
    browser.execute_script(press)
    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda b: b.execute_script(count) == before)


def test_a_node_named_like_a_script_is_only_a_name(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["nasty"])
    assert browser.execute_script("return window.ran") is None
    assert browser.execute_script("return document.images.length") == 0
    ticks = browser.execute_script(
        "return [...document.querySelectorAll('#timeline .ytick text')].map((t) => t.textContent)"
    )
    assert "<b>bold</b>" in ticks
    assert NASTY[0] in browser.execute_script("return document.querySelector('table').innerText")


def test_without_its_policy_a_script_still_would_not_run(
    browser: Any, pages: dict[str, Path], tmp_path: Path
) -> None:
    """The escapes alone must do: the content security policy is the second lock, not the only one."""
    text = pages["nasty"].read_text(encoding="utf-8")
    bare = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", text)
    assert bare != text
    (tmp_path / "bare.html").write_text(bare, encoding="utf-8")
    show(browser, tmp_path / "bare.html")
    assert browser.execute_script("return window.ran") is None
