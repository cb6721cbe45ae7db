"""Tables for terminals of any width: names stay whole, and columns of numbers are left out where there is no room."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

WIDE = 10_000
"""Characters in which every table fits."""
Cell = str | Text


class FittingTable:
    """A table that leaves out columns of numbers, and says which, instead of splitting names.

    The first `texts` columns, and those in `kept`, are always shown. `drop` holds headings in the order in which they
    are left out; the other columns of numbers follow, from the right. The first text column is folded only where it
    does not fit beside the columns that are always shown.
    """

    def __init__(
        self,
        headings: Sequence[str],
        texts: int = 1,
        drop: Sequence[str] = (),
        kept: Sequence[str] = (),
        last_is_text: bool = False,
        title: str = "",
        ruled: bool = True,
    ) -> None:
        self.headings, self.texts, self.title, self.ruled = list(headings), texts, title, ruled
        self.left = {*range(texts), *([len(headings) - 1] if last_is_text else [])}
        """Places of left-aligned columns, which hold text."""
        places = range(len(headings))
        numbers = [place for place in places if place not in self.left and headings[place] not in kept]
        first = [self.headings.index(heading) for heading in drop if heading in headings]
        self.order = list(dict.fromkeys([*first, *reversed(numbers)]))
        self.rows: list[tuple[Sequence[Cell], str]] = []

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Add a row; missing cells at its end are empty."""
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        dropped = self.left_out(console, options)
        yield self._only([place for place in range(len(self.headings)) if place not in dropped], options.max_width)
        if dropped:
            named = ", ".join(" ".join(self.headings[place].split()) for place in dropped)
            width = self._width(console, options, range(len(self.headings)))
            yield Text(f"Not shown in {options.max_width} columns: {named}. Set COLUMNS={width} to see them.", "dim")

    def left_out(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return the places of the columns for which there is no room, in the order in which they are left out."""
        dropped: list[int] = []
        shown = list(range(len(self.headings)))
        # One number stays: a name alone says nothing.
        while len(shown) > self.texts + 1 and self._width(console, options, shown) > options.max_width:
            place = next((place for place in self.order if place in shown), None)
            if place is None:
                break
            dropped.append(place)
            shown.remove(place)
        return dropped

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Whether all columns fit."""
        return self._width(console, options, range(len(self.headings))) <= options.max_width

    def _width(self, console: Console, options: ConsoleOptions, shown: Sequence[int]) -> int:
        return console.measure(self._only(shown), options=options.update(width=WIDE)).maximum

    def _only(self, shown: Sequence[int], width: int = WIDE) -> Table:
        table = Table(title_justify="left", title_style="", show_edge=False)
        table.box, table.padding = (box.SIMPLE_HEAD, (0, 1, 0, 0)) if self.ruled else (None, (0, 2, 0, 0))
        table.title = Text(self.title) if self.title else None
        folded = self._name_width() > width // 2 or len(self.left & set(shown)) == 1
        for place in shown:
            heading, is_text = Text(self.headings[place]), place in self.left
            no_wrap = not is_text or (place == 0 and not folded)
            table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=no_wrap)
        for cells, style_of_row in self.rows:
            texts = (cells[place] if place < len(cells) else "" for place in shown)
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in texts), style=style_of_row)
        return table

    def _name_width(self) -> int:
        return max((len(line) for cells, _ in self.rows for line in str(cells[0]).split("\n")), default=0)
