"""Take the screenshots of the page that README and docs show: `make screenshots`.

Runs the demonstration (or reads the runs in a given folder), writes the report and opens it in Chromium.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from fedrema.cli import main
from fedrema.page.browser import chromium
from fedrema.page.render import write_page

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
MARGIN = 16
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
VIEWS: list[tuple[str, str, dict[str, Any]]] = [
    # file, CSS selector, and how the page is opened
    ("page", "section[aria-labelledby=heading-relations]", {}),
    ("page-result", "section[aria-labelledby=heading-result]", {}),
    ("page-learning", "section[aria-labelledby=heading-learning]", {}),
    ("page-clients", "section[aria-labelledby=heading-clients]", {"client": "7"}),
    ("page-dark", "section[aria-labelledby=heading-relations]", {"scheme": "dark", "client": "7"}),
    ("page-phone", "", {"viewport": PHONE}),
]


def take(report: Path, figures: Path) -> None:
    """Take all screenshots."""
    with chromium() as browser:
        for name, part, how in VIEWS:
            context = browser.new_context(
                viewport=how.get("viewport", DESKTOP), color_scheme=how.get("scheme", "light"), reduced_motion="reduce"
            )
            page = context.new_page()
            page.goto(report.resolve().as_uri())
            page.wait_for_selector("html[data-drawn=all]", timeout=60_000)
            if "client" in how:
                page.select_option("#choose-client", label=how["client"])
                page.wait_for_selector("html[data-drawn=all]", timeout=60_000)
            # The sticky bar would cover a part of the screenshot.
            page.add_style_tag(content="body > .bar { position: static; }")
            around = {"clip": _around(page.locator(part).bounding_box()), "full_page": True} if part else {}
            page.screenshot(path=figures / f"{name}.png", **around)
            context.close()


def _around(box: dict[str, float]) -> dict[str, float]:
    wider = {"x": box["x"] - MARGIN, "width": box["width"] + 2 * MARGIN}
    return {**wider, "y": box["y"] - MARGIN, "height": box["height"] + 2 * MARGIN}


def make(runs: Path | None, quick: bool) -> None:
    """Run the demonstration unless runs are given, and take the screenshots."""
    with tempfile.TemporaryDirectory() as folder:
        if runs is None:
            runs = Path(folder) / "demo"
            few = ["--seeds", "1", "--rounds", "2"] if quick else []
            main(["run", *few, "--out", str(runs)])
        report = Path(folder) / "report.html"
        write_page([runs], report)
        figures = Path(folder) if quick else FIGURES
        figures.mkdir(exist_ok=True)
        take(report, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?", help="folder of finished runs; default: the demonstration is run")
    parser.add_argument("--quick", action="store_true", help="run two rounds and keep nothing")
    asked = parser.parse_args()
    make(asked.runs, asked.quick)
