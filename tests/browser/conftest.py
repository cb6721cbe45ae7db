"""The browser of all tests in this folder."""

import pytest


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-browser)")
    from fedrema.page.browser import chromium

    try:
        with chromium() as started:
            yield started
    except playwright.Error as error:
        pytest.skip(f"there is no Chromium here (make test-browser): {str(error).splitlines()[0]}")
