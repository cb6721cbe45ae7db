"""A web server with TLS that uses a renewed certificate without a restart."""

import ssl
from pathlib import Path

import uvicorn

from fedrema.base.files import regular_file
from fedrema.errors import BadInput

TICKS_BETWEEN_CHECKS = 10
"""uvicorn calls `on_tick` ten times per second."""


def check_certificate(certificate: Path, key: Path) -> None:
    """Check that a server can use a certificate and its key; raises `BadInput` otherwise."""
    for file, what in ((certificate, "certificate"), (key, "key")):
        try:
            regular_file(file).read_bytes()
        except OSError as error:
            raise BadInput(f"{file} cannot be read as a {what}: {error.strerror}.") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise BadInput(
            f"{certificate} and {key} must be a certificate and its key without a password, in PEM format."
        ) from error


class RenewableServer(uvicorn.Server):
    """Serves with TLS; connections that begin after the certificate's files were replaced get the new certificate.

    The files are compared once per second, in the thread that executes the handshakes. Files that do not fit together,
    as in the middle of a renewal, are ignored until they do. Existing connections continue.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.certificate, self.key = Path(str(config.ssl_certfile)), Path(str(config.ssl_keyfile))
        self.loaded = self._stamps()
        config.load()

    async def on_tick(self, counter: int) -> bool:
        """Load renewed files; return whether the server exits."""
        if counter % TICKS_BETWEEN_CHECKS == 0:
            self.load_renewed()
        return await super().on_tick(counter)

    def load_renewed(self) -> bool:
        """Load the files if they have changed and fit together; return whether they were loaded."""
        found = self._stamps()
        if found == self.loaded or self.config.ssl is None:
            return False
        try:
            check_certificate(self.certificate, self.key)
            self.config.ssl.load_cert_chain(self.certificate, self.key)
        except (BadInput, ssl.SSLError, OSError):
            return False
        self.loaded = found
        return True

    def _stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(file) for file in (self.certificate, self.key))


def _stamp(file: Path) -> object:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _no_password() -> str:
    """Answer OpenSSL's question for a password, which would otherwise be asked on the terminal."""
    return ""
