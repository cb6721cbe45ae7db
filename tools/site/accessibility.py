"""Attributes for screen readers that the theme's pages lack."""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

REPLACED = {
    '<aside class="sidebar-drawer"': '<aside aria-label="Pages" class="sidebar-drawer"',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
}
log = logging.getLogger(__name__)


def complete(app: Sphinx, failure: Exception | None) -> None:
    """Add the attributes to every page; warn about those that no page needs, after a change of the theme."""
    if failure or app.builder.format != "html":
        return
    missing = set(REPLACED)
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        missing -= {old for old in missing if old in text}
        for old, new in REPLACED.items():
            text = text.replace(old, new)
        page.write_text(text, encoding="utf-8")
    for old in sorted(missing):
        log.warning("no page contains %s, which tools/site/accessibility.py completes", old)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
