"""Shows the docstrings of attributes as they are written.

Napoleon takes the text before a colon in the first line of such a docstring for a type; ours are sentences.
"""

from sphinx.application import Sphinx

SENTENCES = ("attribute", "data", "property")
_original: dict[str, list[str]] = {}


def keep(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep a docstring, before Napoleon reads it."""
    if what in SENTENCES:
        _original[name] = list(lines)


def restore(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Put the docstring back."""
    if what in SENTENCES:
        lines[:] = _original.pop(name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
