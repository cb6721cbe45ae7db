"""A real browser without a window, for tests and pictures of the page; needs the extra `browser` and a Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Start the system's Chromium, or the one that playwright has installed."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        # A sandbox needs rights that containers lack; only pages made here are opened.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
