"""Makes one HTML file of a document: styles, scripts, Plotly and data inside, so that it needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fedrema.base.files import write_text
from fedrema.page.clients import people_part
from fedrema.page.document import main_part, order
from fedrema.page.reading import ThinnedRun
from fedrema.page.relations import relations_part
from fedrema.runs.directory import find_runs

SCRIPTS = (
    "base.js", "charts.js", "headline.js", "learning.js", "clients.js", "path.js", "relations.js", "graph.js",
    "sets.js", "period.js", "cost.js", "settings.js", "live.js", "main.js",
)  # fmt: skip
"""In the order in which they build on each other."""


def write_page(folders: Sequence[Path], path: Path) -> None:
    """Write the page about all runs among and below the folders."""
    runs = order([ThinnedRun(folder) for folder in find_runs(folders)])
    parts = {"main": main_part(runs), "people": people_part(runs), "relations": relations_part(runs)}
    write_text(path, page(parts))


def page(parts: dict[str, Any]) -> str:
    """Return the page as text."""
    assets = resources.files("fedrema.page") / "assets"
    # The file alone: importing plotly takes half a second.
    plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
    scripts = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        style=(assets / "page.css").read_text(encoding="utf-8"),
        plotly=plotly.read_text(encoding="utf-8").replace("</script", "<\\/script"),
        script=f"(() => {{\n'use strict';\n{scripts}\n}})();",
        data="\n".join(
            f'<script type="application/json" id="part-{name}">{as_text(part)}</script>' for name, part in parts.items()
        ),
    )


def as_text(part: Any) -> str:
    """Return JSON that may stand inside a script element, whatever names clients have."""
    text = json.dumps(part, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
