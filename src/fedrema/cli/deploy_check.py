"""fedrema deploy audit, check: verify an audit log, and test a machine before and while it participates."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.base.terminal import print_safe
from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput, FedremaError

if TYPE_CHECKING:
    from fedrema.deploy.audit import Line


@dataclasses.dataclass(frozen=True)
class Audit:
    """Verify the audit log of a server or a node, and print its history in plain words.

    Exits with code 2 if lines were changed, removed or reordered, and names the first of them.
    """

    dir: Path = positional()
    """The server's folder, a node's folder, or the federation's folder: then all logs in it are verified."""
    site: str = ""
    """Print only what concerns this node."""
    expect: str = ""
    """LINE:HASH that the server has recorded for this node's log; the server's operator finds it with --site."""
    json: bool = False
    """Print the lines as JSON."""


def audit(arguments: list[str]) -> int:
    """Verify an audit log and print it."""
    args = parse_arguments(Audit, arguments, "fedrema deploy audit")
    from fedrema.deploy.audit import LOG_FILE, Head, Problem, seen_by_server, verify

    folders, expected = _folders(args.dir), Head.parse(args.expect) if args.expect else None
    if expected is not None and (len(folders) > 1 or _is_server(folders[0])):
        raise BadInput("--expect is for the audit log of one node: name its folder.")
    seen: dict[str, dict[int, str]] = {}
    faults: list[tuple[Path, Problem]] = []
    concerned = False
    for folder in folders:
        wanted = seen.get(folder.name, {}) if expected is None else {expected.line: expected.hash}
        lines, problems = verify(folder, wanted)
        seen = seen_by_server(lines) if _is_server(folder) else seen
        shown = [line for line in lines if not args.site or args.site in (line.entry.site, line.who)]
        concerned |= bool(shown)
        if args.json:
            for line in shown:
                print(json.dumps(dataclasses.asdict(line)))
        else:
            _print(
                folder,
                shown,
                seen.get(args.site, {}),
                "" if problems else f"its chain of {len(lines)} lines is complete",
            )
        faults += [(folder, problem) for problem in problems]
    if faults:
        folder, problem = faults[0]
        more = f" {len(faults) - 1} more problems follow." if len(faults) > 1 else ""
        raise FedremaError(f"{folder / LOG_FILE}: {problem.sentence}{more}")
    if args.site and not concerned:
        raise BadInput(f"--site {args.site!r}: no line concerns a node of this name.")
    return 0


def _print(folder: Path, lines: "list[Line]", seen: dict[int, str], verdict: str) -> None:
    """Print lines in plain words, and what is known about the log."""
    from fedrema.deploy.audit import Head, described, incomplete_line

    for line in lines:
        print_safe(described(line))
    if seen and _is_server(folder):
        print_safe(f"The last line of this node's own log that the server has seen: {Head(*max(seen.items()))}")
    if incomplete_line(folder):
        print_safe(f"{folder}: the last line is incomplete, because its writer was killed; the next one removes it.")
    if verdict:
        print_safe(f"{folder}: {verdict}.")


def _is_server(folder: Path) -> bool:
    return (folder / "server.toml").is_file()


def _folders(path: Path) -> list[Path]:
    """Return the folders with audit logs, the server's first."""
    if _is_server(path / "server"):
        nodes = sorted(file.parent for file in (path / "nodes").glob("*/node.toml"))
        return [path / "server", *(node for node in nodes if (node / "audit.head").is_file())]
    if not _is_server(path) and not (path / "node.toml").is_file():
        raise BadInput(f"{path} has no server.toml and no node.toml: name the folder of a server or a node.")
    return [path]


@dataclasses.dataclass(frozen=True)
class Check:
    """Test whether the server or a node can participate: names, ports, certificates, clock, versions, disk, data.

    Nothing is changed, and a node does not join. Exits with code 2 if a test fails, and prints what to do.
    """

    dir: Path = positional()
    """The server's folder, or a node's folder."""
    server: str | None = None
    """For a node: address of the server as host:port, instead of the one in node.toml."""


def check(arguments: list[str]) -> int:
    """Test a server or a node."""
    args = parse_arguments(Check, arguments, "fedrema deploy check")
    from fedrema.deploy.check import check_node, check_server
    from fedrema.deploy.folder import NodeFolder, ServerFolder

    if (args.dir / "node.toml").is_file():
        folder = NodeFolder.open(args.dir)
        results = check_node(folder if args.server is None else folder.with_server(args.server))
    else:
        results = check_server(ServerFolder.open(args.dir))
    failed = 0
    for result in results:
        failed += not result.passed
        print_safe(f"{'ok    ' if result.passed else 'FAILED'} {result}", flush=True)
    print(f"{failed} of the tests failed." if failed else "All tests passed.")
    return 2 if failed else 0
