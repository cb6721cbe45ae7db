"""The documentation site in a real browser: built strictly, accessible, without requests to other hosts."""

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedrema.core.similarity import maximum_difference_segmentation

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-browser)")
ROOT = Path(__file__).parents[2]
PAGES = (
    "index",
    "how-fedrema-works",
    "reference/python/methods",
    "reference/cli",
    "tutorials/own-method",
    "leaderboard",
    "architecture",
    "source/src/fedrema/methods/fedrema.py",
    "search",
)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FIGURES = "how-fedrema-works"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without logging requests."""

    def log_message(self, *arguments):
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built as by `make docs`."""
    built = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", "tools/site"]
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *options,
        "--doctree-dir",
        str(built / "trees"),
        "docs",
        str(built / "html"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    handler = functools.partial(Quiet, directory=built / "html")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser, site):
    """A function that opens a page; a message on the console or a request to another host fails the test."""
    contexts, complaints, asked = [], [], []

    def open_page(name, **how):
        context = browser.new_context(**{"viewport": DESKTOP, **how})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{site}{name}.html", wait_until="load")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [address for address in asked if not address.startswith((site, "data:"))] == []


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible_in_both_modes_and_on_a_phone(opened, name, scheme, viewport):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(name, color_scheme=scheme, viewport=viewport)
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(background[4:-1].split(",")[0]) > 128) == (scheme == "light")


def test_the_search_finds_pages_and_public_names(opened):
    page = opened("index")
    page.fill("input[name=q]", "personal_model")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a >> text=fedrema.Run.personal_model", timeout=20_000)
    page.fill("input[name=q]", "dirichlet")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a >> text=Partition a dataset", timeout=20_000)


def test_the_mode_can_be_changed_by_hand(opened):
    page = opened("index", color_scheme="light")
    page.locator(".theme-toggle:visible").first.click()
    assert page.evaluate("document.body.dataset.theme") == "dark"


def test_the_figures_choose_the_same_peers_as_fedrema(opened, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_explainer

    data = make_explainer.json.loads(make_explainer.DATA.read_text())
    page = opened(FIGURES)
    page.wait_for_selector("#fedrema-figures[data-drawn=all]")
    for number in (1, 13, len(data["rounds"])):
        chosen, gaps = maximum_difference_segmentation(make_explainer.similarities(data, number))
        shown = page.evaluate(f"window.fedremaSteps[{number - 1}].cuts.map((cut) => [[...cut.chosen], cut.gap])")
        for row, (peers, gap) in enumerate(shown):
            assert sorted(peers) == chosen[row].nonzero().flatten().tolist()
            assert gap == pytest.approx(gaps[row].item(), abs=1e-9)


def test_the_sliders_show_a_round_and_the_end_of_the_period(opened):
    page = opened(FIGURES)
    said = page.locator("#fedrema-figures p[role=status]")
    assert said.nth(1).inner_text().endswith("With δ = 0.50, the critical period ends after round 7.")
    page.focus("#figure-round")
    page.keyboard.press("ArrowRight")
    assert said.nth(0).inner_text().startswith("Round 2, client 0: the largest gap is ")
    page.select_option("#figure-client", "5")
    assert said.nth(0).inner_text().startswith("Round 2, client 5: ")
    page.focus("#figure-delta")
    page.keyboard.press("Home")
    assert said.nth(1).inner_text().endswith("the critical period does not end in 40 rounds.")


def test_nothing_moves_by_itself_and_playing_is_not_offered_with_reduced_motion(opened):
    page = opened(FIGURES, reduced_motion="reduce")
    assert not page.get_by_role("button", name="Play").is_visible()
    page = opened(FIGURES)
    said = page.locator("#fedrema-figures p[role=status]").first
    first = said.inner_text()
    page.wait_for_timeout(1_500)
    assert said.inner_text() == first
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.getElementById('figure-round').value > 2", timeout=10_000)
    page.get_by_role("button", name="Pause").click()
