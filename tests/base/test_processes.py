"""Supervised processes: restarts, stopping with descendants, pipes, log tails."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, stopped_on_exit
from tests.fixtures import supervised_python


def until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_process_that_exits_is_restarted_after_a_delay(tmp_path):
    one = supervised_python(tmp_path, "print('it hurts')")
    with stopped_on_exit(one):
        assert one.supervise() == ""
        sentence = until(one.supervise)
        first = one.process.pid
        assert sentence == "it has exited (it hurts); it restarts in 1 s"
        assert one.supervise() == ""
        assert one.process.pid == first  # not immediately
        until(lambda: one.supervise() or one.process.pid != first)
        assert until(one.supervise).endswith("in 2 s")


def test_descendants_of_a_process_are_stopped_with_it(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        "print(other.pid, flush=True)\ntime.sleep(99)\n"
    )
    one = supervised_python(tmp_path, code)
    with stopped_on_exit(one):
        one.supervise()
        grandchild = int(until(lambda: one.log.read_text().strip()))
        os.kill(grandchild, 0)
    until(lambda: not _alive(grandchild))
    assert one.process.poll() is not None


def test_a_stop_request_stops_the_processes(tmp_path):
    one = supervised_python(tmp_path, "import time; time.sleep(99)")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopRequested), stopped_on_exit(one):  # noqa: PT012
        one.supervise()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert one.process.poll() is not None
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_log_tail_returns_complete_lines_once(tmp_path):
    file = tmp_path / "log"
    file.write_text("long ago\n")
    tail = LogTail(file)
    assert tail.lines() == []
    with file.open("a") as stream:
        stream.write("one\ntwo\nthr")
    assert tail.lines() == ["one", "two"]
    with file.open("a") as stream:
        stream.write("ee\n")
    assert tail.lines() == ["three"]
    file.write_text("new\n")
    assert tail.lines() == ["new"]
    assert LogTail(tmp_path / "none").lines() == []


def test_the_error_stream_is_forwarded_and_its_last_line_kept():
    forwarded = []
    code = "import sys; print('out'); print('first', file=sys.stderr); print('second', file=sys.stderr); sys.exit(3)"
    one = SupervisedProcess("it", [sys.executable, "-c", code], forward=forwarded.append)
    one.start()
    assert one.finish() == 3
    assert forwarded == ["first", "second"]
    assert one.last_line() == "second"


def test_lines_are_exchanged_through_pipes():
    code = "import sys\nfor line in sys.stdin:\n    print(line.strip().upper(), flush=True)"
    one = SupervisedProcess("it", [sys.executable, "-c", code], {**os.environ, "PYTHONUTF8": "1"}, pipes=True)
    with stopped_on_exit(one):
        one.start()
        one.send("äpfel")
        assert next(one.received()) == "ÄPFEL"
        assert one.is_running
        assert one.finish() == 0


def test_sending_to_a_process_that_has_exited_is_no_error():
    one = SupervisedProcess("it", [sys.executable, "-c", ""], pipes=True)
    one.start()
    one.process.wait()
    one.send("one")
    one.send("two")
    assert list(one.received()) == []
    assert one.finish() == 0


def test_a_requested_stop_leaves_time_to_finish():
    code = (
        "import signal, sys, time\n"
        "def stop(*_):\n    print('finished', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(99)\n"
    )
    one = SupervisedProcess("it", [sys.executable, "-c", code], pipes=True)
    with stopped_on_exit(one):
        one.start()
        lines = one.received()
        assert next(lines) == "ready"
        one.request_stop()
        assert list(lines) == ["finished"]
        assert one.finish() == 0


def test_a_process_that_ignores_sigterm_is_killed():
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(99)\n"
    one = SupervisedProcess("it", [sys.executable, "-c", code], pipes=True, patience=0.2)
    one.start()
    assert next(one.received()) == "1"
    one.stop()
    assert one.process.returncode == -signal.SIGKILL


def test_a_process_exits_when_its_parent_is_killed():
    child = (
        "import os, time\nfrom fedrema.base.processes import exit_with_parent\n"
        "exit_with_parent()\nprint(os.getpid(), flush=True)\ntime.sleep(99)\n"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], stderr=subprocess.DEVNULL)\n"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as one:
        grandchild = int(one.stdout.readline())
        one.kill()
        until(lambda: not _alive(grandchild))


def test_a_process_exits_also_if_its_parent_was_killed_during_its_imports(tmp_path):
    child = (
        "import os, pathlib, sys, time\nprint(os.getpid(), file=sys.stderr, flush=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'killed')!r}).exists(): time.sleep(0.05)\n"
        "from fedrema.base.processes import exit_with_parent\nexit_with_parent()\ntime.sleep(99)\n"
    )
    parent = (
        "import sys, time\nfrom fedrema.base.processes import SupervisedProcess\n"
        f"arguments = [sys.executable, '-c', {child!r}]\n"
        "SupervisedProcess('it', arguments, forward=lambda line: print(line, flush=True)).start()\n"
        "time.sleep(99)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as one:
        grandchild = int(one.stdout.readline())
        one.kill()
        one.wait()
    (tmp_path / "killed").touch()
    until(lambda: not _alive(grandchild))


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
