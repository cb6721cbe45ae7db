"""Parts of pages that the site takes from elsewhere: command line, settings, list of notebooks, data of figures.

A page has a comment where a part belongs, such as <!-- commands -->.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from sphinx.application import Sphinx

from fedrema.base.options import Purpose, purpose_of
from fedrema.cli import COMMANDS, main
from fedrema.cli.deploy import COMMANDS as DEPLOY_COMMANDS
from fedrema.cli.option_help import TITLES, options_of
from fedrema.config.settings import RUN_OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
MARKER = re.compile(r"^<!-- (commands|settings|notebooks|fedrema-steps) -->$", re.M)
PURPOSES = {
    Purpose.RESULT: "result",
    Purpose.SEED: "training seed",
    Purpose.RECORD: "records",
    Purpose.ROUNDS: "rounds",
    Purpose.SOURCE: "own data",
    Purpose.COMPUTATION: "computation",
    Purpose.PLACE: "place",
    Purpose.OUTPUT: "output",
    Purpose.OPERATION: "operation",
}


def commands() -> str:
    """Return the description of every command, from its parser."""
    described = (f"{_command(name)}\n\n" for name in COMMANDS)
    return "".join(described) + "".join(f"{_command(f'deploy {name}')}\n\n" for name in DEPLOY_COMMANDS)


def _command(name: str) -> str:
    parser, printed = help_of(name)
    level = "##" if " " not in name else "###"
    heading = f"{level} fedrema {name}"
    if parser is None:  # a command that chooses among others
        return f"{heading}\n\n```text\n{printed.strip()}\n```"
    usage = " ".join((parser.usage or "").split())
    lines = [heading, "", f"`{usage}`", "", escaped(parser.description or "")]
    for group in parser._action_groups:
        if group._group_actions:
            title = "" if group.title in ("Arguments", "Options") else f"\n**{group.title}**\n"
            lines += [title, "| option | meaning |", "|---|---|"]
            lines += [f"| {shown(action)} | {cell(_help(action))} |" for action in group._group_actions]
    return "\n".join(lines)


def help_of(name: str) -> tuple[argparse.ArgumentParser | None, str]:
    """Return the parser with which a command prints its help, and what it prints."""
    asked: list[argparse.ArgumentParser] = []
    printed = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser, file=None: asked.append(parser)),
        mock.patch.dict("os.environ", {"COLUMNS": "100"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([*name.split(), "--help"])
    return (asked[0] if asked else None), printed.getvalue()


def shown(action: argparse.Action) -> str:
    """Return an option as it is written, with the placeholder of its value."""
    metavar = str(action.metavar or "")
    if not action.option_strings:
        return f"`{metavar}`"
    value = f" {metavar}" if metavar and action.nargs != 0 else ""
    return ", ".join(f"`{option}{value}`".replace("|", r"\|") for option in action.option_strings)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def settings() -> str:
    """Return tables of the settings of every run."""
    lines = []
    for group, kind in RUN_OPTIONS.items():
        purposes = {field.name.replace("_", "-"): purpose_of(field) for field in dataclasses.fields(kind)}
        lines += [f"## {TITLES[group].removesuffix(' options')}", ""]
        lines += ["| setting | default | purpose | meaning |", "|---|---|---|---|"]
        for option in options_of(kind):
            row = (f"`{option.name}`", default_of(option.default), PURPOSES[purposes[option.name]])
            lines.append(f"| {' | '.join(row)} | {cell(option.meaning)} |")
        lines.append("")
    return "\n".join(lines)


def default_of(value: Any) -> str:
    """Return a default as a cell of a table."""
    if value in (None, "", ()):
        return "–"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"`{value}`"


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return escaped(" ".join(text.split())).replace("|", r"\|")


def escaped(text: str) -> str:
    """Return text in which nothing but `code` is Markdown."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if number % 2 else re.sub(r"([*_<\[\]~])", r"\\\1", part) for number, part in enumerate(parts))


def fedrema_steps() -> str:
    """Return the data of the figures in docs/how-fedrema-works.md, as an element of the page."""
    content = json.loads((DOCS / "figures" / "fedrema-steps.json").read_text())
    compact = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="fedrema-steps">{compact}</script>'


def notebooks() -> str:
    """Return the table of contents of the notebooks."""
    names = sorted(file.stem for file in (DOCS / "notebooks").glob("*.ipynb"))
    return "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "notebooks": notebooks,
    "fedrema-steps": fedrema_steps,
}


def read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Replace the comments of a page by what they stand for."""
    if Path(app.env.doc2path(docname)).suffix == ".md":
        content[0] = MARKER.sub(lambda found: PARTS[found[1]](), content[0])


def always(app: Sphinx, *_: object) -> Iterator[str]:
    """Yield the pages that are read again in every build, because they show what the code says."""
    for docname in app.env.found_docs:
        file = Path(app.env.doc2path(docname))
        if file.suffix == ".md" and MARKER.search(file.read_text()):
            yield docname


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", read)
    app.connect("env-get-outdated", lambda *given: list(always(*given)))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
