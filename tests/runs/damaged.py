"""Small runs, ways to damage them, and the commands that read them."""

import contextlib
import io
import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fedrema
from fedrema.cli import main
from fedrema.page.live_runs import LiveRuns

SETTINGS = {"clients": 4, "samples": 20, "epochs": 1, "hidden": 6, "checkpoint_every": 2, "device": "cpu"}
NOT_READ = ("report.html", "curves.png", "running.json")
"""Files that no command reads: reports, plots, and the note of the writing process."""


class Killed(Exception):
    """Raised to end a run without cleanup, like kill -9."""


def killed_in(number: int) -> Callable[[object], None]:
    """Return a watcher that aborts a run after a round."""

    def watch(result: object) -> None:
        if result.record.round == number:  # type: ignore[attr-defined]
            raise Killed

    return watch


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return every file below a folder by its path, and every folder as None."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def damages(content: bytes, many: bool) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield ways to damage a file, by name: cut off, emptied, removed, made a folder, one bit changed."""

    def written(new: bytes) -> Callable[[Path], None]:
        return lambda file: file.write_bytes(new) and None

    def folder(file: Path) -> None:
        file.unlink()
        file.mkdir()

    yield "removed", Path.unlink
    yield "folder", folder
    yield "empty", written(b"")
    size = len(content)
    cuts = {1, size // 4, size // 2, 3 * size // 4, size - 40, size - 1} if many else {size // 2, size - 1}
    for place in sorted(cut for cut in cuts if 0 < cut < size):
        yield f"cut-{place}", written(content[:place])
    flips = 40 if many else 3
    for number in range(flips):
        place = (number * size + size // 2) // flips if size else 0
        if place < size:
            bit = 1 << (number % 8)
            yield f"bit-{place}", written(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])


def command(*arguments: object) -> tuple[int, str, str]:
    """Return exit code, output and error output of a command; an exception becomes a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except Exception:
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()


def timeless(folder: Path) -> object:
    """Return the results of a run without times."""
    run = fedrema.load(folder)
    records = [replace(record, seconds={}) for record in run.rounds]
    summary = {name: value for name, value in run.summary.items() if name != "seconds"}
    params = {name: value.numpy().tobytes() for name, value in run.state().params.own.items()}
    matrices = {
        number: {name: matrix.tobytes() for name, matrix in found.items()} for number, found in run.relations().items()
    }
    return records, summary, params, matrices


def resume(folder: Path, out: Path) -> tuple[int, object, str]:
    code, _, complaint = command("resume", folder, "--quiet")
    return code, timeless(folder) if code == 0 else None, complaint


def compare(folder: Path, out: Path) -> tuple[int, object, str]:
    picture = out.with_suffix(".png")
    code, table, complaint = command("compare", folder, "--format", "markdown", "--plot", picture)
    return code, table, complaint.replace(f"Curves: {picture}\n", "")


def report(folder: Path, out: Path) -> tuple[int, object, str]:
    page = out.with_suffix(".html")
    code, _, complaint = command("report", folder, "--out", page)
    return code, shown(page.read_text()) if code == 0 else None, complaint


def shown(page: str) -> object:
    """Return the data of a page without times."""
    parts = []
    for name in ("main", "clients", "relations", "verdict"):
        text = page.partition(f'id="part-{name}">')[2].partition("</script>")[0]
        parts.append(without_clock(json.loads(text)))
    return parts


def without_clock(part: dict) -> dict:
    for run in part.get("runs", []):
        if run:
            run.pop("status", None)
    return part | {"made": ""}


def export(folder: Path, out: Path) -> tuple[int, object, str]:
    shutil.rmtree(out, ignore_errors=True)
    code, _, complaint = command("export", folder, "--out", out)
    return code, contents(out) if code == 0 else None, complaint


def export_again(folder: Path, out: Path) -> tuple[int, object, str]:
    code, _, complaint = command("export", folder, "--overwrite")
    return code, contents(folder / "models") if code == 0 else None, complaint


def personalize(folder: Path, out: Path) -> tuple[int, object, str]:
    model = out.with_suffix(".safetensors")
    model.unlink(missing_ok=True)
    code, text, complaint = command("personalize", folder, "--data", folder.parent / "new.npz", "--out", model)
    return code, (text.partition("Model:")[0], model.read_bytes()) if code == 0 else None, complaint


def verdict(folder: Path, out: Path) -> tuple[int, object, str]:
    matrix = out.with_suffix(".csv")
    code, _, complaint = command("verdict", folder, "--matrix", matrix)
    return code, matrix.read_text() if code == 0 else None, complaint


def watch(folder: Path, out: Path) -> tuple[int, object, str]:
    """Request every part as the page does; a run that is left out counts as refused, with the note as its reason."""
    live = LiveRuns(folder)
    try:
        for _ in range(2):  # an error found in one part is reported in another
            live.refresh()
            parts = [without_clock(live.part(name)) for name in live.PARTS]
            live.started = dict.fromkeys(live.PARTS, float("-inf"))
    except Exception:
        return 1, None, traceback.format_exc()
    if not parts[0]["runs"]:
        return 2, None, "".join(f"fedrema: {note}\n" for note in parts[0]["notes"])
    return 0, parts, ""


COMMANDS = {
    each.__name__: each for each in (resume, compare, report, export, export_again, personalize, verdict, watch)
}
