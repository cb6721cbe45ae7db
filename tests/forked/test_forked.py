"""Programs forked by the server of tests/forked behave like programs started by Python."""

import os
import signal
import subprocess
import sys
import time

import pytest

STREAMS = (
    "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['MARK'], sys.stdin.read()); sys.stderr.write('ü')"
)
ENDS = (
    "import atexit, threading, time; atexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", STREAMS, "one", "two words"),
        ("-c", "import sys; sys.exit(3)"),
        ("-c", "import sys; sys.exit('why')"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
        ("-c", ENDS),
        ("-c", "import warnings; warnings.warn('once'); print('not reached')"),
        ("-c", "import own; print(own.__name__, __name__)"),
        ("own.py", "--flag"),
        ("-m", "own", "--flag"),
        ("-m", "fedrema", "nonsense"),
    ],
)
def test_a_forked_program_behaves_like_a_started_one(arguments, programs, tmp_path):
    (tmp_path / "own.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0] != '')")
    environment = {**os.environ, "MARK": "here", "PYTHONWARNINGS": "error"}

    def outcome(python):
        ended = subprocess.run(
            [python, *arguments], cwd=tmp_path, env=environment, input="given", capture_output=True, text=True
        )
        return (
            ended.returncode,
            ended.stdout,
            [line for line in ended.stderr.splitlines() if "  File " not in line][-1:],
        )

    assert outcome(programs / "python") == outcome(sys.executable)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_forked_program_ends_when_its_client_is_killed(number, programs):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(
        [programs / "python", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        program = int(process.stdout.readline())
        assert program != process.pid
        process.send_signal(number)
        assert process.stdout.read() == b""  # the program has closed the pipe too
    assert process.returncode == (
        1 if number == signal.SIGINT else -number
    )  # after KeyboardInterrupt, only the exit code differs from Python's
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(program, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the program is still running")
