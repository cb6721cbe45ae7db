"""Execute the notebooks in docs/notebooks, each in a new kernel and an empty folder, and write their outputs.

python tools/make_notebooks.py [NOTEBOOK …]
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
LOCAL_PATH = re.compile(r"/(?:work|root|home|tmp|Users)/[\w./-]+")


def main() -> None:
    """Execute the named notebooks, or all; an error in a cell ends the program."""
    # The kernel's commands are those of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONWARNINGS"] = "ignore::ResourceWarning"
    names = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    for file in names:
        started = time.perf_counter()
        execute(file)
        print(f"{file.name}: {time.perf_counter() - started:.0f} s, {file.stat().st_size / 1e3:.0f} kB", flush=True)


def execute(file: Path) -> None:
    """Execute a notebook and write it without what changes with every execution."""
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
    text = nbformat.writes(notebook)
    if found := LOCAL_PATH.search(text):
        sys.exit(f"make_notebooks: {file.name} would contain the local path {found[0]}.")
    file.write_text(text + "\n")


if __name__ == "__main__":
    main()
