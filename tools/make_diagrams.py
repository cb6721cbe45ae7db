"""Draw the Mermaid diagrams of the docs as SVG, for the site: `python tools/make_diagrams.py`.

Code hosts draw the diagrams themselves. The site shows files from docs/figures/diagrams/, which are named after the
content of the diagram, so that its pages need no 3 MB of JavaScript. Needs npm, the extra `browser` and Chromium.
"""

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

from fedrema.page.browser import chromium

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "figures" / "diagrams"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.S | re.M)
STYLE = re.compile(r"<style>.*?</style>", re.S)
VERSION = "11.17.2"
OPTIONS = "{startOnLoad: false, htmlLabels: false, flowchart: {htmlLabels: false, useMaxWidth: true}, theme: 'neutral'}"


def name_of(diagram: str) -> str:
    """Return the name of the file that shows a diagram."""
    return f"{hashlib.sha256(diagram.strip().encode()).hexdigest()[:16]}.svg"


def diagrams() -> dict[str, str]:
    """Return the diagrams of all pages by the names of their files."""
    return {name_of(text): text for page in DOCS.rglob("*.md") for text in DIAGRAM.findall(page.read_text())}


def make() -> None:
    """Draw all diagrams, and remove those of earlier versions."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, f"mermaid@{VERSION}"], check=True)
        page = browser.new_page()
        page.add_script_tag(path=f"{folder}/node_modules/mermaid/dist/mermaid.min.js")
        page.evaluate(f"mermaid.initialize({OPTIONS})")
        drawn = {
            name: page.evaluate("async ([id, text]) => (await mermaid.render(id, text)).svg", [f"d{name[:8]}", text])
            for name, text in diagrams().items()
        }
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for name, svg in drawn.items():
        (FOLDER / name).write_text(STYLE.sub("", svg) + "\n")  # the site's style sheet also covers the dark mode


if __name__ == "__main__":
    make()
