"""Programs that start at once, for tests that start many: see server.py."""

import contextlib
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
)
"""What commands import sooner or later, fedrema itself left out: each imports that by itself, as it would anywhere.

None may start a thread; the server looks.
"""


@contextlib.contextmanager
def programs() -> Iterator[Path]:
    """Yield a folder with a `python` and a `fedrema` that start at once."""
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
        with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            yield Path(folder)
            process.communicate()  # it serves until nothing more can come
