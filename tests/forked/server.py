"""Starts programs without the wait: forks each from a process that has imported the libraries and done nothing else.

A program is a process of its own, with the arguments, folder, environment and streams of whoever asked for it. It ends
as Python ends, but leaves it to the system to clear away the libraries; it is killed when whoever asked is.
Run as `python server.py SOCKET LIBRARY...`, the server works until its standard input is closed.
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
"""Variables that are looked at once, when Python or a library starts: they are the server's."""
EXECUTABLE = "FORKED_EXECUTABLE"
"""Names the Python with which a program starts others, where it is not the usual one."""


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Serve; returns in each program's process, with what was asked for and its streams."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        print("open", flush=True)
        while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:
            asker, _ = door.accept()
            with asker:
                if os.fork() == 0:
                    door.close()
                    return keep(asker)
    with contextlib.suppress(ChildProcessError):  # until nobody is left
        while os.wait():
            pass
    sys.exit()


def keep(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork the program, tell its id and how it ended; returns in the program's process alone."""
    _, streams, _, _ = socket.recv_fds(asker, 1, 3)
    order = json.loads(asker.makefile().readline())
    if (program := os.fork()) == 0:
        return order, streams
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(ConnectionError):  # who asked may be gone already; select tells
        asker.sendall(b"%d\n" % program)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, asker], [], [])[0]:
        os.kill(program, signal.SIGKILL)  # as whoever asked, who cannot pass that on
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(ConnectionError):
        asker.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Take on what was asked for, then be the program: a script, or what follows `-c` or `-m`."""
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
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # as it does itself when Python starts
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


def code_of(arguments: list[str], **circumstances: Any) -> int:
    """Return the code with which a program ends, shown as Python shows it."""
    try:
        become(arguments, **circumstances)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave() -> None:
    """End at once; what was to be done at the end has been done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    address, *libraries = sys.argv[1:]
    code = 0
    atexit.register(leave)  # the first of all is called last
    for library in libraries:
        importlib.import_module(library)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "of several threads a fork has only one"
    gc.freeze()  # what has been imported stays in memory that all share
    order, streams = serve(address)
    code = code_of(**order, streams=streams)
