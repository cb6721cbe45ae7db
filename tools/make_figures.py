"""Make the figures and tables of the docs that need only a CPU, except for methods: `make figures`.

Takes a minute on two cores and runs the commands that the docs show. Methods: make_methods.py.
"""

import re
import tempfile
from pathlib import Path

from fedrema.cli import main
from fedrema.reporting.curves import draw_curves
from fedrema.reporting.tables import comparison_markdown
from fedrema.runs.directory import find_runs
from fedrema.runs.run import Run

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = DOCS / "figures"


def fill(file: Path, marker: str, text: str) -> None:
    """Replace the text between <!-- marker --> and <!-- /marker -->."""
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)"
    content, found = re.subn(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", file.read_text(), flags=re.S)
    if not found:
        raise SystemExit(f"{file} has no place marked {marker}.")
    file.write_text(content)


def make() -> None:
    """Run the demonstration and draw its figures."""
    FIGURES.mkdir(exist_ok=True)
    main(["partition", "--plot", str(FIGURES / "federation.png")])
    with tempfile.TemporaryDirectory() as folder:
        main(["run", "--out", f"{folder}/demo"])
        runs = [Run(path) for path in find_runs([Path(folder)])]
        draw_curves(runs, FIGURES / "demo.png")
        fill(DOCS / "tutorials" / "first-run.md", "demo", comparison_markdown(runs))


if __name__ == "__main__":
    make()
