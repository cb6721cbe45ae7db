"""After a real run: a backup is restored with the documented commands, and changes of audit logs are detected."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.cli import main
from fedrema.deploy.audit import verify
from fedrema.deploy.services import flower_environment
from fedrema.runs.run import Run
from tests.network.federation_of_processes import Processes

pytestmark = pytest.mark.network
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def documented_commands():
    """Return the commands of the section about backups."""
    section = PAGE.read_text().split("### Restore from a backup\n")[1].split("\n## ")[0]
    lines = re.search(r"```bash network\n(.*?)```", section, re.S)[1].splitlines()
    backup, lose, restore, start = lines
    return backup, lose, restore, start


def test_a_backup_is_restored_with_the_documented_commands(tmp_path):
    backup, lose, restore, start = documented_commands()

    def execute(command):
        environment = flower_environment(tmp_path / "unused", tmp_path)
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=environment, timeout=300)

    (tmp_path / "runs").mkdir()
    # Ditto: nodes have a state of their own, which must go back as well.
    with Processes(tmp_path / "runs" / "demo", "ditto", rounds=6, least_clients=3) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 2)
        execute(backup)  # the server is running
        assert network.finish() == 0, network.output("server")
        run = network.folder / "server" / "run"
        expected = {name: value.clone() for name, value in Run(run).state().params.merged().items()}
        records = [record["client_accuracy"] for record in network.records()]
        for command in (lose, restore, start):  # the nodes are running
            execute(command)
        repeated = re.search(
            r"the run resumes after round (\d) of 6", (network.folder / "server" / "run.log").read_text()
        )
        assert 2 <= int(repeated[1]) < 6
        assert [record["client_accuracy"] for record in network.records()] == records
        again = Run(run).state().params.merged()
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[name], value) for name, value in expected.items())
        assert main(["deploy", "audit", str(network.folder)]) == 0


def test_changes_of_audit_logs_are_detected(tmp_path, capsys):
    with Processes(tmp_path / "federation", "fedavg", nodes=2, rounds=2) as network:
        network.start_all()
        assert network.finish() == 0, network.output("server")
    server, node = network.folder / "server", network.node("node-1")
    assert main(["deploy", "audit", str(network.folder)]) == 0
    seen = [line for line in verify(server)[0] if line.entry.site == "node-1" and line.entry.node_line][-1].entry

    def outcome(*arguments):
        capsys.readouterr()
        code, printed = main(["deploy", "audit", *arguments]), capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    log = server / "audit.jsonl"
    honest = log.read_text()
    number = next(number for number, line in enumerate(honest.splitlines(), 1) if '"reply received"' in line)
    line = honest.splitlines(keepends=True)[number - 1]
    log.write_text(honest.replace(line, line.replace('"round":1', '"round":2')))
    code, printed = outcome(str(server))
    assert (code, f"Line {number} was changed" in printed) == (2, True), printed
    log.write_text(honest.replace(line, ""))
    code, printed = outcome(str(server))
    assert (code, "lines are missing, added or reordered" in printed) == (2, True), printed
    log.write_text(honest)
    assert outcome(str(server))[0] == 0
    # The end of a node's log is cut off, together with what its own folder knows about it.
    log = node / "audit.jsonl"
    kept = log.read_text().splitlines(keepends=True)[: seen.node_line - 1]
    log.write_text("".join(kept))
    assert outcome(str(node))[0] == 2
    lines, _ = verify(node)
    (node / "audit.head").write_text(f"{lines[-1].head}\n")
    assert outcome(str(node))[0] == 0
    code, printed = outcome(str(node), "--expect", f"{seen.node_line}:{seen.node_hash}")
    assert (code, "which the server has seen" in printed) == (2, True), printed
