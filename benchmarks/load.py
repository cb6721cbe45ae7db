"""Load of the server with many clients: the real server, TLS, and a key for each client.

python benchmarks/load.py [--clients 100] [--rounds 6] [--processes 5] [SETTINGS]

The server is `fedrema deploy server`, with Flower's SuperLink. The clients share a few processes, to fit on one
machine, and train one at a time in each; each has its own connection, key, folder, audit log and approved plan, and
asks as often as a real node. Prints seconds and bytes per round, and the CPU time and the memory of the server's
processes. SETTINGS are further options of `fedrema deploy init`, for a larger network or for secure aggregation.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from measured_processes import KINDS, Usage, described, rounds_of

from fedrema.base.processes import SupervisedProcess, exit_with_parent, free_port, stopped_on_exit
from fedrema.deploy.audit_follower import AuditFollower
from fedrema.deploy.folder import NodeFolder
from fedrema.runs.run import Run

SETTINGS = ("--samples", "12", "--hidden", "100", "--epochs", "1", "--device", "cpu")
LIMITS = ("--wait-seconds", "900", "--round-seconds", "600")
FLOWERS_PAUSE = 3.0
"""Seconds between two questions of Flower's SuperNode; `Pauses` shortens it."""
TRAINING = threading.Lock()
"""Held while a client trains, since threads must not train at the same time."""
FEDREMA = (sys.executable, "-m", "fedrema", "deploy")


def main(arguments: list[str]) -> int:
    """Measure and print; --quick only checks that it runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=5, help="processes that the clients share")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--quick", action="store_true")
    chosen, settings = parser.parse_known_args(arguments)
    if chosen.quick:
        chosen.clients, chosen.rounds, chosen.processes = 4, 3, 2
    names = [f"client-{number:03}" for number in range(chosen.clients)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "federation"
        counts = ("--rounds", str(chosen.rounds), "--least-clients", str(chosen.clients))
        place = ("--host", "127.0.0.1", "--port", str(free_port()), "--most-clients", str(max(chosen.clients, 100)))
        words = ("--deal", "--nodes", ",".join(names), *counts, *place, *LIMITS, *SETTINGS, *settings)
        subprocess.run([*FEDREMA, "init", str(folder), chosen.method, *words], check=True, stdout=subprocess.DEVNULL)
        before, started = os.getloadavg()[0], time.monotonic()
        with Usage(os.getpid(), {"load.py": "clients", **KINDS}) as usage:
            code = _run(folder, names, chosen.processes)
        if code:
            print((folder / "server" / "run.log").read_text()[-3000:], f"the server exited with code {code}")
            return 1
        records = Run(folder / "server" / "run").rounds
        up, down = (statistics.median(record[way] for record in records) for way in ("bytes_up", "bytes_down"))
        follower = AuditFollower(folder / "server")
        follower.refresh()
        sites = follower.sites.values()
        load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
        print(f"{chosen.clients} clients in {chosen.processes} processes ({load})")
        print(described(rounds_of(folder), usage))
        least = min(len(record.participants) for record in records)
        print(f"tensors per round: {up / 1e6:.2f} MB up, {down / 1e6:.2f} MB down; at least {least} participants")
        all_up, all_down = sum(site.bytes_up for site in sites) / 1e6, sum(site.bytes_down for site in sites) / 1e6
        print(f"all messages per round: {all_up / len(records):.2f} MB up, {all_down / len(records):.2f} MB down")
        print(f"the whole run took {time.monotonic() - started:.0f} s")
    return int(least < chosen.clients)


def _run(folder: Path, names: list[str], processes: int) -> int:
    """Run the server and all clients; return the exit code of the server."""
    clients = [
        SupervisedProcess(
            f"clients {first}",
            [sys.executable, __file__, "clients", str(folder), *names[first::processes]],
            log=folder / f"clients-{first}.log",
        )
        for first in range(processes)
    ]
    server = SupervisedProcess("server", [*FEDREMA, "server", str(folder / "server")], log=folder / "server.log")
    with stopped_on_exit(server, *clients):  # also if this program is stopped
        server.start()
        while server.is_running and (folder / "server.log").read_text().count("may participate") < len(names):
            time.sleep(0.5)  # Flower ends a process whose key is not registered yet
        for process in clients:
            process.start()
        return server.finish()


def serve_clients(folder: Path, names: list[str]) -> None:
    """Run some clients in this process, one thread each."""
    from fedrema.deploy.approval import approve, proposed_plan
    from fedrema.deploy.flower_heartbeats import shorten_heartbeats
    from fedrema.deploy.flower_transfers import shorten_pauses

    exit_with_parent()
    shorten_heartbeats()
    shorten_pauses()
    places = [NodeFolder.open(folder / "nodes" / name) for name in names]
    for place in places:
        place.kept.mkdir(mode=0o700, exist_ok=True)
        approve(place, proposed_plan(place))
    threads = [threading.Thread(target=_serve, args=(place,), daemon=True, name=place.name) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(place: NodeFolder) -> None:
    """Answer the server's messages as the SuperNode and the executor of a node do."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    from fedrema.deploy.approval import approved_plan
    from fedrema.deploy.flower_executor import Executor
    from fedrema.deploy.flower_supernode import Pauses

    executor = Executor(place, approved_plan(place))
    key = load_ssh_private_key((place.path / "node.key").read_bytes(), None)
    pauses = Pauses()
    with http_request_response(
        place.config.server,
        insecure=False,
        root_certificates=(place.path / "ca.crt").read_bytes(),
        authentication_keys=(key, key.public_key()),
    ) as connection:
        while True:
            if _answer(executor, connection):
                pauses.last_message = time.monotonic()
            else:
                pauses.sleep(FLOWERS_PAUSE)


def _answer(executor, connection) -> bool:  # type: ignore[no-untyped-def]
    """Answer a message if there is one; return whether there was."""
    from flwr.app import Context, RecordDict
    from flwr.common.config import get_fused_config_from_fab
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects

    from fedrema.deploy.flower_packing import pack, unpacked

    node, receive, send, get_run, get_fab, pull_object, push_object, confirm = connection
    if (found := receive()) is None:
        return False
    announced, tree = found
    run_id = announced.metadata.run_id
    if not hasattr(executor, "config") or executor.config[0] != run_id:
        run = get_run(run_id)
        executor.config = run_id, get_fused_config_from_fab(get_fab(run.fab_hash, run_id).content, run)
    message = pull_and_inflate_object_from_tree(
        tree, lambda part: pull_object(run_id, part), lambda part: confirm(run_id, part)
    )
    message.metadata.__dict__["_message_id"] = announced.metadata.message_id
    message.content = unpacked(message.content)
    with TRAINING:
        reply = executor.reply_to(message, Context(run_id, node, {}, RecordDict(), executor.config[1]))
    if not reply.has_error():
        pack(reply)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        objects = get_all_nested_objects(reply)
        parts, session = send(reply, get_object_tree(reply), 0.0)
        push_objects(
            objects, lambda part, content: push_object(run_id, session, part, content), object_ids_to_push=parts
        )
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["clients"]:
        serve_clients(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
