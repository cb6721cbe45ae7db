"""Write a page per method, the index of methods, and the tables of accuracies and times; `make figures` calls it.

Pages consist of the docstrings and settings of the methods, and of results of all methods on digits with three seeds:

    python tools/make_methods.py            # first runs `fedrema run all --seeds 3`; four minutes on two cores
    python tools/make_methods.py FOLDER     # uses the finished runs in a folder
    python tools/make_methods.py --text     # rewrites the text only, without results
"""

import inspect
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from draw_ranking import draw_ranking

from fedrema.base.options import field_documentation, valid_choices
from fedrema.cli import main
from fedrema.cli.methods import supported_tasks
from fedrema.core import Method
from fedrema.methods import registry
from fedrema.reporting.curves import draw_curves
from fedrema.reporting.groups import group_runs
from fedrema.reporting.tables import comparison_markdown, markdown_lines
from fedrema.runs.directory import find_runs
from fedrema.runs.run import Run

DOCS = Path(__file__).parents[1] / "docs"
PAGES, FIGURES = DOCS / "methods", DOCS / "figures" / "methods"
BESIDE = ("fedavg", "local")
"""Methods whose curves are drawn in every figure for comparison."""


def about(kind: type[Method]) -> str:
    """Return the part of a method's page that needs no results: title, paper, docstring and settings."""
    source = Path(inspect.getfile(kind)).name
    lines = [
        f"# {kind.title}",
        "",
        f"{kind.paper}. Source: [`{source}`](../../src/fedrema/methods/{source}); [all methods](../methods.md).",
        "",
        "```bash",
        f"fedrema run {kind.name}",
        "```",
        "",
    ]
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        lines += [*escaped(paragraph.splitlines()), ""]
    settings = field_documentation(kind)
    if not settings:
        return "\n".join([*lines, "The method has no settings of its own.", ""])
    rows = [
        (f"`--{name}`", str(default), *escaped([meaning + valid_choices(kind, name)]))
        for name, (default, meaning) in settings.items()
    ]
    return "\n".join([*lines, *markdown_lines(("setting", "default", "meaning"), rows, texts=3), ""])


def escaped(lines: Iterable[str]) -> list[str]:
    """Return lines with Markdown's special characters escaped."""
    found = []
    for line in lines:
        parts = line.split("`")  # code between backticks is not escaped
        for place in range(0, len(parts), 2):
            for sign in "*_|<":
                parts[place] = parts[place].replace(sign, f"\\{sign}")
        found.append("`".join(parts))
    return found


def index() -> str:
    """Return a table of all methods: link to the page, name, supported tasks, first sentence of the docstring."""
    rows = []
    for name, kind in registry().items():
        first = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
        link = f"[{kind.title}](methods/{page_name(name)})"
        rows.append((link, f"`{name}`", supported_tasks(kind), *escaped([first])))
    return "\n".join(markdown_lines(("method", "name", "tasks", "summary"), rows, texts=4))


def page_name(name: str) -> str:
    """Return the file name of a method's page."""
    return f"{name.replace('+', '-plus')}.md"


def on_digits(name: str, runs: list[Run]) -> str:
    """Draw a method's accuracy curve, and return the section of its page that shows it."""
    shown = [run for run in runs if run.method == name or run.method in BESIDE]
    draw_curves(shown, FIGURES / figure_name(name), size=(6.0, 3.4), dots_per_inch=90)
    (group,) = (group for group in group_runs(shown) if group.method == name)
    return digits_section(name, len(group.runs), max(run.settings["rounds"] for run in group.runs))


def figure_name(name: str) -> str:
    """Return the file name of a method's figure."""
    return f"{Path(page_name(name)).stem}.png"


def digits_section(name: str, seeds: int, rounds: int) -> str:
    """Return the section of a page about the results on digits."""
    return "\n".join(
        [
            "## On digits",
            "",
            f"{seeds} training seed{'s' if seeds > 1 else ''}, {rounds} rounds, the default settings of the method and"
            " of digits, compared with FedAvg and Local. Nothing was tuned and digits is an easy dataset: the figure"
            " shows that the method learns, not how good it is.",
            "",
            f"![Accuracy over rounds of {registry()[name].title} on digits](../figures/methods/{figure_name(name)})",
            "",
        ]
    )


def make_text() -> None:
    """Rewrite the text of all pages and of the index; figures and the numbers of seeds and rounds stay."""
    from make_figures import fill

    for name, kind in registry().items():
        page = PAGES / page_name(name)
        section = page.read_text().partition("## On digits")[2]
        seeds, rounds = (int(re.search(rf"(\d+) {what}", section)[1]) for what in ("training seed", "rounds"))
        page.write_text(f"{about(kind)}\n{digits_section(name, seeds, rounds)}")
    fill(DOCS / "methods.md", "index", index())


def scores(runs: list[Run]) -> list[tuple[str, float, float]]:
    """Return the title, and the mean honest and final accuracy over seeds in percent, of every method."""
    found = []
    for group in group_runs(runs):
        summaries = [run.summary for run in group.runs]
        means = (
            100 * statistics.mean(summary[which] for summary in summaries)
            for which in ("honest_accuracy", "final_accuracy")
        )
        found.append((registry()[group.method].title, *means))
    return found


def make(folder: Path) -> None:
    """Write pages, figures and tables from the runs in a folder."""
    from make_figures import fill

    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    from time_methods import times_markdown

    PAGES.mkdir(exist_ok=True)
    FIGURES.mkdir(parents=True, exist_ok=True)
    runs = [Run(path) for path in find_runs([folder])]
    for name, kind in registry().items():
        (PAGES / page_name(name)).write_text(f"{about(kind)}\n{on_digits(name, runs)}")
    draw_ranking(scores(runs), DOCS / "figures" / "methods.png", (registry()["fedrema"].title,))
    fill(DOCS / "methods.md", "index", index())
    fill(DOCS / "methods.md", "methods", comparison_markdown(runs))
    fill(DOCS / "methods.md", "times", times_markdown())


if __name__ == "__main__":
    if sys.argv[1:] == ["--text"]:
        make_text()
    elif len(sys.argv) > 1:
        make(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(["run", "all", "--seeds", "3", "--out", f"{made}/all"])
            make(Path(made))
