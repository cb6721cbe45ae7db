"""The pages of an operator and of a site in a real browser: `make test-browser`."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-browser)")
pytest.importorskip("flwr")

from fedrema.deploy.audit import AuditLog, Entry, Event
from fedrema.deploy.tls import make_authority, make_server_certificate
from tests.browser.test_page import NASTY
from tests.deploy.test_more_rounds import Control, created
from tests.reporting.folders import write_run

pytestmark = pytest.mark.browser
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A federation after three rounds, in which other machines have sent HTML."""
    place = created(tmp_path_factory.mktemp("monitor") / "f", "--rounds", "3")
    Control(place).start(place.app, {"folder": str(place.run)})
    AuditLog(place.path, "server").append(Entry(Event.REPLY_REJECTED, "south", round=3, decision=NASTY))
    node = place.path.parent / "nodes" / "south"
    AuditLog(node, "south").append(Entry(Event.REQUEST_REFUSED, "south", round=4, decision=NASTY))
    return place.path.parent


@contextmanager
def served(folder, *options):
    command = [sys.executable, "-m", "fedrema", "watch", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[2]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@contextmanager
def opened(browser, address, **how):
    """Open a page; a message on the console or a request to another host fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
    page, complaints, asked = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("main section")
    yield page
    context.close()
    assert complaints == []
    assert all(url.startswith((address, "data:")) for url in asked), asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("folder", [".", "nodes/south"])
def test_the_pages_are_accessible_and_show_html_as_text(browser, federation, folder, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with (
        served(federation / folder) as address,
        opened(browser, address, color_scheme=scheme, bypass_csp=True) as page,
    ):
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert NASTY in page.locator("main").inner_text()
        assert page.locator("main img").count() == 0
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") != scheme
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_operators_page_is_live_and_links_to_the_learning_curves(browser, federation):
    with served(federation) as address, opened(browser, address) as page:
        assert "3 of 3" in page.locator(".cards").inner_text()
        rows = page.locator("#heading-nodes + .panel tbody tr")
        assert [row.split()[0] for row in rows.all_inner_texts()] == ["north", "south", "west"]
        lines = int(page.locator("#heading-audit + .panel").inner_text().split()[0])
        AuditLog(federation / "server", "server").append(Entry(Event.KEY_REJECTED, decision="a test"))
        page.wait_for_selector(f"text={lines + 1} lines", timeout=10_000)
        page.click("text=learning curves and clients")
        page.wait_for_selector("#learning .main-svg", timeout=60_000)


def test_a_site_sees_its_curve_and_its_audit_log(browser, federation):
    with served(federation / "nodes" / "south") as address, opened(browser, address) as page:
        assert page.locator("h1").inner_text() == "Node south"
        assert page.locator("svg.chart polyline").count() == 2
        assert "the chain of hashes is complete" in page.locator("main").inner_text()
        assert "reply sent in round 3" in page.locator(".log").inner_text()
        assert "north" not in page.locator("body").inner_text()


def test_a_browser_logs_in_over_tls(browser, tmp_path):
    from axe_playwright_python.sync_playwright import Axe

    write_run(tmp_path / "run")
    make_authority(tmp_path, "test")
    make_server_certificate(tmp_path, tmp_path, ("localhost",))
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "password").chmod(0o600)
    files = ["--tls-cert", str(tmp_path / "server.crt"), "--tls-key", str(tmp_path / "server.key")]
    with served(tmp_path, *files, "--password-file", str(tmp_path / "password")) as address:
        context = browser.new_context(ignore_https_errors=True, bypass_csp=True)
        page = context.new_page()
        page.goto(address)
        assert page.url == f"{address}login"
        assert Axe().run(page).response["violations"] == []
        page.fill("#password", "a wrong password")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The password is wrong.")
        page.fill("#password", PASSWORD)
        page.click("button")
        page.wait_for_selector("html[data-drawn=all]", timeout=60_000)
        assert page.url == address
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Strict")
        assert page.evaluate("document.cookie") == ""
        page.wait_for_selector("text=round 3 of 3")
        page.goto(f"{address}login")
        page.click("text=Log out")
        page.goto(address)
        assert page.url == f"{address}login"
        context.close()
