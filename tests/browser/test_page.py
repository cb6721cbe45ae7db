"""The page in a real browser: `make test-browser`."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fedrema
from fedrema.page.render import write_page
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-browser)")
FIGURES = ("differences", "learning", "clients", "path", "heat", "graph", "peers", "traces", "time", "traffic")
NASTY = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """FedReMa and FedAvg, two seeds each, on six clients; one client's name contains HTML."""
    folder = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    y = generator.integers(0, 4, 240)
    x = generator.normal(size=(240, 6)).astype(np.float32) + y[:, None]
    names = np.array(["north", "south", "east", "west", "centre", NASTY])
    client = names[(y // 2 * 3 + generator.integers(0, 3, 240)) % 6]
    federation = fedrema.Federation.from_arrays(x, y, client)
    for method in ("fedrema", "fedavg"):
        for seed in (0, 1):
            settings = {"rounds": 6, "epochs": 1, "lr": 0.05, "batch": 10, "seed": seed, "record": "relations"}
            fedrema.run(method, federation=federation, out=folder / method / str(seed), **settings)
    write_page([folder], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def opened(browser, report):
    """The report, all of it drawn; a warning or error on the console fails the test."""
    yield from open_page(browser, report.as_uri())


def open_page(browser, address, **how):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True, **how)
    page = context.new_page()
    complaints, asked = [], []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("html[data-drawn=all]", timeout=60_000)
    page.asked = asked
    yield page
    context.close()
    assert complaints == []


def drawn(page, picture):
    """Return the data that Plotly shows in a figure."""
    return json.loads(page.evaluate(f"JSON.stringify(document.querySelector('#{picture} .plot').data)"))


def shapes(page, picture):
    return page.evaluate(f"(document.querySelector('#{picture} .plot').layout.shapes ?? []).length")


def settle(page):
    page.wait_for_selector("html[data-drawn=all]", timeout=60_000)


def follow(page, client):
    page.select_option("#choose-client", label=client)
    settle(page)


def test_the_report_opens_from_a_file_without_network_requests(opened, report):
    assert [address for address in opened.asked if not address.startswith(("data:", "blob:"))] == [report.as_uri()]
    assert opened.title() == "fedrema: FedAvg, FedReMa"
    assert opened.locator("#cards .card").count() == 4
    for picture in FIGURES:
        assert opened.locator(f"#{picture} .main-svg").count() > 0, picture
        assert opened.locator(f"#{picture} .plot").get_attribute("aria-label")
        assert len(opened.locator(f"#{picture} figcaption").inner_text()) > 40
    best = Run(report.parent / "fedrema" / "0").summary["honest_accuracy"]
    other = Run(report.parent / "fedrema" / "1").summary["honest_accuracy"]
    row = opened.locator("#comparison tbody tr", has_text="FedReMa").inner_text()
    assert f"{50 * (best + other):.1f} ±" in row


def test_names_are_shown_as_text(opened):
    follow(opened, NASTY)
    assert opened.locator("main img").count() == 0
    assert NASTY in opened.locator("#path-heading").inner_text()


def test_the_slider_changes_the_heat_map(opened, report):
    last = drawn(opened, "heat")[0]["z"]
    slider = opened.locator("#choose-round")
    slider.focus()
    opened.keyboard.press("Home")
    settle(opened)
    first = drawn(opened, "heat")[0]["z"]
    assert opened.locator("#round-shown").inner_text() == "1 of 6"
    assert slider.get_attribute("aria-valuetext") == "round 1 of 6"
    assert first != last
    relations = RunDirectory(report.parent / "fedrema" / "0").relations()
    assert np.sort(np.ravel(first)) == pytest.approx(np.sort(np.ravel(relations[1]["S"])), abs=1e-4)
    assert np.sort(np.ravel(last)) == pytest.approx(np.sort(np.ravel(relations[6]["S"])), abs=1e-4)


def test_a_selected_client_changes_every_figure(opened, report):
    before = {picture: drawn(opened, picture) for picture in ("learning", "clients", "path", "graph", "peers")}
    follow(opened, "west")
    for picture, data in before.items():
        assert drawn(opened, picture) != data, picture
    assert [shapes(opened, picture) for picture in ("clients", "heat", "peers")] == [1, 2, 1]
    run = Run(report.parent / "fedrema" / "0")
    own = [record.client_accuracy[run.names.index("west")] for record in run.rounds]
    shown = next(trace for trace in drawn(opened, "learning") if trace.get("name") == "client west")
    assert shown["y"] == pytest.approx([100 * value for value in own], abs=0.01)
    assert opened.locator("#announcement").inner_text() == "Client west is highlighted in every figure."
    opened.click("#clear-client")
    settle(opened)
    assert drawn(opened, "clients") == before["clients"]


def test_a_click_in_a_figure_selects_a_client(opened):
    dots = opened.locator("#clients .scatterlayer .point")
    dots.first.scroll_into_view_if_needed()
    box = dots.first.bounding_box()
    opened.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    settle(opened)
    assert opened.locator("#choose-client").input_value() != ""


def test_another_run_can_be_shown(opened):
    opened.select_option("#choose-run", label="FedAvg, seed 1")
    settle(opened)
    assert "FedAvg, seed 1" in opened.locator("#clients figcaption").inner_text()
    assert (
        "This method reports neither peers nor another quantity for each client."
        in opened.locator("#peers .plot").inner_text()
    )


@pytest.mark.parametrize("picture", ["learning", "heat", "graph"])
def test_figures_and_tables_can_be_saved(opened, tmp_path, picture):
    signs = {"PNG": b"\x89PNG", "SVG": b"<svg", "CSV": b""}
    for kind, sign in signs.items():
        with opened.expect_download() as waiting:
            opened.locator(f"#{picture} .exports button", has_text=kind).click()
        file = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(file)
        assert file.name == f"fedrema-{picture}.{kind.lower()}"
        assert file.read_bytes().startswith(sign)
        assert file.stat().st_size > 150


def test_a_saved_table_contains_the_numbers(opened, report, tmp_path):
    with opened.expect_download() as waiting:
        opened.locator("#comparison .exports button", has_text="CSV").click()
    waiting.value.save_as(tmp_path / "table.csv")
    rows = [line.split(",") for line in (tmp_path / "table.csv").read_text().splitlines()]
    found = dict(zip(rows[0], next(row for row in rows if row[0] == "FedReMa"), strict=True))
    both = [Run(report.parent / "fedrema" / seed).summary["best_accuracy"] for seed in "01"]
    assert float(found["best_accuracy"]) == pytest.approx(np.mean(both))


@pytest.fixture(scope="module")
def own_report(tmp_path_factory):
    """A user's own method, which declares a trace, a period and weights between clients."""
    folder = tmp_path_factory.mktemp("own")
    settings = {"rounds": 9, "clients": 6, "samples": 20, "epochs": 1, "record": "relations", "record_every": 1}
    fedrema.run("tests.page.own_method:Neighbours", out=folder / "run", **settings)
    write_page([folder], folder / "report.html")
    return folder / "report.html"


def test_the_page_of_an_own_method_shows_what_it_declares(browser, own_report):
    for page in open_page(browser, own_report.as_uri()):
        assert "their weights in its model" in page.locator("#graph figcaption").inner_text()
        assert page.locator("#choose-matrix option").all_inner_texts() == [
            "Similarity of classifiers",
            "Weights of models",
        ]
        page.select_option("#choose-matrix", label="Weights of models")
        settle(page)
        weights = RunDirectory(own_report.parent / "run").relations()[9]["weights"]
        assert np.sort(np.ravel(drawn(page, "heat")[0]["z"])) == pytest.approx(np.sort(np.ravel(weights)), abs=1e-4)
        assert drawn(page, "traces")[0]["y"] == pytest.approx([100 / (1 + number / 4) for number in range(1, 10)])
        assert "least = 0.4" in page.locator("#traces .plot").inner_text()
        assert page.locator("#traces-heading").inner_text() == "End of the solo phase of Neighbours"
        assert "Dotted: end of the solo phase." in page.locator("#learning figcaption").inner_text()
        assert shapes(page, "learning") == 1
        assert "Length of the solo phase\n5 rounds" in page.locator("#cards").inner_text()
        assert page.locator("#peers-heading").inner_text() == "Number of peers of each client"
        assert set(np.ravel(drawn(page, "peers")[0]["z"])) == {3}
        follow(page, "2")
        assert page.locator("#peers-heading").inner_text() == "Peers of client 2"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_violation(browser, report, scheme):
    from axe_playwright_python.sync_playwright import Axe

    for page in open_page(browser, report.as_uri(), color_scheme=scheme, bypass_csp=True):
        follow(page, "west")
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_a_phone_shows_everything_without_scrolling_sideways(browser, report):
    context = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=all]", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('.panel')].filter((one) => one.getBoundingClientRect().right > 391).length"
    assert page.evaluate(wide) == 0
    context.close()


@contextlib.contextmanager
def started(*arguments, **how):
    """Run fedrema in another process, which is killed afterwards."""
    with subprocess.Popen([sys.executable, "-m", "fedrema", *arguments], **how) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(page, condition, seconds):
    """Return how long it took until a JavaScript expression was true."""
    begun = time.monotonic()
    while not page.evaluate(condition):
        assert time.monotonic() - begun < seconds, condition
        page.wait_for_timeout(50)
    return time.monotonic() - begun


def test_live_rounds_arrive_and_a_killed_run_is_shown_as_stopped(browser, tmp_path):
    page = browser.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    watch = ["watch", str(tmp_path), "--port", "0"]
    quick = ["--rounds", "4000", "--clients", "4", "--samples", "20", "--epochs", "1", "--quiet"]
    command = ["run", "fedrema", *quick, "--out", str(tmp_path / "run")]
    with started(*watch, stdout=subprocess.PIPE, text=True) as server:
        page.goto(server.stdout.readline().split()[2])
        assert page.locator("#waiting").is_visible()
        with started(*command):
            page.wait_for_selector(".state.running", timeout=120_000)
            for _ in range(3):
                reached = len(RunDirectory(tmp_path / "run").rounds())
                assert wait_until(page, f"document.querySelector('#progress progress').value >= {reached}", 30) < 2
            page.wait_for_selector("#learning .main-svg", timeout=30_000)
        page.wait_for_selector(".state.stopped", timeout=10_000)
        assert "continue it with fedrema resume" in page.locator("#progress").inner_text()
    page.wait_for_selector(".state.lost", timeout=10_000)
    page.close()
    assert complaints == []


@pytest.mark.parametrize("script", ["tools/make_screenshots.py", "benchmarks/check_page.py"])
def test_the_scripts_of_the_docs_run(browser, script, tmp_path):
    file = Path(fedrema.__file__).parents[2] / script
    subprocess.run([sys.executable, file, "--quick"], cwd=tmp_path, check=True, timeout=300)
