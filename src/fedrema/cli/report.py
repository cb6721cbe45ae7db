"""fedrema report."""

import dataclasses
import webbrowser
from pathlib import Path

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.cli.run_folders import common_folder
from fedrema.errors import BadInput

REPORT = "report.html"


@dataclasses.dataclass(frozen=True)
class Report:
    """Write an HTML report about runs: results, curves, every client, who learns from whom.

    The file is self-contained: it opens in a browser without a network connection.
    """

    dirs: tuple[Path, ...] = positional()
    """At least one folder of a run, or folder that contains runs."""
    out: Path | None = None
    """The HTML file. Default: report.html in the folder that contains all runs."""
    open: bool = False
    """Open the report in the browser."""


def report(arguments: list[str]) -> int:
    """Write the report about runs."""
    args = parse_arguments(Report, arguments, "fedrema report")
    out = args.out or common_folder(args.dirs) / REPORT
    if out.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--out {out} is not a page: names ending in .html are valid.")
    from fedrema.base.terminal import print_safe
    from fedrema.page.render import write_page

    write_page(args.dirs, out)
    print_safe(f"Report: {out}")
    if args.open:
        open_in_browser(out)
    return 0


def open_in_browser(file: Path) -> None:
    """Open a file in the browser, if there is one."""
    from fedrema.base.terminal import print_safe

    if not webbrowser.open(file.resolve().as_uri()):
        print_safe(f"There is no browser here; open {file} in one.")
