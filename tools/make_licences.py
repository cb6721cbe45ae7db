"""Write docs/licences.md: the licences of all packages that fedrema and its extras install, from their metadata."""

import email.message
import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedrema.reporting.tables import markdown_lines

PAGE = Path(__file__).parents[1] / "docs" / "licences.md"
EXTRAS = ("watch", "deploy", "privacy", "ray", "tensorboard", "mlflow", "wandb", "federations", "parquet")
INTRODUCTION = """# Licences of dependencies

fedrema is licensed under Apache-2.0. Its package contains one file of another project: Plotly's JavaScript for
Cartesian charts (`page/plotly/plotly-cartesian.min.js`, MIT), which every report contains. All other dependencies are
separate packages that `pip` installs. The tables list them with the licences that their metadata names, including
those that dependencies need in turn, on Linux with CPython 3.11.
`python tools/make_licences.py` writes this page; it is no legal advice.
"""


def main() -> None:
    """Write the page."""
    core, missing = closure("fedrema", "")
    lines = [INTRODUCTION, f"## Core ({len(core)} packages)", "", *table(core)]
    shown = set(core)
    for extra in EXTRAS:
        found, absent = closure("fedrema", extra)
        missing |= absent
        more = {name: value for name, value in found.items() if name not in core}
        lines += ["", f"## Extra {extra}", ""]
        lines += table(more) if more else ["No further package." if not absent else "Not installed here."]
        shown |= set(found)
    if missing:
        names = ", ".join(sorted(missing))
        lines += ["", f"Not installed when this page was written, so that their licences are not listed: {names}."]
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"{PAGE.name}: {len(shown)} packages, {len(missing)} not installed")


def closure(package: str, extra: str) -> tuple[dict[str, importlib.metadata.Distribution], set[str]]:
    """Return what a package with an extra requires, directly or not, and which of these are not installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    missing: set[str] = set()
    seen = set()
    waiting = [(package, "")] + ([(package, extra)] if extra else [])
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.add(name)
            continue
        if name != package:
            found[name] = distribution
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": wanted}):
                waiting += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return found, missing


def table(found: dict[str, importlib.metadata.Distribution]) -> list[str]:
    """Return a Markdown table of packages."""
    rows = [(name, each.version, licence(each.metadata)) for name, each in sorted(found.items())]
    return markdown_lines(("package", "version", "licence"), rows, texts=3)


def licence(metadata: email.message.Message) -> str:
    """Return the licence that metadata names: as an expression, by classifiers, or in a short text."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [value for value in metadata.get_all("Classifier") or () if value.startswith("License ::")]
    names = [value.rpartition(" :: ")[2] for value in classifiers if value != "License :: OSI Approved"]
    if names:
        return ", ".join(names)
    text = (metadata.get("License") or "").strip()
    first = re.split(r"\n", text)[0]
    return first if 0 < len(first) <= 80 else "not stated in its metadata"


if __name__ == "__main__":
    main()
