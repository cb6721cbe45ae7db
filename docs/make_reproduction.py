"""Write the tables of docs/reproduction.md, and all of results/paper, anew from the finished runs: `make results`.

Nothing is trained: results/paper/cells holds what was, and results/paper/README.md by which commands.
"""

import re
from pathlib import Path

from make_figures import DOCS, fill

from fedrema.cli import main
from fedrema.cli.reproduce import NAMES

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


def make() -> None:
    """Write everything."""
    main(["reproduce", "--minutes", "0", "--quiet", "--out", str(RESULTS)])
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
    fill(PAGE, "commands", section(RESULTS / "README.md", "## Commands").strip())


if __name__ == "__main__":
    make()
