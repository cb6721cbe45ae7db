"""Tests of a server's or a node's machine that change nothing: `fedrema deploy check`."""

import shutil
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from fedrema.base.memory import amount, free_memory
from fedrema.config.settings import read_toml
from fedrema.deploy.agreement import Needs
from fedrema.deploy.audit import HEAD_FILE, LOG_FILE, verify
from fedrema.deploy.check_endpoint import versions
from fedrema.deploy.connection import Cause, Finding, probe, proxy_for, split_address
from fedrema.deploy.flower_control import NotResponding, connected_control
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.node_data import own_samples, statistics_of_table
from fedrema.deploy.run_config import Value, read_run_config
from fedrema.deploy.tls import (
    LOCAL_NAMES,
    fingerprint,
    public_half,
    read_certificate,
    read_certificates,
    read_public_key,
)
from fedrema.errors import BadInput, FedremaError, raised_by_user

FEWEST_DAYS = 30
"""A certificate that is valid for less than this is reported."""
LEAST_DISK, LEAST_MEMORY = 1_000_000_000, 500_000_000
LARGEST_LEAD = 5.0
"""By how many seconds a node's clock may be ahead of the server's; Flower allows 300 s behind."""
LARGEST_LAG = 300.0
RENEW = "renew it with fedrema deploy renew FEDERATION --host NAME"


@dataclass(frozen=True)
class Result:
    """The result of one test; `remedy` says what to do if it failed."""

    test: str
    passed: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.test}: {self.detail}" + (f"; {self.remedy}" if self.remedy and not self.passed else "")


def check_server(folder: ServerFolder) -> Iterator[Result]:
    """Test the server's machine; yields a result after each test."""
    yield _versions(_planned_versions(folder), "the app in this federation")
    yield _settings(folder)
    yield from _server_certificate(folder)
    yield from _ports(folder)
    yield _keys(folder)
    yield from _machine(folder.path)
    yield from _audit(folder.path)


def check_node(folder: NodeFolder) -> Iterator[Result]:
    """Test a node's machine and its connection to the server, which it does not join."""
    yield from _node_files(folder)
    found = Finding(Cause.ADDRESS)
    try:
        host, port = split_address(folder.config.server)
        yield _name(host, port)
        found = probe(folder.config.server, folder.path / "ca.crt", folder.path / "node.key", folder.name)
    except BadInput as error:
        yield Result("address", False, str(error).rstrip("."), "correct server in node.toml")
    else:
        yield from _connection(folder, found)
    theirs = found.answer.get("versions")
    if isinstance(theirs, Mapping):
        yield _versions({str(name): str(value) for name, value in theirs.items()}, "the server")
    else:
        yield Result("versions", True, _listed(versions()))
    yield _data(folder, found.answer.get("config"))
    yield from _machine(folder.path)
    yield from _audit(folder.path)


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _planned_versions(folder: ServerFolder) -> dict[str, str]:
    """Return the versions that the app of a federation was created for."""
    try:
        app = read_toml(folder.app / "pyproject.toml", "the app")["tool"]["flwr"]["app"]
        return {"flwr": str(app["flwr-version-target"])}
    except (BadInput, KeyError, TypeError):
        return {}


def _versions(wanted: Mapping[str, str], of: str) -> Result:
    """Compare versions up to their second number; fedrema's must be the same."""
    own = versions()

    def short(name: str, text: str) -> str:
        return text if name == "fedrema" else ".".join(text.split("+")[0].split(".")[:2])

    different = [name for name in wanted if name in own and short(name, own[name]) != short(name, wanted[name])]
    if not different:
        return Result("versions", True, _listed(own))
    name = different[0]
    detail = f"this machine has {name} {own[name]}, but {of} has {wanted[name]}"
    return Result("versions", False, detail, "install the same versions on all machines")


def _settings(folder: ServerFolder) -> Result:
    try:
        settings, plan = read_run_config(folder.run_config())
    except FedremaError as error:
        return Result("settings", False, str(error).rstrip("."), f"correct {folder.app / 'pyproject.toml'}")
    detail = f"{settings.method.called()}, {settings.simulation.rounds} rounds, at least {plan.least_clients} nodes"
    return Result("settings", True, detail)


def _server_certificate(folder: ServerFolder) -> Iterator[Result]:
    try:
        own, trusted = read_certificate(folder.path / "server.crt"), read_certificates(folder.path / "ca.crt")
        # While the authority is renewed, ca.crt holds the old and the new one.
        authority = next((each for each in trusted if each.subject == own.issuer), trusted[0])
        own.verify_directly_issued_by(authority)
        key = serialization.load_pem_private_key((folder.path / "server.key").read_bytes(), None)
        if key.public_key() != own.public_key():
            raise BadInput(f"{folder.path / 'server.key'} does not belong to server.crt.")
    except BadInput as error:
        yield Result("certificate", False, str(error).rstrip("."), RENEW)
        return
    except (OSError, ValueError, TypeError, InvalidSignature):
        detail = f"{folder.path} has no server.key that is readable, or server.crt was not issued by ca.crt"
        yield Result("certificate", False, detail, RENEW)
        return
    yield _validity("certificate", own, RENEW)
    yield _validity("authority", authority, "renew it with fedrema deploy renew FOLDER --authority prepare")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for name in names.get_values_for_type(x509.DNSName):
        if name not in LOCAL_NAMES:
            yield _name(name, folder.config.port)


def _validity(test: str, certificate: x509.Certificate, remedy: str) -> Result:
    now = datetime.now(UTC)
    if now < certificate.not_valid_before_utc:
        return Result(
            test, False, f"valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC", "check the clock"
        )
    days = (certificate.not_valid_after_utc - now).days
    detail = f"valid for {days} days" if days >= 0 else f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    return Result(test, days >= FEWEST_DAYS, detail, remedy)


def _name(host: str, port: int) -> Result:
    if proxy := proxy_for(host):
        return Result("name", True, f"{host} is resolved by the proxy {proxy}")
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        remedy = "correct the name, or ask your network's administrator for a DNS entry"
        return Result("name", False, f"{host} cannot be resolved to an address", remedy)
    return Result("name", True, f"{host} is {', '.join(sorted(addresses))}")


def _ports(folder: ServerFolder) -> Iterator[Result]:
    config = folder.config
    try:
        with connected_control(folder.control_address, folder.path / "ca.crt") as control:
            control.nodes()
        yield Result("ports", True, f"{config.port} and {config.control_port} are in use by this running server")
        return
    except (NotResponding, FedremaError, OSError, ValueError):
        pass
    for host, port in ((config.listen, config.port), ("127.0.0.1", config.control_port)):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                test.bind((host, port))
                yield Result("port", True, f"{port} is free")
            except OSError as error:
                detail = f"the server cannot listen on {host}, port {port}: {error.strerror or error}"
                yield Result("port", False, detail, "stop the program that uses it, or change server.toml")


def _keys(folder: ServerFolder) -> Result:
    found: dict[bytes, str] = {}
    remedy = f"correct the files in {folder.keys}"
    for file in sorted(folder.keys.glob("*.pub")):
        try:
            key = read_public_key(file)
        except BadInput as error:
            return Result("keys", False, str(error).rstrip("."), remedy)
        if key in found:
            return Result("keys", False, f"{found[key]} and {file.stem} have the same key", remedy)
        found[key] = file.stem
    detail = f"{len(found)} nodes may participate: {', '.join(found.values())}"
    return Result("keys", bool(found), detail if found else "no node may participate", remedy)


def _node_files(folder: NodeFolder) -> Iterator[Result]:
    key = folder.path / "node.key"
    try:
        own = fingerprint(public_half(key))
        mode = stat.S_IMODE(key.stat().st_mode)
        secret = not mode & 0o077
        yield Result("key", secret, own if secret else f"{key} is readable by other users", f"run chmod 600 {key}")
    except BadInput as error:
        yield Result("key", False, str(error).rstrip("."), "restore it, or create a new one with fedrema deploy key")
    try:
        authority = read_certificate(folder.path / "ca.crt")
        yield _validity("authority", authority, "ask the server's operator for a new ca.crt")
    except BadInput as error:
        yield Result("authority", False, str(error).rstrip("."), "copy ca.crt of the server's folder to the node")


def _connection(folder: NodeFolder, found: Finding) -> Iterator[Result]:
    address = folder.config.server
    proxy = proxy_for(split_address(address)[0])
    through = f" through the proxy {proxy}" if proxy else ""
    if found.clock_lead is not None:
        lead = found.clock_lead
        detail = f"{abs(lead):.1f} s {'ahead of' if lead > 0 else 'behind'} the server's"
        remedy = f"synchronise the clocks (NTP); at most {LARGEST_LEAD:g} s ahead and {LARGEST_LAG:g} s behind work"
        yield Result("clock", -LARGEST_LAG < lead < LARGEST_LEAD, detail, remedy)
    if found.certificate_days is not None:
        detail = f"the server's is valid for {found.certificate_days} days"
        yield Result(
            "certificate", found.certificate_days >= FEWEST_DAYS, detail, "ask the server's operator to renew it"
        )
    if found.cause in (Cause.CONNECTED, Cause.KEY_IN_USE):
        named = found.answer.get("name")
        used = "; a process is connected with it now" if found.cause is Cause.KEY_IN_USE else ""
        if named != folder.name:
            remedy = f"set name = {str(named)!r} in node.toml, or register the key under the other name"
            yield Result("server", False, f"the key is registered for {named!r}, not {folder.name!r}", remedy)
        else:
            yield Result("server", True, f"{address} answers over TLS{through} and knows this node's key{used}")
    elif found.cause is not Cause.CLOCK:
        yield Result("server", False, f"{found.sentence}{through}", found.remedy)


def _data(folder: NodeFolder, config: object) -> Result:
    """Compare a node's data with the server's plan."""
    try:
        place = str(folder.node_config()["data"])
        if not isinstance(config, Mapping) or not config:
            detail = f"{place} exists, but was not compared with the plan, which only the server knows"
            return Result("data", False, detail, "correct the connection first, and repeat the check")
        values: dict[str, Value] = {str(name): value for name, value in config.items()}
        settings, plan = read_run_config({**values, "folder": "/unknown"})
        sys.path.insert(0, str(folder.path))  # it may contain the module of module:function
        if plan.is_table:
            statistics = statistics_of_table(place, settings, folder.name, Needs.of(settings, plan), plan)
            return Result("data", True, f"{statistics.samples} training samples with the columns of the plan")
        samples = own_samples(place, settings, folder.name, plan)
        if samples.sample_shape != plan.shape:
            raise BadInput(f"samples are of shape {'x'.join(map(str, samples.sample_shape))}, not {plan.sample_shape}")
        samples = plan.with_classes(samples)
    except FedremaError as error:
        return Result("data", False, str(error).rstrip("."), "correct data in node.toml, or the data")
    except Exception as error:  # the module is the user's
        return Result("data", False, f"it cannot be read: {raised_by_user(error)}", "correct data in node.toml")
    finally:
        if sys.path[0] == str(folder.path):
            del sys.path[0]
    detail = f"{int((~samples.test).sum())} training and {int(samples.test.sum())} test samples of shape "
    return Result("data", True, f"{detail}{plan.sample_shape}, task {plan.predicted.name}")


def _machine(path: Path) -> Iterator[Result]:
    disk, memory = shutil.disk_usage(path).free, free_memory()
    yield Result("disk", disk >= LEAST_DISK, f"{amount(disk)} free", f"free at least {amount(LEAST_DISK)} in {path}")
    remedy = f"free at least {amount(LEAST_MEMORY)}"
    yield Result("memory", memory >= LEAST_MEMORY, f"{amount(memory)} available", remedy)


def _audit(path: Path) -> Iterator[Result]:
    if (path / LOG_FILE).is_file() or (path / HEAD_FILE).is_file():
        lines, problems = verify(path)
        detail = problems[0].sentence.rstrip(".") if problems else f"{len(lines)} lines, chain complete"
        yield Result("audit log", not problems, detail, "find out who changed it; fedrema deploy audit prints it")
