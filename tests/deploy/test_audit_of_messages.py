"""The audit logs of a server and its nodes, and fedrema deploy audit."""

import json

import pytest

pytest.importorskip("flwr")

from fedrema.cli import main
from fedrema.deploy.audit import AuditLog, Entry, Event, Head, verify
from fedrema.deploy.audit_service import audited_service, settings_change
from fedrema.deploy.folder import ServerFolder
from fedrema.errors import BadInput
from tests.deploy.test_status import NAMES, conducted


@pytest.fixture
def place(tmp_path, capsys):
    words = ["--rounds", "2", "--epochs", "1", "--samples", "40", "--hidden", "6"]
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", "--deal", "--nodes", ",".join(NAMES), *words]) == 0
    capsys.readouterr()
    return ServerFolder.open(tmp_path / "f")


def lose_reply(node, reply):
    """The reply of south to round 2 is lost."""
    return None if node == 8 and reply.metadata.group_id == "2" else reply


def events(lines):
    return [(str(line.entry.what), line.entry.site, line.entry.round) for line in lines]


def test_both_sides_record_the_same_messages(place):
    conducted(place, lose_reply)
    server, problems = verify(place.path)
    assert problems == []
    assert events(server)[:9] == [
        *(("joined", name, 1) for name in NAMES),
        *(("request sent", name, 1) for name in NAMES),
        *(("reply received", name, 1) for name in NAMES),
    ]
    assert ("reply rejected", "south", 2) in events(server)
    for name in NAMES:
        node, problems = verify(place.path.parent / "nodes" / name)
        assert problems == []
        assert str(node[1].entry.what) == "settings changed"
        assert events([*node[:1], *node[2:]]) == [
            (what, name, number) for number in (1, 2, 3) for what in ("request received", "reply sent")
        ]
        assert all(line.who == name and (not line.entry.site or line.entry.key.startswith("SHA256:")) for line in node)
        # What one side has sent is what the other one has received, by size and digest.
        sent = {(line.entry.bytes, line.entry.sha256) for line in node if line.entry.what is Event.REPLY_SENT}
        arrived = {
            (line.entry.bytes, line.entry.sha256)
            for line in server
            if line.entry.what is Event.REPLY_RECEIVED and line.entry.site == name
        }
        assert arrived <= sent
        assert len(arrived) == (2 if name == "south" else 3)
        asked = {line.entry.sha256 for line in node if line.entry.what is Event.REQUEST_RECEIVED}
        assert asked == {
            line.entry.sha256 for line in server if line.entry.what is Event.REQUEST_SENT and line.entry.site == name
        }


def test_the_command_prints_a_sites_history_and_compares_the_logs(place, capsys):
    conducted(place)
    federation, node = place.path.parent, place.path.parent / "nodes" / "north"
    assert main(["deploy", "audit", str(federation), "--site", "north"]) == 0
    printed = capsys.readouterr().out
    assert "server: reply received in round 1 (north), " in printed
    assert "north: reply sent in round 2, " in printed
    assert "south" not in printed.replace("nodes/south", "")
    assert main(["deploy", "audit", str(place.path), "--site", "north"]) == 0
    seen = capsys.readouterr().out.split("that the server has seen: ")[1].split()[0]
    assert Head.parse(seen).line == 7
    assert main(["deploy", "audit", str(node), "--expect", seen]) == 0
    capsys.readouterr()
    assert main(["deploy", "audit", str(node), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["entry"]["what"] == "request received"
    # A log that was written anew is valid by itself, but not what the server has seen.
    for file in ("audit.jsonl", "audit.head"):
        (node / file).unlink()
    AuditLog(node, "north").append(Entry(Event.STARTED))
    assert main(["deploy", "audit", str(node)]) == 0
    capsys.readouterr()
    for arguments in ([str(node), "--expect", seen], [str(federation)]):
        assert main(["deploy", "audit", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "Line " in error
        assert "that the server has seen" in error or "which the server has seen" in error


def test_an_edited_line_ends_the_command_with_code_2(place, capsys):
    conducted(place)
    log = place.path / "audit.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace("south", "north")
    log.write_text("".join(lines))
    assert main(["deploy", "audit", str(place.path)]) == 2
    error = capsys.readouterr().err
    assert "Line 5 was changed: it does not match its own hash." in error
    assert error.count("\n") == 1


def test_a_node_whose_log_was_deleted_is_recorded_by_the_server(place, caplog):
    def spoil(node, reply):
        if node == 7 and reply.metadata.group_id == "1":
            for file in ("audit.jsonl", "audit.head"):
                (place.path.parent / "nodes" / "north" / file).unlink()
        return reply

    conducted(place, spoil)
    lines, problems = verify(place.path)
    (damage,) = [line for line in lines if line.entry.what is Event.DAMAGED_AT_NODE]
    assert damage.entry.site == "north"
    assert problems[0].line == damage.number
    assert "its audit log ends at line 3, but the server has seen line 3" in caplog.text


@pytest.mark.parametrize("record", [{"line": -1, "hash": "a" * 64}, {"line": 1, "hash": "x"}, {"hash": [1]}, {}])
def test_a_malformed_head_is_ignored(place, record):
    from flwr.app import ConfigRecord

    def spoil(node, reply):
        if not reply.has_error():
            reply.content["audit"] = ConfigRecord(record)
        return reply

    conducted(place, spoil)
    lines, problems = verify(place.path)
    assert problems == []
    assert all(line.entry.node_line is None for line in lines)


def test_a_refused_request_is_recorded(place):
    (place.path.parent / "nodes" / "south" / "data.npz").write_bytes(b"x")
    conducted(place)
    node, _ = verify(place.path.parent / "nodes" / "south")
    assert [line.entry.what for line in (node[0], node[2])] == [Event.REQUEST_RECEIVED, Event.REQUEST_REFUSED]
    sent = "data: its data cannot be used in this federation, and its node.log says why"
    assert node[2].entry.decision == f"sent instead of a reply: {sent}"


def test_services_record_start_stop_and_settings(tmp_path):
    log = AuditLog(tmp_path, "server")
    for rounds in (3, 3, 5):
        with audited_service(log, settings_change(log, {"method": "fedavg", "rounds": rounds})):
            pass
    with pytest.raises(BadInput), audited_service(log):
        raise BadInput("no room")
    what = [str(line.entry.what) for line in verify(tmp_path)[0]]
    assert what == [
        *("started", "settings changed", "stopped", "started", "stopped"),
        *("started", "settings changed", "stopped", "started", "stopped"),
    ]
    changed = log.last(Event.SETTINGS_CHANGED)
    assert changed.entry.decision == "other settings than before: method fedavg, rounds 5"
    assert log.last(Event.STOPPED).entry.decision == "no room"


def test_folders_without_a_log(place, tmp_path, capsys):
    assert main(["deploy", "audit", str(place.path)]) == 2
    assert "has no audit log" in capsys.readouterr().err
    assert main(["deploy", "audit", str(tmp_path)]) == 2
    assert "has no server.toml and no node.toml" in capsys.readouterr().err
    conducted(place)
    assert main(["deploy", "audit", str(place.path), "--site", "nobody"]) == 2
    assert "no line concerns a node of this name" in capsys.readouterr().err
    assert main(["deploy", "audit", str(place.path), "--expect", "1:x"]) == 2


def test_an_exported_model_is_recorded(place):
    conducted(place)
    node = place.path.parent / "nodes" / "north"
    assert main(["deploy", "model", str(node)]) == 0
    assert AuditLog(node, "north").last(Event.MODEL_EXPORTED).entry.sha256
    assert main(["export", str(place.run)]) == 0
    assert "models" in AuditLog(place.path, "server").last(Event.MODEL_EXPORTED).entry.decision
