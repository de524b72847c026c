"The site works in a browser, opened from its files: maths, search, both colour modes, phone width, nothing fetched."
import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER and find_spec("selenium")):
    why = "needs chromium, chromedriver (Debian: chromium, chromium-driver) and selenium (the test extra)"
    if os.environ.get("DGLU_NEEDS_BROWSER"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why, allow_module_level=True)
from selenium import webdriver  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

SITE = Path(__file__).resolve().parents[2] / "docs_site"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if "_modules" not in p.parts)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1300,900")

WIDTHS = (390, 820, 1300, 1500)
TEXT = "article :is(p, li, td, th, h1, h2, h3, a, code, pre span, pre, summary), .sidebar-tree a"

MATHS = """
const all = selector => [...document.querySelectorAll(selector)];
const prose = document.querySelector('article').cloneNode(true);
prose.querySelectorAll('pre, code, mjx-container').forEach(e => e.remove());
return {written: all('.math').length, set: all('.math mjx-container').length, prose: prose.textContent,
        errors: all('[data-mml-node=merror]').map(e => e.textContent)};
"""

# Relative luminance and contrast as WCAG 2 defines them, of the colours that the browser computed.
CONTRAST = """
const channels = text => text.match(/[\\d.]+/g).map(Number);
const light = text => { const [r, g, b] = channels(text).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const grounds = new Map();
const ground = e => { if (!e) return 'rgb(255, 255, 255)';
    if (!grounds.has(e)) { const c = getComputedStyle(e).backgroundColor, a = channels(c);
        grounds.set(e, a.length < 4 || a[3] > 0 ? c : ground(e.parentElement)); }
    return grounds.get(e); };
const pairs = new Map();                        // one text of each pair of colours
for (const e of document.querySelectorAll(arguments[0])) if (e.textContent.trim() && e.checkVisibility())
    pairs.set(getComputedStyle(e).color + ground(e), e);
return [...pairs.values()].map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.className + ' ' + e.textContent.slice(0, 40)]; });
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get("about:blank")
    logged(driver)
    yield driver
    driver.quit()


def prefer(browser, colours: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": colours}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def visit(browser, page: str, colours: str = "light") -> None:
    "Open a page and wait until its maths is set."
    prefer(browser, colours)
    browser.get((SITE / page).as_uri())
    browser.execute_async_script("const done = arguments[0];"
                                 "(window.MathJax?.startup?.promise ?? Promise.resolve()).then(() => done());")


def wait_for(browser, script: str):
    return WebDriverWait(browser, 20).until(lambda b: b.execute_script("return " + script))


def logged(browser) -> tuple[list[str], list[str]]:
    "What the console holds, and the addresses asked for, since the last call."
    console = [entry["message"] for entry in browser.get_log("browser")]
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return console, [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module", params=PAGES)
def facts(browser, request) -> dict:
    "A page is opened once, and everything the tests ask about it is noted."
    logged(browser)
    visit(browser, request.param)
    console, urls = logged(browser)
    noted = {"console": console, "urls": urls, "widths": {}, "faint": {}, **browser.execute_script(MATHS)}
    for colours in ("light", "dark"):
        prefer(browser, colours)
        measured = browser.execute_script(CONTRAST, TEXT)
        noted["faint"][colours] = [what for contrast, what in measured if contrast < 4.5]
        noted["measured"] = len(measured)
    for width in WIDTHS:
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        noted["widths"][width] = browser.execute_script("return document.documentElement.scrollWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return noted


def test_page_is_quiet_and_stays_on_this_machine(facts):
    assert facts["console"] == []
    assert facts["urls"] and [url for url in facts["urls"] if not url.startswith((SITE.as_uri(), "data:"))] == []


def test_maths_is_set_and_none_is_left_as_tex(facts):
    assert facts["set"] >= facts["written"]
    assert facts["errors"] == []
    tex = r"\$\$|\\(?:frac|sigma|alpha|beta|text|sum|begin|cdot|top|partial)\b.*"
    assert re.findall(tex, facts["prose"]) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_text_stands_out_in_both_colour_modes(facts, colours):
    assert facts["measured"] and facts["faint"][colours] == []


def test_no_page_is_wider_than_the_window(facts):
    assert {width: found for width, found in facts["widths"].items() if found > width} == {}


def test_there_is_maths_to_set(browser):
    visit(browser, "spec/01_activation.html")
    assert browser.execute_script(MATHS)["set"] > 20


@pytest.mark.parametrize("word", ["dgeglu", "pad_groups"])
def test_search_finds(browser, word):
    visit(browser, "search.html")
    box = browser.find_element("css selector", "[role=main] input[name=q], .sidebar-search[name=q]")
    box.send_keys(word)
    box.submit()
    wait_for(browser, "document.querySelector('.search-summary')?.textContent.startsWith('Search finished')")
    found = browser.execute_script("return [...document.querySelectorAll('#search-results li a')]"
                                   ".map(a => a.getAttribute('href'))")
    assert any(href.startswith(("spec/", "api/", "reference/")) for href in found), found
    visit(browser, found[0].split("#")[0].split("?")[0])
    assert word in browser.page_source.lower()


def test_dark_mode_follows_the_system_and_the_button(browser):
    ground = "return getComputedStyle(document.body).backgroundColor"
    visit(browser, "index.html", "dark")
    dark = browser.execute_script(ground)
    visit(browser, "index.html", "light")
    light = browser.execute_script(ground)
    assert dark != light
    browser.find_element("css selector", ".content-icon-container .theme-toggle").click()      # auto -> the other one
    assert browser.execute_script("return document.body.dataset.theme") == "dark"
    assert browser.execute_script(ground) == dark
    browser.execute_script("localStorage.clear()")
