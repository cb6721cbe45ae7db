"""The documentation site, without building it: navigation, links, and the parts that come from the code."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedrema
from fedrema.base.options import Purpose
from fedrema.cli import COMMANDS
from fedrema.cli.deploy import COMMANDS as DEPLOY_COMMANDS
from fedrema.config.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")])
FENCE = re.compile(r"^(```+)(.*?)\n(.*?)^\1$", re.S | re.M)
TOOLS = (
    "repository_links",
    "generated_parts",
    "public_names",
    "diagrams",
    "make_diagrams",
    "make_badges",
    "make_explainer",
)


@pytest.fixture(scope="module")
def tool():
    """Return a function that imports a module of tools or tools/site."""
    folders = [str(ROOT / "tools"), str(ROOT / "tools" / "site")]
    sys.path[:0] = folders
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(folder)
    for name in TOOLS:
        sys.modules.pop(name, None)


def listed(page: Path) -> set[Path]:
    """Return the pages that the tables of contents of a page name."""
    found = set()
    for _, words, text in FENCE.findall(page.read_text()):
        if words == "{toctree}":
            names = [line for line in text.splitlines() if line and not line.startswith(":")]
            found |= {file for name in names for file in page.parent.glob(f"{name}.*")}
    if "<!-- notebooks -->" in page.read_text():
        found |= set(page.parent.glob("*.ipynb"))
    return found


def test_the_navigation_leads_to_every_page():
    reached, new = set(), {DOCS / "index.md"}
    while new:
        reached |= new
        new = {each for page in new if page.suffix == ".md" for each in listed(page)} - reached
    assert sorted(reached) == PAGES


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem)
def test_links_to_sections_exist(page):
    text = FENCE.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
        other = page.parent / target if target else page
        assert anchor in anchors(other), f"{target}#{anchor}"


def test_the_reference_documents_every_public_name(tool):
    text = "".join(page.read_text() for page in (DOCS / "reference" / "python").glob("*.md"))
    shown = re.findall(r"^\.\. auto\w+:: fedrema\.(\w+)$", text, re.M)
    assert sorted(shown) == sorted(fedrema.__all__)
    assert list(tool("public_names").undocumented()) == []


def test_a_public_name_without_a_docstring_is_found(tool, monkeypatch):
    class Silent:
        def speak(self):
            return None

    monkeypatch.setattr(fedrema, "__all__", ["Silent"])
    monkeypatch.setattr(fedrema, "Silent", Silent, raising=False)
    assert list(tool("public_names").undocumented()) == ["Silent", "Silent.speak"]


def test_the_command_line_is_described_by_its_parsers(tool):
    parts = tool("generated_parts")
    text = parts.commands()
    headings = [f"fedrema {name}" for name in COMMANDS] + [f"fedrema deploy {name}" for name in DEPLOY_COMMANDS]
    assert re.findall(r"^###? (fedrema .*)$", text, re.M) == headings
    predict = text[text.index("## fedrema predict") :]
    parser, _ = parts.help_of("predict")
    options = [action for group in parser._action_groups for action in group._group_actions]
    assert len(options) > 3
    for action in options:
        assert f"| {parts.shown(action)} | " in predict


def test_the_settings_of_every_run_are_listed(tool):
    text = tool("generated_parts").settings()
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", text, re.M)) == sorted(Settings.names(*Purpose))
    assert "| `seed` | `0` | training seed |" in text


def test_links_to_files_of_the_repository_lead_to_pages(tool):
    links = tool("repository_links")
    page = DOCS / "runs.md"
    text = "[a](../README.md#install) [b](../src/fedrema/api.py) [c](verdict.md) [d](https://e.org)\n```\n[f](../README.md)\n```"
    assert links.rewritten(text, DOCS, page) == (
        "[a](index.md#install) [b](repository:src/fedrema/api.py) [c](verdict.md) [d](https://e.org)"
        "\n```\n[f](../README.md)\n```"
    )
    assert (
        links.rewritten("[![x](docs/y.svg)](LICENSE)", ROOT, DOCS / "index.md") == "[![x](y.svg)](repository:LICENSE)"
    )
    assert "src/fedrema/methods/fedrema.py" in links.linked(DOCS)


def test_every_diagram_has_a_drawing(tool):
    diagrams = tool("make_diagrams")
    assert sorted(diagrams.diagrams()) == sorted(file.name for file in diagrams.FOLDER.iterdir())


def test_the_badges_agree_with_the_project(tool):
    badges = tool("make_badges")
    for name, texts in badges.badges().items():
        assert (badges.FOLDER / f"{name}.svg").read_text() == badges.drawn(*texts), "python tools/make_badges.py"
        assert f"docs/figures/badges/{name}.svg" in (ROOT / "README.md").read_text()
    assert f"{badges.badges()['methods'][1]} methods that run unchanged" in (ROOT / "README.md").read_text()


def test_the_figures_of_fedrema_show_a_real_run(tool, tmp_path):
    explainer = tool("make_explainer")
    shown = json.loads(explainer.DATA.read_text())
    repeated = explainer.content(explainer.train(str(tmp_path)))
    assert {key: repeated[key] for key in ("scale", "clients", "group")} == {
        "scale": 100_000,
        "clients": 20,
        "group": 4,
    }
    assert np.shape(shown["rounds"]) == np.shape(repeated["rounds"]) == (explainer.ROUNDS, 190)
    # Later rounds can differ between machines: rounding errors grow in training.
    np.testing.assert_allclose(shown["rounds"][:3], repeated["rounds"][:3], atol=100)


@pytest.mark.slow
def test_a_dead_link_and_a_missing_name_fail_the_build(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "index.md").write_text("[nowhere](dead.md)\n")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", str(ROOT / "tools" / "site")]
    command = [sys.executable, "-m", "sphinx", *options, str(tmp_path / "source"), str(tmp_path / "built")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "dead.md" in ended.stderr
    assert "fedrema.Federation is public, but no page in docs/reference documents it" in ended.stderr
