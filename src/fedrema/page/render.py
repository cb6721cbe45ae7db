"""Writes the document as one HTML file that includes styles, scripts, Plotly and data, and needs no network."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Literal

from fedrema.base.files import write_text
from fedrema.page.clients import ClientsPart, clients_part
from fedrema.page.document import MainPart, in_order, main_part
from fedrema.page.reading import DownsampledRun
from fedrema.page.relations import RelationsPart, relations_part
from fedrema.page.verdict import VerdictPart, verdict_part
from fedrema.runs.directory import find_runs

SCRIPTS = (
    "base.js", "charts.js", "headline.js", "verdict.js", "learning.js", "clients.js", "path.js", "relations.js",
    "graph.js", "peers.js", "traces.js", "cost.js", "settings.js", "live.js", "main.js",
)  # fmt: skip
"""In the order in which they depend on each other."""

PartName = Literal["main", "clients", "relations", "verdict"]
Part = MainPart | ClientsPart | RelationsPart | VerdictPart
"""A part of the document; parts are updated separately."""


def write_page(folders: Sequence[Path], path: Path) -> None:
    """Write the page about all runs in the folders and below them."""
    runs = in_order([DownsampledRun(folder) for folder in find_runs(folders)])
    parts: dict[PartName, Part] = {
        "main": main_part(runs),
        "clients": clients_part(runs),
        "relations": relations_part(runs),
        "verdict": verdict_part(runs),
    }
    write_text(path, page(parts))


def page(parts: Mapping[PartName, Part]) -> str:
    """Return the page as HTML."""
    assets = resources.files("fedrema.page") / "assets"
    # The bundle with the kinds of charts that the page has: a third of the size of the whole of Plotly.
    plotly = resources.files("fedrema.page") / "plotly" / "plotly-cartesian.min.js"
    scripts = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        style=(assets / "page.css").read_text(encoding="utf-8"),
        plotly=plotly.read_text(encoding="utf-8").replace("</script", "<\\/script"),
        script=f"(() => {{\n'use strict';\n{scripts}\n}})();",
        data="\n".join(
            f'<script type="application/json" id="part-{name}">{as_text(part)}</script>' for name, part in parts.items()
        ),
    )


def as_text(part: object) -> str:
    """Return JSON that is safe inside a script element, for any client names."""
    text = json.dumps(part, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
