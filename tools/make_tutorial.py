"""Make the table and the figures of docs/tutorial.md by running its commands: `python tools/make_tutorial.py`."""

import csv
import io
import os
import re
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from make_figures import DOCS, FIGURES, fill
from matplotlib import pyplot

from fedrema.cli import main
from fedrema.reporting.curves import draw_curves
from fedrema.reporting.tables import comparison_markdown
from fedrema.runs.directory import find_runs
from fedrema.runs.run import Run

PAGE = DOCS / "tutorial.md"
COMMAND = re.compile(r"^fedrema ((?:.*\\\n)*.*)$", re.M)


def make() -> None:
    """Run the tutorial up to the verdict; fill in what it printed and draw its figures."""
    run, verdict, linear = (command for command in commands() if command[0] in ("run", "verdict"))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        main(["data", "--csv", "nlschools"])
        main(run)
        runs = [Run(path) for path in find_runs([Path("runs")])]
        fill(PAGE, "table", comparison_markdown(runs))
        draw_curves(runs, FIGURES / "tutorial-curves.png")
        shown = printed_by(verdict)
        fill(PAGE, "verdict", quoted(r"FedReMa compared with", shown))
        fill(PAGE, "warning", quoted(r"Warning: Local", shown))
        fill(PAGE, "linear", quoted(r"FedReMa compared with", printed_by(linear)))
        draw_gains(Path("gains.csv"), FIGURES / "tutorial-gains.png")


def printed_by(command: list[str]) -> str:
    """Run a command and return what it prints."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with redirect_stdout(printed):
        main(command)
    return printed.getvalue()


def quoted(start: str, printed: str) -> str:
    """Return the paragraph that starts with some words as a quotation."""
    found = re.search(rf"^{start}.*?(?=\n\n|\nGains:|\Z)", printed, re.S | re.M)
    assert found is not None
    return "> " + " ".join(found[0].split())


def commands() -> list[list[str]]:
    """Return the commands of the page."""
    return [found[1].replace("\\\n", " ").split() for found in COMMAND.finditer(PAGE.read_text())]


def draw_gains(table: Path, file: Path) -> None:
    """Draw the gain of each client that has an interval."""
    with table.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["low"]]
    rows.sort(key=lambda row: float(row["gain"]))
    colours = {"gain": "#009E73", "loss": "#D55E00", "no difference shown": "#999999"}
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for place, row in enumerate(rows):
        axes.plot(
            [place, place],
            [float(row["low"]), float(row["high"])],
            color=colours[row["conclusion"]],
            lw=1.5,
            solid_capstyle="butt",
        )
        axes.plot(place, float(row["gain"]), "o", color=colours[row["conclusion"]], ms=3.5)
    for conclusion, colour in colours.items():
        count = sum(row["conclusion"] == conclusion for row in rows)
        axes.plot([], [], "o-", color=colour, ms=3.5, label=f"{conclusion} ({count})")
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks([])
    axes.set_xlabel(f"{len(rows)} school classes with at least ten test samples")
    axes.set_ylabel("RMSE of Local − RMSE of FedReMa")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    make()
