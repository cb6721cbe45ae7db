"""fedrema report, fedrema watch: the page about runs."""

import dataclasses
import webbrowser
from pathlib import Path
from typing import Annotated

import tyro

from fedrema.base.terminal import print_safe
from fedrema.cli.after import common_folder
from fedrema.config.settings import parse_arguments
from fedrema.errors import BadInput

REPORT = "report.html"


@dataclasses.dataclass(frozen=True)
class Report:
    """Write one HTML file about runs: results, curves, every client, who learns from whom; it needs no network."""

    dirs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or folders that hold such."""
    out: Path | None = None
    """The file; default: report.html in the folder that holds all the runs."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open it in the browser."""


def report(arguments: list[str]) -> int:
    """Write the page about runs."""
    asked: Report = parse_arguments(Report, arguments, "fedrema report")
    if not asked.dirs:
        raise BadInput("fedrema report needs at least one folder that is a run or holds runs.")
    out = asked.out or common_folder(asked.dirs) / REPORT
    if out.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--out {out} is not a page: names ending in .html are valid.")
    from fedrema.page.render import write_page

    write_page(asked.dirs, out)
    print_safe(f"Report: {out}")
    if asked.open:
        show(out)
    return 0


def show(file: Path) -> None:
    """Open a file in the browser, if there is one."""
    if not webbrowser.open(file.resolve().as_uri()):
        print_safe(f"There is no browser here; open {file} in one.")


@dataclasses.dataclass(frozen=True)
class Watch:
    """Show a run, or all runs below a folder, in the browser while they go on; only reads."""

    dir: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or one that holds runs or will."""
    host: str = "127.0.0.1"
    """Address to listen on; others than this machine's own let anybody there look."""
    port: int = 8384
    """Port; 0 takes any that is free."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the browser."""

    def __post_init__(self) -> None:
        """Refuse what cannot be listened on."""
        if not 0 <= self.port <= 65535:
            raise BadInput(f"--port must lie in 0 to 65535, got {self.port}.")


def watch(arguments: list[str]) -> int:
    """Serve the page until interrupted."""
    asked: Watch = parse_arguments(Watch, arguments, "fedrema watch")
    if not asked.dir.is_dir():
        raise BadInput(f"{asked.dir} is not a folder: name that of a run, or one that holds runs or will.")
    from fedrema.page.server import serve

    def ready(address: str) -> None:
        print_safe(f"Watching {asked.dir}: {address}  (Ctrl-C ends it)", flush=True)
        if asked.open:
            webbrowser.open(address)

    serve(asked.dir, asked.host, asked.port, ready)
    return 0
