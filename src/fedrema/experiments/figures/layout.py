"""What all pictures have in common: size, title, caption and how panels are laid out."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2
"""Inches: a column and a half of a paper, and sharp on a screen."""
SMALL = 8.0
"""Points; nothing is written smaller."""
TITLE = 10.5
GREY = "0.35"
_TITLE_LETTERS, _CAPTION_LETTERS = 13.0, 16.0
"""How many letters fit into an inch of title or caption."""
_LINE_SPACING = 1.3


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """Return an empty page, in inches; title and caption will add their own height."""
    # Imported here: it takes half a second that only a picture is worth. Not pyplot, which would keep every figure.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: "Figure", count: int, per_line: int, share_x: bool = True, share_y: bool = True) -> list["Axes"]:
    """Return panels line by line; where they share an axis, its numbers stand at the outer ones only."""
    per_line = min(count, per_line)
    lines = -(-count // per_line)
    grid = figure.subplots(lines, per_line, sharex=share_x, sharey=share_y, squeeze=False).flatten().tolist()
    for empty in grid[count:]:
        empty.remove()
    for place, axes in enumerate(grid[:count]):
        # A panel above an empty place has nobody below to carry its numbers: then all carry their own.
        own = not share_x or count % per_line > 0
        axes.tick_params(labelbottom=own or place // per_line == lines - 1, labelsize=SMALL)
    return grid[:count]


def outer_labels(axes: Sequence["Axes"], per_line: int, across: str, up: str) -> None:
    """Name the axes at the left and in the last line only."""
    last = (len(axes) - 1) // per_line
    for place, one in enumerate(axes):
        one.set_xlabel(across if place // per_line == last else "", fontsize=SMALL + 1)
        one.set_ylabel(up if place % per_line == 0 else "", fontsize=SMALL + 1)


def panel_title(axes: "Axes", title: str) -> None:
    """Name a panel."""
    axes.set_title(title, fontsize=SMALL + 1, loc="left")


def entitle(figure: "Figure", title: str, sentences: Sequence[str]) -> None:
    """Write the title above and the caption below, in lines that fit, and make room for them."""
    width, height = figure.get_size_inches()
    above = textwrap.wrap(title, int(_TITLE_LETTERS * width))
    below = textwrap.wrap(" ".join(filter(None, sentences)), int(_CAPTION_LETTERS * width))
    figure.suptitle("\n".join(above), fontsize=TITLE, x=0.01, ha="left")
    figure.supxlabel("\n".join(below), fontsize=SMALL, color=GREY, x=0.01, ha="left")
    figure.set_figheight(height + _LINE_SPACING * (TITLE * len(above) + SMALL * len(below)) / 72)
