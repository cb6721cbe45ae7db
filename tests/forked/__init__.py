"""A `python` and a `fedrema` command that start quickly, for tests that start many processes.

Importing torch takes seconds. A server process (server.py) imports it and other libraries once, and forks itself for
every program; the commands are small clients (client.py) that ask the server for a program and wait for its exit.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = (
    *("torch", "torch.fx.experimental.symbolic_shapes", "safetensors.torch", "sklearn.datasets", "scipy.stats"),
    *(
        "clarabel",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "pooch",
        "rich.progress",
        "rich.live",
    ),
    *("fedrema.cli.run", "fedrema.cli.experiment", "fedrema.page.render"),
)
"""Modules that the server imports in advance; a program imports only what is missing.

None may start a thread, because a fork copies only one; the server checks that.
"""


@contextlib.contextmanager
def programs() -> Iterator[Path]:
    """Start the server; yield a folder with a `python` and a `fedrema` that fork from it."""
    command = shutil.which("fedrema", path=str(Path(sys.executable).parent))
    assert command is not None
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        address = f"{folder}/socket"
        client = [sys.executable, "-IS", str(HERE / "client.py"), address]
        for name, words in (("python", client), ("fedrema", [*client, command])):
            file = Path(folder, name)
            file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            file.chmod(0o755)
        server = [sys.executable, HERE / "server.py", address, *LIBRARIES]
        # scikit-learn imports pandas, and pandas imports pyarrow, whose allocator would start a thread.
        environment = {**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            yield Path(folder)
            process.communicate()  # closes its standard input, whereupon the server exits
