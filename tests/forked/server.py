"""Imports libraries once, then forks itself for every requested program, so that programs need not import them again.

A program is a separate process with the arguments, folder, environment and streams of its client. It exits like Python,
but without unloading the libraries. It is killed if its client is killed.
Run as `python server.py SOCKET LIBRARY...`; the server runs until its standard input is closed.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
import warnings
from pathlib import Path
from typing import Any

FIXED = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that Python or a library reads only at its start: programs have the server's values."""
EXECUTABLE = "FORKED_EXECUTABLE"
"""Variable with the `sys.executable` of programs, if it differs from the server's."""


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Serve requests; return in each program's process, with its request and streams."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("open", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    return fork_program(client)
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while os.wait():
            pass
    sys.exit()


def fork_program(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork the program and send its id and exit code to the client; return only in the program's process."""
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile().readline())
    if (program := os.fork()) == 0:
        return request, streams
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(ConnectionError):  # the client may have exited; select below detects that
        client.sendall(b"%d\n" % program)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, client], [], [])[0]:
        os.kill(program, signal.SIGKILL)  # the client was killed by SIGKILL, which it cannot forward
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(ConnectionError):
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def execute(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Apply streams, folder and environment, then execute a script, or the code or module after `-c` or `-m`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    for name in FIXED:
        assert environment.get(name) == os.environ.get(name), f"the server was started with another {name}"
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get(EXECUTABLE, sys.executable)
    sys.warnoptions = [option for option in environment.get("PYTHONWARNINGS", "").split(",") if option]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # as Python does at its start
    match arguments:
        case "-c", text, *rest:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(text, "<string>", "exec"), vars(main))
        case "-m", module, *rest:
            sys.argv, sys.path[0] = [module, *rest], folder
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case script, *_:
            sys.argv, sys.path[0] = arguments, str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")


def exit_code_of(arguments: list[str], **request: Any) -> int:
    """Execute a program; print its exception, if any, and return its exit code."""
    try:
        execute(arguments, **request)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def exit_now() -> None:
    """Exit without unloading libraries; all other exit handlers have been called."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    address, *libraries = sys.argv[1:]
    code = 0
    atexit.register(exit_now)  # registered first, so that it is called last
    for library in libraries:
        importlib.import_module(library)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork copies only one of several threads"
    gc.freeze()  # keeps imported objects in memory pages that all forks share
    request, streams = serve(address)
    code = exit_code_of(**request, streams=streams)
