"""fedrema watch."""

import dataclasses
import importlib.util
import webbrowser
from pathlib import Path

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Watch:
    """Show runs in the browser while they train, or a deployment; reads their folders and changes nothing.

    For the folder of a deployment's server, the page shows its nodes; for the folder of a node, the node's own results
    and audit log. /metrics has the same numbers for Prometheus.
    """

    dir: Path = positional()
    """The folder of a run, a folder that contains runs or will contain them, or the folder of a server or a node."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than the default needs TLS and a password or token."""
    port: int = 8384
    """Port to listen on; 0 selects a free one."""
    tls_cert: Path | None = None
    """File with the TLS certificate. Default: the server's own, for the folder of a deployment's server."""
    tls_key: Path | None = None
    """File with the certificate's key."""
    password_file: Path | None = None
    """File with the password of the page. Default: the environment variable FEDREMA_WATCH_PASSWORD."""
    token_file: Path | None = None
    """File with a token for programs, as in Authorization: Bearer TOKEN. Default: FEDREMA_WATCH_TOKEN."""
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
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise BadInput("fedrema watch needs a web server: pip install 'fedrema[watch]'.")
    from fedrema.base.terminal import print_safe
    from fedrema.monitor.access import Secrets
    from fedrema.monitor.watch import monitor_app, protection
    from fedrema.page.server import serve

    def ready(address: str) -> None:
        print_safe(f"Watching {args.dir}: {address}  (stop with Ctrl-C)", flush=True)
        if args.open:
            webbrowser.open(address)

    secrets = Secrets.read(args.password_file, args.token_file)
    protected = protection(args.dir, args.host, args.tls_cert, args.tls_key, secrets)
    serve(monitor_app(args.dir, args.host, protected), args.host, args.port, ready, protected.certificate)
    return 0
