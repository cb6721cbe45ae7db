"""Safe output of untrusted text (names, titles, paths, messages from other machines) to terminals and logs.

Terminals interpret escape sequences, and rich interprets markup such as `[/x]`; neither may come from untrusted text.
"""

import builtins
import logging
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment


def safe(text: object) -> str:
    r"""Return text on one line; control, formatting and bidi characters become escapes such as `\x1b`."""
    found = str(text)
    return found if found.isprintable() else "".join(map(_escaped, found))


def safe_lines(text: object) -> str:
    """Return text with the same escapes, but keep its line breaks."""
    return "\n".join(map(safe, str(text).split("\n")))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def print_safe(*values: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print escaped values."""
    builtins.print(*map(safe, values), end=end, file=file, flush=flush)


class Console(rich_console.Console):
    """A rich console that prints strings literally and escapes control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def on_broken_pipe(self) -> None:
        """Let the command line end with its own exit code; rich would exit with 1."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with escaped text; rich's own control codes (colours, cursor) are not part of the text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(safe_lines(segment.text), segment.style)


class _SafeRecords(logging.Filter):
    """Escapes log records before handlers receive them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = safe(record.getMessage()), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = safe_lines("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True


def safe_logger(name: str) -> logging.Logger:
    """Return a logger whose records are single lines without control characters."""
    log = logging.getLogger(name)
    if not any(isinstance(one, _SafeRecords) for one in log.filters):
        log.addFilter(_SafeRecords())
    return log
