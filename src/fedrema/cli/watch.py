"""fedrema watch."""

import dataclasses
import webbrowser
from pathlib import Path

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Watch:
    """Show runs in the browser while they train; reads their folders and changes nothing."""

    dir: Path = positional()
    """The folder of a run, or a folder that contains runs or will contain them."""
    host: str = "127.0.0.1"
    """Address to listen on; with any other than the default, anyone who can reach this address can see the page."""
    port: int = 8384
    """Port to listen on; 0 selects a free one."""
    open: bool = False
    """Open the page in the browser."""

    def __post_init__(self) -> None:
        """Validate the port."""
        if not 0 <= self.port <= 65535:
            raise BadInput(f"--port must be between 0 and 65535, got {self.port}.")


def watch(arguments: list[str]) -> int:
    """Serve the page until interrupted."""
    args = parse_arguments(Watch, arguments, "fedrema watch")
    if not args.dir.is_dir():
        raise BadInput(f"{args.dir} is not a folder: name the folder of a run, or one for several runs.")
    from fedrema.base.terminal import print_safe
    from fedrema.page.server import serve

    def ready(address: str) -> None:
        print_safe(f"Watching {args.dir}: {address}  (stop with Ctrl-C)", flush=True)
        if args.open:
            webbrowser.open(address)

    serve(args.dir, args.host, args.port, ready)
    return 0
