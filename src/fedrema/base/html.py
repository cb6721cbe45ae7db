"""HTML of objects in notebooks: all text is escaped, and colours are those of the notebook, light or dark."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from fedrema.base.terminal import safe


@dataclass(frozen=True)
class Bold:
    """A cell in bold type."""

    text: str


Cell = str | int | Bold


def escaped(text: object) -> str:
    """Return text as HTML; control characters become visible escapes."""
    return html.escape(safe(text))


def paragraph(text: str, small: bool = False) -> str:
    """Return a paragraph."""
    return f'<p style="font-size: 0.85em">{escaped(text)}</p>' if small else f"<p>{escaped(text)}</p>"


def title_line(title: str, rest: str = "") -> str:
    """Return a line with a title in bold type."""
    return f"<p><strong>{escaped(title)}</strong>{escaped(f' {rest}' if rest else '')}</p>"


def html_table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], texts: int = 1) -> str:
    """Return a table: the first `texts` columns are left-aligned, the others hold numbers."""
    first = _row("th", headings, texts)
    body = "".join(_row("td", row, texts) for row in rows)
    return f'<table style="border-collapse: collapse"><thead>{first}</thead><tbody>{body}</tbody></table>'


def _row(tag: str, cells: Sequence[Cell], texts: int) -> str:
    found = (_cell(tag, cell, "left" if at < texts else "right") for at, cell in enumerate(cells))
    return f"<tr>{''.join(found)}</tr>"


def _cell(tag: str, cell: Cell, side: str) -> str:
    text = f"<strong>{escaped(cell.text)}</strong>" if isinstance(cell, Bold) else escaped(cell)
    return f'<{tag} style="text-align: {side}; padding: 0.2em 0.8em">{text}</{tag}>'
