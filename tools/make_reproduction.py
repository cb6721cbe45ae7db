"""Rewrite the tables of docs/reproduction.md and docs/results.md, and all of results/paper: `make results`.

Nothing is trained: the tables in results/paper/runs and results/fedfa/runs hold the finished runs;
results/paper/README.md and docs/results.md list the commands.
"""

import csv
import re
from pathlib import Path

from draw_ranking import draw_ranking
from make_figures import DOCS, fill

from fedrema.cli import main
from fedrema.cli.reproduce import NAMES
from fedrema.experiments.table import ABOUT_OUTDATED, MISSING, OUTDATED
from fedrema.reporting.tables import markdown_lines

RESULTS = DOCS.parent / "results" / "paper"
PAGE = DOCS / "reproduction.md"


def table(text: str) -> str:
    """Return the first table of a Markdown text."""
    found = re.search(r"(^\|.*\n)+", text, flags=re.M)
    return found[0].rstrip("\n") if found else ""


def section(file: Path, heading: str) -> str:
    """Return the text below a heading of a Markdown file, up to the next heading."""
    found = re.search(rf"^{heading}\n(.*?)(?=^#|\Z)", file.read_text(), flags=re.S | re.M)
    return found[1] if found else ""


def noted(shown: str) -> str:
    """Return a table with a note on outdated runs below it, if it has any."""
    return f"{shown}\n\n{ABOUT_OUTDATED.strip()}" if OUTDATED in shown else shown


def number(text: str) -> float:
    """Return an accuracy without the mark of outdated runs."""
    return float(text.rstrip(OUTDATED))


def ranking(file: Path) -> str:
    """Draw and return a table file's rows, by honest accuracy; rows of other rounds than the rest come last."""
    with file.open(newline="") as opened:
        found = [row for row in csv.DictReader(opened) if row["honest"] != MISSING]
    scores = [(row["method"], number(row["honest"]), number(row["final"])) for row in found]
    draw_ranking(scores, DOCS / "figures" / "results.png", ("FedReMa",))
    ranked = sorted(found, key=lambda row: (" rounds" in row["method"], -number(row["honest"])))
    columns = ("method", "honest", "best (peeks)", "final", "seconds")
    rows = [
        ("–" if " rounds" in row["method"] else str(place), *(row[name] for name in columns))
        for place, row in enumerate(ranked, 1)
    ]
    return noted("\n".join(markdown_lines(("place", *columns), rows, texts=2)))


def planned(text: str) -> str:
    """Return the first table of the plan of missing runs, which has a line per experiment, and the total below it."""
    total = next((line for line in text.splitlines() if line and not line.startswith("|")), "")
    return f"{table(text.partition(total)[0])}\n\n{total}"


def make() -> None:
    """Write everything."""
    main(["reproduce", "all", "methods", "--minutes", "0", "--quiet", "--out", str(RESULTS)])
    for name in NAMES:
        page = RESULTS / f"{name}.md"
        if f"<!-- {name} -->" in PAGE.read_text():
            fill(PAGE, name, noted(table(page.read_text())) if page.is_file() else "Not run yet.")
    lines = ["| claim | verdict | evidence |", "|---|---|---|"]
    for name in NAMES:
        if (RESULTS / f"{name}.md").is_file():
            lines += table(section(RESULTS / f"{name}.md", "### Claims")).splitlines()[2:]
    fill(PAGE, "verdicts", noted("\n".join(lines)))
    fill(PAGE, "state", table((RESULTS / "README.md").read_text()).replace("](", "](../results/paper/"))
    fill(DOCS / "results.md", "ranking", ranking(RESULTS / "methods.csv"))
    anchors = RESULTS.parent / "fedfa"
    main(
        [
            "grid",
            str(DOCS.parent / "research" / "fedfa" / "fedfa.toml"),
            "--minutes",
            "0",
            "--quiet",
            "--out",
            str(anchors),
        ]
    )
    fill(DOCS / "results.md", "fedfa", noted(table((anchors / "fedfa.md").read_text())))
    fill(PAGE, "commands", section(RESULTS / "README.md", "## Commands").strip())
    fill(PAGE, "plan", planned(section(RESULTS / "README.md", "## Missing runs")))
    few = RESULTS.parent / "few-samples"
    for name in ("collapse", "reset", "partitions", "batches", "fedprox"):
        grid = DOCS.parent / "research" / "few_samples" / f"{name}.toml"
        main(["grid", str(grid), "--minutes", "0", "--quiet", "--out", str(few)])
        fill(PAGE, name, noted(table((few / f"{name}.md").read_text())))


if __name__ == "__main__":
    make()
