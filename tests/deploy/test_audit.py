"""The audit log: its chain, and what happens after crashes and edits."""

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from fedrema.deploy.audit import AuditLog, Entry, Event, Head, described, incomplete_line, verify
from fedrema.errors import BadInput
from tests.crashes import Crashes, rebuild

LINES = 6


@pytest.fixture
def log(tmp_path):
    log = AuditLog(tmp_path / "log", "north")
    log.append(Entry(Event.STARTED))
    for number in range(1, LINES):
        log.append(Entry(Event.REPLY_SENT, "north", "SHA256:x", number, 100 * number, "ab" * 32, "sent"))
    return log


def faults(log):
    return [(problem.line, problem.sentence) for problem in verify(log.file.parent)[1]]


def raw_lines(log):
    return log.file.read_bytes().splitlines(keepends=True)


def test_a_log_is_a_chain_of_json_lines(log):
    lines, problems = verify(log.file.parent)
    assert problems == []
    parsed = [json.loads(line) for line in raw_lines(log)]
    assert [line["line"] for line in parsed] == list(range(1, LINES + 1))
    assert parsed[0]["previous"] == "0" * 64
    assert all(after["previous"] == before["hash"] for before, after in itertools.pairwise(parsed))
    assert parsed[3]["time"].endswith("Z")
    assert lines[-1].head == log.head() == Head.parse(log.head_file.read_text())
    sentence = described(lines[3])
    assert sentence.endswith(
        "UTC north: reply sent in round 3, 300 bytes, SHA-256 abababababababab…, key SHA256:x; sent"
    )
    assert log.last(Event.STARTED).number == 1
    assert log.last(Event.STOPPED) is None


def test_several_entries_are_written_at_once_and_text_is_bounded(log):
    end = log.append(Entry(Event.REPLY_REJECTED, "north", decision="\x1b[2J\n" + "x" * 9999), Entry(Event.STOPPED))
    assert end.line == LINES + 2
    lines, problems = verify(log.file.parent)
    assert not problems
    assert lines[-2].entry.decision.startswith("\\x1b[2J\\nxx")
    assert len(lines[-2].entry.decision) == 500


@pytest.mark.parametrize("line", range(LINES))
def test_every_edited_line_is_named(log, line):
    lines = raw_lines(log)
    lines[line] = lines[line].replace(b'"who":"north"', b'"who":"south"')
    log.file.write_bytes(b"".join(lines))
    assert faults(log)[0][0] == line + 1
    assert "was changed" in faults(log)[0][1]


@pytest.mark.parametrize("line", range(LINES))
def test_a_line_with_a_recomputed_hash_is_named(log, line, tmp_path):
    """Somebody who knows the format computes a valid hash for the edited line."""
    from fedrema.deploy.audit import _sealed

    lines = raw_lines(log)
    before = json.loads(lines[line])["previous"]
    lines[line] = _sealed(Entry(Event.REPLY_SENT, "north", decision="never"), "north", Head(line, before)) + b"\n"
    log.file.write_bytes(b"".join(lines))
    (found,) = faults(log)
    assert found[0] == line + 1
    assert "replaced" in found[1]


@pytest.mark.parametrize("line", range(LINES))
def test_a_removed_line_is_named(log, line):
    lines = raw_lines(log)
    del lines[line]
    log.file.write_bytes(b"".join(lines))
    ((number, sentence),) = faults(log)
    if line == LINES - 1:
        assert (number, sentence) == (5, "The log ends at line 5, but line 6 is missing by audit.head.")
    else:
        assert number == line + 1
        assert "missing" in sentence


@pytest.mark.parametrize("line", range(LINES - 1))
def test_reordered_lines_are_named(log, line):
    lines = raw_lines(log)
    lines[line], lines[line + 1] = lines[line + 1], lines[line]
    log.file.write_bytes(b"".join(lines))
    assert faults(log)[0][0] == line + 1


@pytest.mark.parametrize("kept", range(LINES))
def test_truncation_is_detected_and_stays_detected(log, kept):
    log.file.write_bytes(b"".join(raw_lines(log)[:kept]))
    ((number, sentence),) = faults(log)
    assert number == kept
    assert f"The log ends at line {kept}" in sentence
    log.append(Entry(Event.STARTED))
    log.append(Entry(Event.STOPPED))
    ((number, sentence),) = faults(log)
    assert number == kept + 1
    assert "records earlier damage" in sentence


def test_a_missing_head_or_log_is_damage(log):
    log.head_file.unlink()
    assert "audit.head is missing" in faults(log)[0][1]
    log.append(Entry(Event.STOPPED))
    assert "audit.head is missing" in faults(log)[0][1]
    log.file.unlink()
    assert "The log ends at line 0" in faults(log)[0][1]


def test_a_replaced_log_differs_from_what_the_server_has_seen(log, tmp_path):
    seen = {3: verify(log.file.parent)[0][2].hash, 6: log.head().hash}
    assert verify(log.file.parent, seen)[1] == []
    for file in (log.file, log.head_file):
        file.unlink()
    for _ in range(4):
        log.append(Entry(Event.STARTED))
    assert verify(log.file.parent)[1] == []  # the log alone cannot show it
    sentences = [problem.sentence for problem in verify(log.file.parent, seen)[1]]
    assert sentences == [
        "Line 3 is not the one that the server has seen.",
        "Line 6 is missing, which the server has seen.",
    ]


def test_a_longer_log_with_another_beginning_is_damage(log):
    other = AuditLog(log.file.parent.parent / "other", "north")
    for _ in range(LINES + 2):
        other.append(Entry(Event.STARTED))
    log.file.write_bytes(other.file.read_bytes())
    assert "the log was replaced" in faults(log)[0][1]
    log.append(Entry(Event.STOPPED))
    assert "the log was replaced" in faults(log)[0][1]


def test_an_incomplete_last_line_is_removed_and_recorded(log):
    head, whole = log.head_file.read_bytes(), log.file.read_bytes()
    log.append(Entry(Event.STOPPED))
    longer = log.file.read_bytes()
    for size in range(len(whole) + 1, len(longer)):  # killed after this many bytes
        log.file.write_bytes(longer[:size])
        log.head_file.write_bytes(head)
        assert incomplete_line(log.file.parent)
        assert faults(log) == []
    log.append(Entry(Event.STARTED))
    lines, problems = verify(log.file.parent)
    assert not problems
    assert [line.entry.what for line in lines[-2:]] == [Event.REPAIRED, Event.STARTED]
    assert lines[-2].entry.bytes == len(longer) - 1 - len(whole)
    # The same file whose head was already written was truncated by somebody.
    log.file.write_bytes(log.file.read_bytes()[:-5])
    assert faults(log) != []


def test_a_complete_line_without_a_head_is_accepted(log):
    head = log.head_file.read_bytes()
    log.append(Entry(Event.STOPPED))
    log.head_file.write_bytes(head)  # killed between the two files
    assert faults(log) == []
    log.append(Entry(Event.STARTED))
    assert faults(log) == []
    assert len(raw_lines(log)) == LINES + 2


WRITER = """
import sys
from pathlib import Path
from fedrema.deploy.audit import AuditLog, Entry, Event
log = AuditLog(Path(sys.argv[1]), "north")
print("ready", flush=True)
while True:
    log.append(*[Entry(Event.REPLY_SENT, "north", decision="x" * 400)] * 20)
"""


def test_a_writer_that_is_killed_leaves_a_valid_log(tmp_path):
    generator = random.Random(0)
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            time.sleep(generator.uniform(0.0, 0.15))
            writer.send_signal(signal.SIGKILL)
        AuditLog(tmp_path, "north").append(Entry(Event.STARTED))
        assert verify(tmp_path)[1] == []


def test_no_crash_and_no_power_failure_damages_a_log(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    with Crashes(tmp_path / "disk", monkeypatch) as crashes:
        for _ in range(4):
            crashes.promise(
                AuditLog(tmp_path / "disk", "north").append(Entry(Event.STARTED), Entry(Event.STOPPED)).line
            )
    for tree, promise in crashes.states():
        folder = tmp_path / "rebuilt"
        rebuild(tree, folder)
        AuditLog(folder, "north").append(Entry(Event.STARTED))
        lines, problems = verify(folder)
        assert problems == []
        assert len(lines) > (promise or 0)  # nothing that was written is lost


def append_ten(folder):
    for _ in range(10):
        AuditLog(folder, "north").append(Entry(Event.STARTED))


def test_writers_take_turns(tmp_path):
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(append_ten, [tmp_path] * 3))
    lines, problems = verify(tmp_path)
    assert (len(lines), problems) == (30, [])


def test_a_log_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        AuditLog(tmp_path / "file", "north").append(Entry(Event.STARTED))
    with pytest.raises(BadInput, match="has no audit log"):
        verify(tmp_path)
    for text in ("", "3", "x:y", f"1:{'g' * 64}", f"²:{'a' * 64}"):
        with pytest.raises(BadInput, match="is not LINE:HASH"):
            Head.parse(text)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"\xff\xfe", b"[1]", b'{"line":1}', b'{"line":1,"hash":"' + b"0" * 64 + b'"}', b"{" * 9999],
)
def test_lines_of_any_content_are_reported(log, raw):
    lines = raw_lines(log)
    lines[2] = raw + b"\n"
    log.file.write_bytes(b"".join(lines))
    assert faults(log)[0][0] == 3
    log.file.write_bytes(raw + b"\n")
    log.append(Entry(Event.STARTED))  # a writer continues and records the damage
    assert faults(log)[0][0] == 1
