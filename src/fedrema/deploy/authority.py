"""Renewal of the federation's certificate authority in three steps, during which nodes trust the old and the new one.

prepare: creates the new authority; from then on `ca.crt` holds both. switch: the new authority signs the server's
certificate. retire: `ca.crt` holds the new authority only. After each step, the operator copies `ca.crt` to the nodes.
"""

import shutil
from pathlib import Path
from typing import Literal, get_args

from fedrema.base.files import atomic_file
from fedrema.deploy.folder import ServerFolder
from fedrema.deploy.tls import (
    make_authority,
    make_server_certificate,
    read_certificate,
    read_certificates,
    write_certificates,
)
from fedrema.errors import BadInput

Step = Literal["prepare", "switch", "retire"]
STEPS: tuple[Step, ...] = get_args(Step)


def renew_authority(folder: Path, step: Step, hosts: tuple[str, ...]) -> None:
    """Execute a step of the renewal in the federation's folder; `hosts` are the server's names, for `switch`."""
    server, authority = ServerFolder.open(folder).path, folder / "authority"
    following = authority / "next"
    if step == "prepare":
        if following.is_dir():
            raise BadInput(f"--authority prepare: {following} already exists: continue with --authority switch.")
        current = read_certificate(authority / "ca.crt")
        prepared = authority / "next.part"
        shutil.rmtree(prepared, ignore_errors=True)
        prepared.mkdir(mode=0o700)
        make_authority(prepared, f"fedrema {folder.resolve().name} authority")
        prepared.replace(following)
        write_certificates(server / "ca.crt", current, read_certificate(following / "ca.crt"))
    elif step == "switch":
        if not following.is_dir():
            raise BadInput(f"--authority switch: {following} does not exist: begin with --authority prepare.")
        new = read_certificate(following / "ca.crt")
        if new not in read_certificates(server / "ca.crt"):
            raise BadInput(f"--authority switch: {server / 'ca.crt'} does not hold the new authority: {_AGAIN}.")
        make_server_certificate(following, server, hosts)
    else:
        if not following.is_dir():
            raise BadInput(f"--authority retire: {following} does not exist: begin with --authority prepare.")
        new = read_certificate(following / "ca.crt")
        if read_certificate(server / "server.crt").issuer != new.subject:
            raise BadInput("--authority retire: the server's certificate is from the old authority: switch first.")
        write_certificates(server / "ca.crt", new)
        for name in ("ca.key", "ca.crt"):  # the key first: without its certificate, it is not used
            with atomic_file(authority / name) as temporary:
                temporary.chmod(0o600)
                temporary.write_bytes((following / name).read_bytes())
        shutil.rmtree(following)
    for node in sorted((folder / "nodes").glob("*/node.toml")):  # on other machines, the operator copies it
        write_certificates(node.parent / "ca.crt", *read_certificates(server / "ca.crt"))


_AGAIN = "remove authority/next and begin again with --authority prepare"
