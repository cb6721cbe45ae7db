"""Write the tables of docs/reproduction.md and docs/results.md, and all of results/paper, anew: `make results`.

Nothing is trained: results/paper/cells holds what was, and results/paper/README.md by which commands.
"""

import csv
import re
from pathlib import Path

from draw_ranking import draw_ranking
from make_figures import DOCS, fill

from fedrema.cli import main
from fedrema.cli.reproduce import NAMES
from fedrema.grid.table import MISSING
from fedrema.report.compare import markdown_lines

RESULTS = DOCS.parent / "results" / "paper"
PAGE = DOCS / "reproduction.md"


def table(text: str) -> str:
    """Return the first table of a Markdown text."""
    found = re.search(r"(^\|.*\n)+", text, flags=re.M)
    return found[0].rstrip("\n") if found else ""


def section(file: Path, heading: str) -> str:
    """Return what stands below a heading of a Markdown file, up to the next one."""
    found = re.search(rf"^{heading}\n(.*?)(?=^#|\Z)", file.read_text(), flags=re.S | re.M)
    return found[1] if found else ""


def ranking(file: Path) -> str:
    """Draw and return a table file's rows, by honest accuracy; rows of other rounds than the rest come last."""
    with file.open(newline="") as opened:
        found = [row for row in csv.DictReader(opened) if row["honest"] != MISSING]
    scores = [(row["method"], float(row["honest"]), float(row["final"])) for row in found]
    draw_ranking(scores, DOCS / "figures" / "results.png", ("FedReMa",))
    ranked = sorted(found, key=lambda row: (" rounds" in row["method"], -float(row["honest"])))
    columns = ("method", "honest", "best (peeks)", "final", "seconds")
    rows = [
        ("–" if " rounds" in row["method"] else str(place), *(row[name] for name in columns))
        for place, row in enumerate(ranked, 1)
    ]
    return "\n".join(markdown_lines(("place", *columns), rows, texts=2))


def by_columns(file: Path, quantities: tuple[str, ...] = ("honest", "final")) -> str:
    """Return a table file with a line per method and a column per kind of data: means over seeds, and how many.

    What has not been run is left out.
    """
    with file.open(newline="") as opened:
        found = [row for row in csv.DictReader(opened) if row["seeds"] != "0"]
    columns = list(dict.fromkeys(row["data"] for row in found))
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        own = {row["data"]: row for row in found if row["method"] == method}
        seeds = sorted({row["seeds"] for row in own.values()})
        cells = [
            " / ".join(own[column][each].split(" ±")[0] for each in quantities) if column in own else MISSING
            for column in columns
        ]
        rows.append((method, "–".join(seeds), *cells))
    return "\n".join(markdown_lines(("method", "seeds", *columns), rows, texts=1))


def make_beyond() -> None:
    """Write the tables of docs/beyond.md and of results/beyond."""
    for file in sorted((DOCS / "beyond").glob("*.toml")):
        out = RESULTS.parent / "beyond" / file.stem
        if (out / "cells").is_dir():
            main(["grid", str(file), "--minutes", "0", "--quiet", "--out", str(out)])
        fill(DOCS / "beyond.md", file.stem, by_columns(out / f"{file.stem}.csv") if out.is_dir() else "Not run yet.")


def make() -> None:
    """Write everything."""
    main(["reproduce", "all", "methods", "--minutes", "0", "--quiet", "--out", str(RESULTS)])
    for name in NAMES:
        page = RESULTS / f"{name}.md"
        if f"<!-- {name} -->" in PAGE.read_text():
            fill(PAGE, name, table(page.read_text()) if page.is_file() else "Not run yet.")
    lines = ["| claim | verdict | evidence |", "|---|---|---|"]
    for name in NAMES:
        if (RESULTS / f"{name}.md").is_file():
            lines += table(section(RESULTS / f"{name}.md", "### Claims")).splitlines()[2:]
    fill(PAGE, "verdicts", "\n".join(lines))
    fill(PAGE, "state", table((RESULTS / "README.md").read_text()).replace("](", "](../results/paper/"))
    fill(DOCS / "results.md", "ranking", ranking(RESULTS / "methods.csv"))
    fill(PAGE, "commands", section(RESULTS / "README.md", "## Commands").strip())


if __name__ == "__main__":
    make()
    make_beyond()
