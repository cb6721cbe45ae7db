"""Mermaid diagrams as SVG in the page, from the files that tools/make_diagrams.py writes."""

import html
import sys
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

TOOLS = Path(__file__).parents[1]
sys.path.insert(0, str(TOOLS))

from make_diagrams import FOLDER, name_of  # noqa: E402  # a module of the folder above


class Mermaid(Directive):
    """Show a diagram; its source follows, for those who cannot see it."""

    has_content: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        """Return the diagram as HTML."""
        text = "\n".join(self.content)
        file = FOLDER / name_of(text)
        if not file.exists():
            raise self.error("This diagram has no drawing: run python tools/make_diagrams.py.")
        source = f"<details><summary>The diagram as text</summary><pre>{html.escape(text)}</pre></details>"
        drawing = file.read_text().replace("<svg ", '<svg aria-label="Diagram; its text follows" ', 1)
        return [nodes.raw("", f'<div class="diagram scrolling">{drawing}</div>{source}', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
