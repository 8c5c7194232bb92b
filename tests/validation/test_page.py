"""The page of a report in a real browser: headless Chromium, offline."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import momentprop as mp
from momentprop.errors import Place
from momentprop.validation import latency
from momentprop.validation.page import failure_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here; Debian: chromium, chromium-driver"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Linear(6, 12))
    model.add_module("drop", nn.Dropout(0.3))
    model.add_module("</script><b>", nn.Linear(12, 3))
    x = torch.randn(30, 6)
    seconds, latency._SECONDS = latency._SECONDS, 0.0
    report = mp.validate(model, [(x, torch.randint(3, (30,)))], 60, [3 * x])
    latency._SECONDS = seconds
    return report.save_html(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def browser(page: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1000,1200")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    conditions = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)
    driver.get(page.as_uri())
    yield driver
    driver.quit()


def test_tabs_series_and_sorting(browser: Any, tmp_path: Path) -> None:
    assert browser.get_log("browser") == []
    asked = [
        entry["message"]
        for entry in browser.get_log("performance")
        if "requestWillBeSent" in entry["message"]
    ]
    assert not [message for message in asked if "http" in message.split('"url":"')[1][:5]]

    def all_of(selector: str) -> list[Any]:
        found: list[Any] = browser.find_elements("css selector", selector)
        return found

    tabs = all_of("[role=tab]")
    assert [tab.text for tab in tabs][:2] == ["Agreement", "Against targets"]
    assert [p.is_displayed() for p in all_of(".panel")] == [True, *[False] * (len(tabs) - 1)]
    tabs[1].click()
    assert all_of("#quality")[0].is_displayed()
    tabs[1].send_keys("\ue014")  # arrow right
    assert browser.switch_to.active_element.text == "Outputs"
    assert all_of("#outputs")[0].is_displayed()

    chart = all_of("#outputs .chart")[0]
    button = chart.find_element("css selector", ".legend button")
    canvas = "return arguments[0].querySelector('canvas').toDataURL()"
    before = browser.execute_script(canvas, chart)
    button.send_keys("\n")
    browser.implicitly_wait(1)
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 100))")
    assert button.get_attribute("aria-pressed") == "false"
    assert browser.execute_script(canvas, chart) != before

    tabs[0].click()
    head = all_of("#agreement th button")[2]
    head.click()
    values = [float(cell.get_attribute("data-value")) for cell in all_of("#agreement tbody td:nth-child(3)")]
    assert values == sorted(values, reverse=True)
    assert "</script><b>" in browser.execute_script("return document.querySelector('#layers').textContent")
    assert browser.save_screenshot(str(tmp_path / "page.png"))
    assert browser.get_log("browser") == []


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any) -> None:
    metrics = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.refresh()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light


def test_what_cannot_be_converted_has_a_page_too(browser: Any, tmp_path: Path) -> None:
    error = mp.MissingRuleError([Place("aten.<b>.default", "head.<i>", "model.py, line 3", "has no rule")])
    (tmp_path / "failure.html").write_text(failure_page("<u>model", error), encoding="utf-8")
    browser.get((tmp_path / "failure.html").as_uri())
    assert browser.get_log("browser") == []
    text = browser.find_element("css selector", "main").text
    for name in ("aten.<b>.default", "head.<i>", "model.py, line 3", "This model cannot be converted."):
        assert name in text
    assert browser.find_elements("css selector", "b, i, u") == []
