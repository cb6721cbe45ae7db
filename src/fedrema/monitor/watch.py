"""What `fedrema watch` serves for a folder: runs, a federation for its operator, or a node for its owner."""

import importlib.util
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from fedrema.base.tls_server import check_certificate
from fedrema.errors import BadInput
from fedrema.monitor.access import PASSWORD_VARIABLE, TOKEN_VARIABLE, Access, Secrets
from fedrema.monitor.metrics import CONTENT_TYPE, Metric, exposition
from fedrema.monitor.run_metrics import metrics_of_runs
from fedrema.page.live_runs import LiveRuns
from fedrema.page.render import as_text
from fedrema.page.server import HEADERS, application, changes, event_stream, host_names, is_local, run_routes

PAGES = {"operator": "Federation", "site": "Node"}
"""The pages by the name of their script, and their titles."""


class Monitor(Protocol):
    """What a page of this package shows."""

    def view(self) -> dict[str, Any]:
        """Return what the page shows, as JSON values."""

    def metrics(self) -> list[Metric]:
        """Return metrics for Prometheus."""


@dataclass(frozen=True)
class Protection:
    """How connections are protected; both are required on other addresses than those of this machine."""

    certificate: tuple[Path, Path] | None = None
    """The certificate and its key."""
    secrets: Secrets = field(default_factory=Secrets)


def server_folder(folder: Path) -> Path | None:
    """Return the server's folder, if a folder is that or the federation's; None otherwise."""
    return next((each for each in (folder, folder / "server") if (each / "server.toml").is_file()), None)


def protection(folder: Path, host: str, certificate: Path | None, key: Path | None, secrets: Secrets) -> Protection:
    """Check that what protects connections is sufficient for an address, and usable.

    A federation's server has a certificate, which is used if no other is named.
    """
    if (certificate is None) != (key is None):
        raise BadInput("--tls-cert and --tls-key must be given together.")
    server = server_folder(folder)
    if certificate is None and server is not None and not is_local(host):
        certificate, key = server / "server.crt", server / "server.key"
    if not is_local(host) and (certificate is None or not secrets):
        missing = [
            *(["--tls-cert and --tls-key"] if certificate is None else []),
            *([] if secrets else [f"--password-file or --token-file (or {PASSWORD_VARIABLE} or {TOKEN_VARIABLE})"]),
        ]
        raise BadInput(
            f"--host {host} can be reached by other machines and needs TLS and a secret: add {' and '.join(missing)}."
        )
    if certificate is None or key is None:
        return Protection(None, secrets)
    check_certificate(certificate, key)
    return Protection((certificate, key), secrets)


def monitor_app(folder: Path, host: str, protected: Protection) -> Starlette:
    """Return the application for a folder."""
    middleware = []
    if protected.secrets:
        secure = protected.certificate is not None
        middleware.append(Middleware(Access, secrets=protected.secrets, secure=secure))
    return application(_routes(folder), allowed_hosts(host, protected), middleware)


def allowed_hosts(host: str, protected: Protection) -> Sequence[str]:
    """Return the host names that are valid in requests: those of this machine, and those in the certificate."""
    if protected.certificate is None:
        return host_names(host)
    if importlib.util.find_spec("cryptography") is None:
        raise BadInput("--tls-cert needs cryptography: pip install 'fedrema[deploy]'.")
    from cryptography import x509

    from fedrema.deploy.tls import read_certificate

    names: list[str] = []
    try:
        found = read_certificate(protected.certificate[0]).extensions
        alternatives = found.get_extension_for_class(x509.SubjectAlternativeName).value
        names += alternatives.get_values_for_type(x509.DNSName)
        names += [str(address) for address in alternatives.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        pass
    # A name such as *.example.org is a valid pattern here as well.
    return (*host_names(host), socket.gethostname(), *(name for name in names if name != "*"))


def _routes(folder: Path) -> list[BaseRoute]:
    server = server_folder(folder)
    if server is not None:
        _needs_flower()
        from fedrema.deploy.folder import ServerFolder
        from fedrema.monitor.federation import FederationMonitor

        opened = ServerFolder.open(server)
        runs = Mount("/run", routes=run_routes(LiveRuns(opened.run)))
        return [*_page("operator", FederationMonitor(opened)), runs]
    if (folder / "node.toml").is_file():
        _needs_flower()
        from fedrema.deploy.folder import NodeFolder
        from fedrema.monitor.site import SiteMonitor

        return _page("site", SiteMonitor(NodeFolder.open(folder)))
    live = LiveRuns(folder)
    return [*run_routes(live), _metrics(lambda: metrics_of_runs(live))]


def _needs_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise BadInput("fedrema watch needs Flower for a deployment's folder: pip install 'fedrema[deploy]'.")


def _page(name: str, monitor: Monitor) -> list[BaseRoute]:
    """Return the addresses of a page: the page itself, its updates, and metrics."""

    async def first(request: Request) -> Response:
        return HTMLResponse(_html(name, await run_in_threadpool(monitor.view)), headers=HEADERS)

    async def events(request: Request) -> Response:
        def stream(gone: Any) -> AsyncIterator[str]:
            return changes(monitor.view, gone)

        return event_stream(request, stream)

    return [Route("/", first), Route("/events", events), _metrics(monitor.metrics)]


def _metrics(read: Callable[[], list[Metric]]) -> Route:
    async def metrics(request: Request) -> Response:
        return Response(await run_in_threadpool(lambda: exposition(read())), media_type=CONTENT_TYPE, headers=HEADERS)

    return Route("/metrics", metrics)


def _html(name: str, view: dict[str, Any]) -> str:
    own, shared = (resources.files(f"fedrema.{package}") / "assets" for package in ("monitor", "page"))
    styles = (shared / "page.css", own / "monitor.css")
    scripts = (shared / "base.js", own / "monitor.js", own / f"{name}.js")
    style, script = ("\n".join(file.read_text(encoding="utf-8") for file in files) for files in (styles, scripts))
    return Template((own / "monitor.html").read_text(encoding="utf-8")).substitute(
        title=PAGES[name], style=style, script=f"(() => {{\n'use strict';\n{script}\n}})();", data=as_text(view)
    )
