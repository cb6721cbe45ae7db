"""Make a page per method, their index, and the tables of accuracies and times: `make figures` calls it.

Pages come from the methods' own docstrings and settings, and from one run of all methods on digits with three seeds:

    python tools/make_methods.py            # runs `fedrema run all --seeds 3` first, four minutes on two cores
    python tools/make_methods.py FOLDER     # takes finished runs from a folder instead
"""

import inspect
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from draw_ranking import draw_ranking
from time_methods import times_markdown

from fedrema.base.options import field_documentation, valid_choices
from fedrema.cli import main
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
"""Curves that every method's own is drawn beside."""


def about(kind: type[Method]) -> str:
    """Return what a page says of a method that needs no run: name, paper, docstring and settings."""
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
        return "\n".join([*lines, "It has no settings of its own.", ""])
    rows = [
        (f"`--{name}`", str(default), *escaped([meaning + valid_choices(kind, name)]))
        for name, (default, meaning) in settings.items()
    ]
    return "\n".join([*lines, *markdown_lines(("setting", "default", "meaning"), rows, texts=3), ""])


def escaped(lines: Iterable[str]) -> list[str]:
    """Return lines whose stars, bars and underscores mean themselves in Markdown."""
    found = []
    for line in lines:
        parts = line.split("`")  # what stands between backticks is left alone
        for place in range(0, len(parts), 2):
            for sign in "*_|<":
                parts[place] = parts[place].replace(sign, f"\\{sign}")
        found.append("`".join(parts))
    return found


def index() -> str:
    """Return a table of all methods: their pages, and the first sentence of each."""
    rows = []
    for name, kind in registry().items():
        first = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
        rows.append((f"[{kind.title}](methods/{page_name(name)})", f"`{name}`", *escaped([first])))
    return "\n".join(markdown_lines(("method", "name", "in a sentence"), rows, texts=3))


def page_name(name: str) -> str:
    """Return the file of a method's page."""
    return f"{name.replace('+', '-plus')}.md"


def on_digits(name: str, runs: list[Run]) -> str:
    """Draw a method's curve beside others, and return the part of its page that shows it."""
    shown = [run for run in runs if run.method == name or run.method in BESIDE]
    figure = FIGURES / f"{Path(page_name(name)).stem}.png"
    draw_curves(shown, figure, size=(6.0, 3.4), dots_per_inch=90)
    (group,) = (group for group in group_runs(shown) if group.method == name)
    rounds = {run.settings["rounds"] for run in group.runs}
    seeds = len(group.runs)
    return "\n".join(
        [
            "## On digits",
            "",
            f"{seeds} training seed{'s' if seeds > 1 else ''} with the defaults of the method and of digits,"
            f" {max(rounds)} rounds, beside FedAvg and Local. Nothing was tuned, and digits are easy: the curve shows"
            " that it learns, not what it is worth.",
            "",
            f"![Accuracy over rounds of {registry()[name].title} on digits](../figures/methods/{figure.name})",
            "",
        ]
    )


def scores(runs: list[Run]) -> list[tuple[str, float, float]]:
    """Return titles with mean honest and final accuracies over seeds, in percent."""
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
    """Write everything from the runs in a folder."""
    from make_figures import fill

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
    if len(sys.argv) > 1:
        make(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(["run", "all", "--seeds", "3", "--out", f"{made}/all"])
            make(Path(made))
