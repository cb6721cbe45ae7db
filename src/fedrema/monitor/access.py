"""Who may see the pages: a password with a login form for browsers, a token for programs such as Prometheus.

Secrets are read from files or environment variables, never from the command line, which other users can see. They are
compared in constant time, and appear in no address and no log. After a login, the browser holds the number of a
session in a cookie; sessions are kept in memory and end with the process.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import cast
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedrema.base.files import regular_file
from fedrema.errors import BadInput
from fedrema.page.server import HEADERS

PASSWORD_VARIABLE, TOKEN_VARIABLE = "FEDREMA_WATCH_PASSWORD", "FEDREMA_WATCH_TOKEN"
SHORTEST_SECRET = 12
LARGEST_FORM = 4096
"""Bytes of a login form that are read."""
SESSION_SECONDS = 12 * 3600.0
MOST_SESSIONS = 1000
FREE_FAILURES = 3
"""After this many failures, an address has to wait; each further failure doubles the time."""
LONGEST_WAIT = 300.0
FAILURES_EXPIRE = 3600.0
"""After this many seconds without a failure, earlier ones do not count."""
MOST_ADDRESSES = 1000
FAILURE_SECONDS = 0.5
"""How long the answer to a wrong secret is delayed."""
LOGIN_HEADERS = {
    **HEADERS,
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send forms without their origin
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
}


@dataclass(frozen=True)
class Secrets:
    """What proves that somebody may see the pages; if only one is set, it serves both purposes."""

    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.password or self.token)

    @classmethod
    def read(cls, password_file: Path | None, token_file: Path | None) -> "Secrets":
        """Read the secrets from files, or else from the environment; refuses short ones and readable files."""
        return cls(
            _secret("--password-file", password_file, PASSWORD_VARIABLE),
            _secret("--token-file", token_file, TOKEN_VARIABLE),
        )

    def is_password(self, given: str) -> bool:
        """Whether somebody may log in."""
        return _equal(given, self.password or self.token)

    def is_token(self, given: str) -> bool:
        """Whether a program may read."""
        return _equal(given, self.token or self.password)


def _secret(option: str, file: Path | None, variable: str) -> str:
    if file is None:
        source, text = f"the environment variable {variable}", os.environ.get(variable, "")
        if not text:
            return ""
    else:
        source = f"{option} {file}"
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            text = regular_file(file).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{source} cannot be read: {getattr(error, 'strerror', None) or 'not text'}.") from error
        if os.name == "posix" and mode & 0o077:
            raise BadInput(f"{source} must be readable by its owner only, got mode {mode:04o}: run chmod 600 {file}.")
    if len(text) < SHORTEST_SECRET or not text.isascii() or not text.isprintable() or text != text.strip():
        raise BadInput(
            f"{source} must hold one line of at least {SHORTEST_SECRET} printable ASCII characters, got {len(text)}."
        )
    return text


def _equal(given: str, secret: str) -> bool:
    # Digests have the same length, so that the time of the comparison says nothing about the secret.
    digests = [hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (given, secret)]
    return bool(secret) and hmac.compare_digest(*digests)


class Failures:
    """Slows down attempts to guess a secret: an address that has failed several times has to wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.found: dict[str, tuple[int, float]] = {}
        """Number of failures and the time of the last one, by address."""

    def seconds_to_wait(self, address: str) -> float:
        """Return for how many seconds an address may not try again."""
        count, last = self.found.get(self._key(address), (0, 0.0))
        if count < FREE_FAILURES:
            return 0.0
        return max(0.0, last + min(LONGEST_WAIT, 2.0 ** min(count - FREE_FAILURES, 10)) - self.clock())

    def add(self, address: str) -> None:
        """Record that an address has sent a wrong secret."""
        now = self.clock()
        if len(self.found) >= MOST_ADDRESSES:  # forget those that need not wait any more
            self.found = {key: (n, last) for key, (n, last) in self.found.items() if now - last < 2 * LONGEST_WAIT}
        key = self._key(address)
        count, last = self.found.get(key, (0, now))
        self.found[key] = (count if now - last < FAILURES_EXPIRE else 0) + 1, now

    def clear(self, address: str) -> None:
        """Record that an address has sent the right secret."""
        self.found.pop(self._key(address), None)

    def _key(self, address: str) -> str:
        """Return what identifies a machine: of an IPv6 address, the network, in which it can choose any address."""
        key = address
        with contextlib.suppress(ValueError):
            if ":" in address:
                key = str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
        # If there are too many, all further addresses share one entry.
        return key if key in self.found or len(self.found) < MOST_ADDRESSES else ""


class Access:
    """Passes requests on to an application if they come with a session or a token; serves the login form.

    `secure` says whether connections use TLS.
    """

    def __init__(self, app: ASGIApp, secrets: Secrets, secure: bool) -> None:
        self.app, self.secrets, self.secure = app, secrets, secure
        self.cookie = "__Host-fedrema" if secure else "fedrema"
        self.sessions: dict[str, float] = {}
        """When each session ends, by the digest of its number."""
        self.failures = Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        answer = await self._answer(Request(scope, receive))
        await (self.app if answer is None else answer)(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """Return the answer to a request that is not passed on; None for a request that is."""
        pages: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("POST", "/login"): self._log_in,
            ("POST", "/logout"): self._log_out,
        }
        if found := pages.get((request.method, request.url.path)):
            return await found(request)
        if request.url.path == "/login":
            return self._form(logged_in=self._session(request))
        if "authorization" in request.headers:
            kind, _, given = request.headers["authorization"].partition(" ")
            return await self._refusal(request, kind.lower() == "bearer" and self.secrets.is_token(given.strip()))
        if self._session(request):
            return None
        if request.url.path == "/" and request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("login", 303, HEADERS)
        return _unauthorised()

    async def _refusal(self, request: Request, right: bool) -> Response | None:
        """Return why a secret is not accepted; None if it is. A right one is not accepted either while one waits."""
        address = request.client.host if request.client else ""
        if seconds := self.failures.seconds_to_wait(address):
            headers = {**HEADERS, "Retry-After": str(int(seconds) + 1)}
            return PlainTextResponse("Too many attempts: wait, and try again.", 429, headers)
        if right:
            self.failures.clear(address)
            return None
        self.failures.add(address)
        await asyncio.sleep(FAILURE_SECONDS)
        return _unauthorised()

    async def _log_in(self, request: Request) -> Response:
        if refused := _other_origin(request):
            return refused
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_FORM:
                return PlainTextResponse("The form is too large.", 413, HEADERS)
        given = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True).get("password", [""])[0]
        refused = await self._refusal(request, self.secrets.is_password(given))
        if refused is not None:
            wait = refused.headers.get("retry-after")
            return self._form(f"Too many attempts: wait {wait} seconds." if wait else "The password is wrong.", refused)
        number, now = secrets.token_urlsafe(32), time.time()
        kept = sorted(((end, key) for key, end in self.sessions.items() if end > now), reverse=True)
        self.sessions = {key: end for end, key in kept[: MOST_SESSIONS - 1]}
        self.sessions[_digest(number)] = now + SESSION_SECONDS
        answer = RedirectResponse("./", 303, HEADERS)
        self._set_cookie(answer, number, int(SESSION_SECONDS))
        return answer

    async def _log_out(self, request: Request) -> Response:
        if refused := _other_origin(request):
            return refused
        self.sessions.pop(_digest(request.cookies.get(self.cookie, "")), None)
        answer = RedirectResponse("login", 303, HEADERS)
        self._set_cookie(answer, "", 0)
        return answer

    def _set_cookie(self, answer: Response, value: str, seconds: int) -> None:
        answer.set_cookie(
            self.cookie, value, max_age=seconds, path="/", secure=self.secure, httponly=True, samesite="strict"
        )

    def _session(self, request: Request) -> bool:
        # Found by its digest: how long a search takes says nothing about the numbers of other sessions.
        return self.sessions.get(_digest(request.cookies.get(self.cookie, "")), 0.0) > time.time()

    def _form(self, message: str = "", refused: Response | None = None, logged_in: bool = False) -> Response:
        style = (resources.files("fedrema.page") / "assets" / "page.css").read_text(encoding="utf-8")
        form = (resources.files("fedrema.monitor") / "assets" / "login.html").read_text(encoding="utf-8")
        html = Template(form).substitute(style=style, message=message, hidden="" if logged_in else "hidden")
        headers = dict(LOGIN_HEADERS)
        if refused is not None and "retry-after" in refused.headers:
            headers["Retry-After"] = refused.headers["retry-after"]
        return HTMLResponse(html, 200 if refused is None else refused.status_code, headers)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _unauthorised() -> Response:
    return PlainTextResponse("Log in, or send a token.", 401, {**HEADERS, "WWW-Authenticate": "Bearer"})


def _other_origin(request: Request) -> Response | None:
    """Return a refusal of a form that another site has sent."""
    origin = request.headers.get("origin")
    if origin is None or urlsplit(origin).netloc == request.headers.get("host"):
        return None
    return cast(Response, PlainTextResponse("The form was sent by another site.", 403, HEADERS))
