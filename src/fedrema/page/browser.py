"""Headless Chromium for tests and screenshots of the page; needs the extra `browser` and Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Start the Chromium of the system, or the one that Playwright has installed."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers lack; only our own pages are opened.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
