"""Write the tables of tasks and metrics in docs/tasks.md; `make figures` calls it."""

import re
from pathlib import Path

from make_figures import fill

from fedrema.reporting.tables import markdown_lines
from fedrema.tasks import METRICS, TASKS, Task

PAGE = Path(__file__).parents[1] / "docs" / "tasks.md"


def tasks() -> str:
    """Return a table of tasks: the rows of `Task`'s docstring, with the metrics that are always recorded."""
    rows = []
    for line in re.findall(r"^ *\| (.*) \|$", Task.__doc__ or "", re.M)[1:]:
        names, *cells = line.split(" | ")
        for name in names.split(", "):
            metrics = ", ".join(f"`{metric}`" for metric in Task(name, 2).usual)
            rows.append((f"`{name}`", *cells, metrics))
    if [row[0] for row in rows] != [f"`{name}`" for name in TASKS]:
        raise SystemExit("The docstring of Task does not list every task.")
    return "\n".join(markdown_lines(("task", "target", "outputs", "loss", "metrics"), rows, texts=5))


def metrics() -> str:
    """Return a table of metrics: names, meanings, directions and tasks."""
    rows = [
        (
            f"`{metric.name}`",
            metric.title,
            metric.description,
            "higher" if metric.higher_is_better else "lower",
            ", ".join(name for name in TASKS if name in metric.tasks),
        )
        for metric in METRICS.values()
    ]
    return "\n".join(markdown_lines(("name", "title", "meaning", "better", "tasks"), rows, texts=5))


if __name__ == "__main__":
    fill(PAGE, "tasks", tasks())
    fill(PAGE, "metrics", metrics())
