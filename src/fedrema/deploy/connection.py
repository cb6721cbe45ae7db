"""A node's connection to the server: a test that joins nothing, and the cause of a failure with its remedy.

Flower's nodes speak HTTPS (httpx), so the test uses the same library: it goes through the same proxy, trusts the same
authority, and fails for the same reasons.
"""

import base64
import itertools
import json
import os
import re
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from pathlib import Path
from typing import Any

import httpx

from fedrema.base.processes import LogTail
from fedrema.base.terminal import safe
from fedrema.deploy.check_endpoint import KEY, LARGEST_LEAD, PATH, PURPOSE, SIGNATURE, TIME
from fedrema.deploy.tls import signature
from fedrema.errors import BadInput

SECONDS_TO_ANSWER = 4.0
LARGEST_ANSWER = 1_000_000
"""Bytes of the server's answer that are read."""
LAST_LINES = 200
"""How many lines of the SuperNode's output are classified."""
LOCAL = ("127.0.0.1", "localhost")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\s/]+):(?P<port>[0-9]{1,5})")


class Cause(Enum):
    """Why a node is not connected."""

    ADDRESS = "the address is not valid"
    NAME = "the server's name is unknown"
    UNREACHABLE = "the server cannot be reached"
    PROXY = "the proxy refuses the connection"
    NO_TLS = "the server does not speak TLS"
    CERTIFICATE = "the server's certificate is not trusted"
    CLOCK = "the clocks differ"
    KEY_FILE = "the key file is not valid"
    KEY = "the key is not registered"
    KEY_IN_USE = "the key is in use"
    KEY_REFUSED = "the key is not registered, or in use"
    OTHER = "the server answers in an unknown way"
    CONNECTED = "connected"
    STARTING = "not known yet"


@dataclass(frozen=True)
class Finding:
    """What is wrong with a connection, and what to do; `cause` is `CONNECTED` if nothing is."""

    cause: Cause
    sentence: str = ""
    remedy: str = ""
    answer: Mapping[str, Any] = field(default_factory=dict)
    """The server's answer; empty unless the key is registered."""
    clock_lead: float | None = None
    """By how many seconds this machine's clock is ahead of the server's; None if unknown."""
    certificate_days: int | None = None
    """For how many days the server's certificate is valid; None if unknown."""

    def __str__(self) -> str:
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT."""
    found = ADDRESS.fullmatch(address)
    if not found or not 1 <= int(found["port"]) <= 65535:
        raise BadInput(f"server = {safe(address[:100])!r} is not an address such as fl.example.org:9092.")
    return found["host"].strip("[]"), int(found["port"])


def proxy_for(host: str) -> str:
    """Return the proxy through which Flower reaches a host over HTTPS, by the environment; empty: none."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get("https") or proxies.get("all") or ""
    return "" if not proxy or urllib.request.proxy_bypass(host) else proxy


def exempt_local_addresses() -> None:
    """Keep connections to this machine, over which Flower's processes talk to each other, from using a proxy."""
    listed = [name.strip() for name in urllib.request.getproxies().get("no", "").split(",") if name.strip()]
    if urllib.request.getproxies() and "*" not in listed:
        missing = [name for name in LOCAL if name not in listed]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*listed, *missing])


def probe(address: str, authority: Path, key: Path, name: str = "NAME", seconds: float = SECONDS_TO_ANSWER) -> Finding:
    """Test the connection to the server without joining: name, port, TLS, clock and key."""
    try:
        host, port = split_address(address)
    except BadInput as error:
        return Finding(Cause.ADDRESS, str(error).rstrip("."), "correct server in node.toml")
    try:
        time = datetime.now(UTC).isoformat()
        public, signed = signature(key, PURPOSE + time.encode())
    except BadInput as error:
        return Finding(Cause.KEY_FILE, str(error).rstrip("."), "restore it, or run fedrema deploy key")
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError):
        remedy = "copy ca.crt of the server's folder to the node"
        return Finding(Cause.CERTIFICATE, f"{authority} holds no certificate", remedy)
    proxy = proxy_for(host)
    if not proxy:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            remedy = "correct server in node.toml, or ask your network's administrator for a DNS entry"
            return Finding(Cause.NAME, f"the name {safe(host)} cannot be resolved to an address", remedy)
    headers = {KEY: base64.b64encode(public).decode(), TIME: time, SIGNATURE: base64.b64encode(signed).decode()}
    try:
        with (
            httpx.Client(verify=context, timeout=seconds) as client,
            client.stream("POST", f"https://{address}{PATH}", headers=headers) as response,
        ):
            days = _certificate_days(response)
            content = b"".join(itertools.islice(response.iter_bytes(LARGEST_ANSWER), 1))
    except httpx.HTTPError as error:
        return _transport(error, address, proxy)
    return replace(_finding(response, content, address, name), certificate_days=days)


def _certificate_days(response: httpx.Response) -> int | None:
    """Return for how many days the server's certificate is valid; None if unknown."""
    try:
        tls = response.extensions["network_stream"].get_extra_info("ssl_object")
        seconds = ssl.cert_time_to_seconds(tls.getpeercert()["notAfter"]) - datetime.now(UTC).timestamp()
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    return int(seconds // 86_400)


def _finding(response: httpx.Response, content: bytes, address: str, name: str) -> Finding:
    """Return what the server's answer means."""
    try:
        answer = json.loads(content)
        reason, there = str(answer.get("reason", "")), datetime.fromisoformat(answer["time"])
    except (ValueError, KeyError, AttributeError, TypeError):
        sentence = f"{address} answers with HTTP status {response.status_code}, not like a fedrema server"
        remedy = "correct server in node.toml, or update fedrema on the server"
        return Finding(Cause.OTHER, sentence, remedy, clock_lead=_lead(response))
    lead = (datetime.now(UTC) - there).total_seconds()
    if reason == "clock":
        sentence = f"this machine's clock is {abs(lead):.0f} s {'ahead of' if lead > 0 else 'behind'} the server's"
        remedy = f"synchronise the clocks (NTP); Flower allows {LARGEST_LEAD:g} s ahead"
        return Finding(Cause.CLOCK, sentence, remedy, clock_lead=lead)
    if reason == "key":
        sentence = "the server does not know this node's key"
        remedy = f"copy node.pub to the server as keys/{name}.pub"
        return Finding(Cause.KEY, sentence, remedy, clock_lead=lead)
    if response.status_code != 200:
        sentence = f"{address} refuses the test of the connection ({safe(reason[:50])})"
        return Finding(Cause.OTHER, sentence, "use the same version of fedrema on the node and the server")
    if answer.get("state") == "online":
        sentence = "the server already has a connection with this node's key"
        remedy = (
            "stop the other process or machine with this folder; if the node was just killed, the server frees the key "
            "within a minute"
        )
        return Finding(Cause.KEY_IN_USE, sentence, remedy, answer, lead)
    return Finding(Cause.CONNECTED, answer=answer, clock_lead=lead)


def _transport(error: httpx.HTTPError, address: str, proxy: str) -> Finding:
    """Return what an error of the transport means."""
    text = str(error)
    if isinstance(error, httpx.ProxyError) or (proxy and isinstance(error, httpx.ConnectError) and "SSL" not in text):
        sentence = f"the proxy {safe(proxy)} does not connect to {address}"
        return Finding(Cause.PROXY, sentence, "let the proxy allow CONNECT to this port, or add the server to no_proxy")
    if found := _tls_finding(text, address):
        return found
    if isinstance(error, httpx.TimeoutException):
        sentence = f"{address} does not answer"
    elif "refused" in text:
        sentence = f"no server listens at {address}"
    else:
        sentence = f"{address} cannot be reached"
    remedy = "correct server in node.toml, start the server, or open this port for outgoing connections in the firewall"
    return Finding(Cause.UNREACHABLE, sentence, remedy)


def _tls_finding(text: str, address: str = "the server") -> Finding | None:
    """Return what an error of OpenSSL means; None if it is another error."""
    if "CERTIFICATE_VERIFY_FAILED" not in text:
        if "SSL" not in text:
            return None
        sentence = f"{address} does not speak TLS"
        return Finding(Cause.NO_TLS, sentence, "correct the port in node.toml: another program may listen there")
    if "mismatch" in text or "not valid for" in text:
        remedy = "on the server, add this name with fedrema deploy renew FOLDER --host NAME"
        return Finding(Cause.CERTIFICATE, f"the server's certificate is not for {address.rpartition(':')[0]}", remedy)
    if "expired" in text:
        remedy = "renew it on the server with fedrema deploy renew, or correct this machine's clock"
        return Finding(Cause.CERTIFICATE, "the server's certificate has expired", remedy)
    if "not yet valid" in text:
        sentence = "the server's certificate is not valid yet"
        return Finding(Cause.CERTIFICATE, sentence, "correct this machine's clock")
    remedy = "copy ca.crt of this federation to the node, or correct server in node.toml; if a proxy replaces "
    remedy += "certificates, exempt the server from that"
    return Finding(Cause.CERTIFICATE, "the server's certificate was issued by another authority", remedy)


def classify(log: Iterable[str]) -> Finding:
    """Return what the output of Flower's SuperNode since its start says about the connection."""
    found, retries = Finding(Cause.STARTING), 0
    for raw in log:
        line = ESCAPES.sub("", raw).strip()
        if "Starting Flower SuperNode" in line:
            found, retries = Finding(Cause.STARTING), 0
        elif "SuperNode ID:" in line:
            return Finding(Cause.CONNECTED)
        elif found.cause is not Cause.STARTING and found.cause is not Cause.UNREACHABLE:
            continue  # the first error is the cause of the others
        elif "handshake error detected" not in line and (tls := _tls_finding(line)):
            found = tls
        elif "[code: 2004]" in line:  # Flower does not say which of the two it is
            sentence = "the server does not accept this node's key"
            remedy = (
                "copy node.pub to the server's folder keys, or stop the other process with this key; a killed process"
                " keeps the key for up to a minute"
            )
            found = Finding(Cause.KEY_REFUSED, sentence, remedy)
        elif "Exit Code: 302" in line or "Unable to load private key" in line:
            found = Finding(Cause.KEY_FILE, "node.key is not valid", "restore it, or run fedrema deploy key")
        elif "cannot be parsed" in line:
            found = Finding(Cause.ADDRESS, "the server's address is not valid", "correct server in node.toml")
        elif "Connection attempt failed, retrying" in line:
            retries += 1
            if retries > 1:
                remedy = "correct server in node.toml, start the server, or open the port in the firewall"
                found = Finding(Cause.UNREACHABLE, "the server cannot be reached", remedy)
        elif "SuperNode terminated gracefully" in line:  # what Flower does if the server refuses a signed time
            remedy = f"synchronise the clocks (NTP); Flower allows {LARGEST_LEAD:g} s ahead"
            found = Finding(Cause.CLOCK, "the server does not accept the signed time, or the key was removed", remedy)
    return found


def _lead(response: httpx.Response) -> float | None:
    """Return by how many seconds this machine's clock is ahead, from the header Date; None if there is none."""
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(response.headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return None


class ConnectionWatch:
    """Reports once, on a node's console, why it is not connected, and when it is.

    `test` tests the connection; `log` is the output of Flower's SuperNode; `said` is the last sentence before.
    """

    def __init__(self, log: Path, test: Callable[[], Finding], said: str = "") -> None:
        self._tail, self._test = LogTail(log), test
        self._lines: list[str] = []
        self._said = said
        self._cause: Cause | None = None
        self.joined = False
        """Whether the node has just been connected, since the last call of `news`."""

    def news(self) -> list[str]:
        """Return sentences about the connection that were not returned before."""
        found, first = self._classified(), self._cause is None
        self.joined = False
        if not first and found.cause is self._cause:
            return []
        self._cause = found.cause
        if found.cause is Cause.CONNECTED:
            self.joined = True
            return self._once("the node is connected to the server")
        if first or found.cause is not Cause.STARTING:
            tested = self._test()  # more precise than the log of Flower
            found = found if tested.cause in (Cause.CONNECTED, Cause.OTHER) else tested
        return self._once(f"not connected: {found}") if found.sentence else []

    def exit_message(self, message: str) -> str:
        """Return the supervisor's message about an exit of the SuperNode; `news` reports the cause if it is known."""
        return re.sub(r" \(.*\);", ";", message) if self._classified().sentence else message

    def _classified(self) -> Finding:
        for line in self._tail.lines():
            self._lines = [line] if "Starting Flower SuperNode" in line else [*self._lines, line][-LAST_LINES:]
        return classify(self._lines)

    def _once(self, sentence: str) -> list[str]:
        if sentence == self._said:
            return []
        self._said = sentence
        return [sentence]
