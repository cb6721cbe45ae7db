"""Links from the documentation to files outside of docs/.

README, changelog and the guides for contributors are pages of the site, without a copy in docs/: a page of docs/ that
consists of a table of contents, or of one line, is preceded by their text. Every other linked file of the repository,
such as a method's source, becomes a page with highlighted code, and a linked folder a list of its files.
"""

import html
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).parents[2]
TEXTS = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "report-a-fault": "SECURITY.md",
}
"""Pages of the site whose text is a file at the root of the repository."""
SCHEME = "repository:"
LINK = re.compile(r"(?<!!)(\[(?:[^\]\[]|\[[^\]]*\])*\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)(?=\))")
FENCE = re.compile(r"(^```.*?^```$)", re.S | re.M)
LARGEST = 400_000
"""Larger files are not shown."""
log = logging.getLogger(__name__)


def rewritten(text: str, folder: Path, page: Path) -> str:
    """Return Markdown from a folder of the repository with its links changed for a page in docs/."""

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if re.match(r"[a-z]+:", target):
            return found[0]
        file = (folder / target).resolve()
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else target
        for docname, source in TEXTS.items():
            if name == source:
                return f"{found[1]}{_relative(ROOT / 'docs' / f'{docname}.md', page)}{found[3] or ''}"
        if file.is_relative_to(ROOT / "docs") or not file.exists():
            return f"{found[1]}{_relative(file, page)}{found[3] or ''}"
        return f"{found[1]}{SCHEME}{name}"

    def picture(found: re.Match[str]) -> str:
        return f"{found[1]}{_relative((folder / found[2]).resolve(), page)}"

    parts = FENCE.split(text)  # every second part is a fence
    return "".join(
        part if number % 2 else PICTURE.sub(picture, LINK.sub(link, part)) for number, part in enumerate(parts)
    )


def _relative(file: Path, page: Path) -> str:
    return posixpath.relpath(file.as_posix(), page.parent.as_posix())


def read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Put the text of a page together, and rewrite its links."""
    page = Path(app.env.doc2path(docname))
    if page.suffix != ".md":
        return
    text = rewritten(content[0], page.parent, page)
    if docname in TEXTS:
        app.env.note_dependency(str(ROOT / TEXTS[docname]))
        text = rewritten((ROOT / TEXTS[docname]).read_text(), ROOT, page) + "\n" + text
    content[0] = text


def resolve(app: Sphinx, tree: nodes.document, docname: str) -> None:
    """Point links to files of the repository to their pages."""
    here = app.builder.get_target_uri(docname)
    for reference in tree.findall(nodes.reference):
        if reference.get("refuri", "").startswith(SCHEME):
            name = reference["refuri"].removeprefix(SCHEME)
            reference["refuri"] = relative_uri(here, address_of(app, name))
            reference["internal"] = True


def page_of(name: str) -> str:
    """Return the page that shows a file or a folder of the repository."""
    return f"source/{name.rstrip('/')}"


def address_of(app: Sphinx, name: str) -> str:
    """Return the address of a file or a folder within the site; a picture is copied as it is."""
    return page_of(name) if name.endswith(".png") else app.builder.get_target_uri(page_of(name))


def linked(folder: Path) -> dict[str, None]:
    """Return the files and folders of the repository that pages link to, and what linked folders contain."""
    found: dict[str, None] = {}
    sources = [*folder.rglob("*.md"), *(ROOT / name for name in TEXTS.values())]
    for file in sorted(sources):
        for link in re.findall(rf"\]\({SCHEME}([^)]*)\)", rewritten(file.read_text(), file.parent, file)):
            found[link.rstrip("/")] = None
    for name in list(found):
        found |= {each.relative_to(ROOT).as_posix(): None for each in _files(ROOT / name)}
    return found


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that can be shown; of a file, none."""
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and _text(file) is not None)


def _text(file: Path) -> str | None:
    """Return the text of a file, unless it is large or has none."""
    if file.stat().st_size > LARGEST:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for every linked file and folder."""
    for name in linked(Path(app.srcdir)):
        file = ROOT / name
        if file.suffix == ".png":
            copy = Path(app.outdir) / page_of(name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            continue
        body = _listing(app, name) if file.is_dir() else _code(file)
        if body is None:
            log.warning("%s is linked, but has no text to show", name)
            continue
        context = {"title": name, "body": f"<h1>{html.escape(name)}</h1>{body}", "parents": []}
        yield page_of(name), context, "page.html"


def _listing(app: Sphinx, name: str) -> str:
    here = app.builder.get_target_uri(page_of(name))
    items = []
    for file in _files(ROOT / name):
        target = app.builder.get_target_uri(page_of(file.relative_to(ROOT).as_posix()))
        items.append(f'<li><a href="{relative_uri(here, target)}">{html.escape(file.name)}</a></li>')
    return f"<ul>{''.join(items)}</ul>"


def _code(file: Path) -> str | None:
    text = _text(file)
    if text is None:
        return None
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(text, lexer, HtmlFormatter(wrapcode=True)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", read, priority=600)  # after generated parts, which contain links
    app.connect("doctree-resolved", resolve)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
