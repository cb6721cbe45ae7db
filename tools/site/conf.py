"""Sphinx configuration of the documentation site: `make docs`."""

import sys
from pathlib import Path

import fedrema

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the extensions are modules of this folder

project = "fedrema"
author = "The fedrema developers"
copyright = "The fedrema developers, Apache-2.0"  # noqa: A001  # Sphinx reads this name
version = release = fedrema.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "myst_nb",
    "repository_links",
    "generated_parts",
    "diagrams",
    "docstrings",
    "public_names",
    "accessibility",
]
templates_path = ["templates"]
exclude_patterns = ["figures"]

myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 4  # the same anchors as on a code host
myst_url_schemes = ["http", "https", "mailto", "repository"]
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "off"  # notebooks are committed with their outputs
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # otherwise pages with progress bars load scripts from other hosts

default_role = "py:obj"
smartquotes = False  # would write --option with a dash
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"fedrema {release}"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = [("fedrema-figures.js", {"defer": "defer"}), ("scrolling.js", {"defer": "defer"})]
html_favicon = str(HERE / "static" / "favicon.svg")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "a11y-high-contrast-light"  # contrast of at least 7:1
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_exclude = ".linenos, .gp, .go"
