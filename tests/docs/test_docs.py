"""Run every command and every Python block in README and docs, in their order on the page.

The second word of a fence says what a block needs: `datasets` (real data, FEDREMA_DATA), `gpu` (the same, reduced to
one round on a CPU), `slow` (reduced with --quick), `network` (starts real nodes), `ray` (starts a Ray cluster), `serve`
(runs until it is interrupted), `pfl` (pfl-research, without which the program says so; reduced with --quick), `make`
(checked with `make -n`), `install` (already done in the test environment). A Python block that begins with the name of
a file in a comment is also saved under that name.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "methods")]
)  # test_method_pages.py checks the others
SAVED = re.compile(r"# (\w+\.py)\n")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CUT_DOWN = "--rounds 1 --net mlp --seeds 2 --quiet --precision auto"
INSTALLED = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
FENCE = re.compile(r"^```(bash|python)(?: (\w+))?\n(.*?)^```$", re.S | re.M)


def name_of(page: Path) -> str:
    """Return the name of a page in the names of tests."""
    return page.relative_to(ROOT).as_posix().replace("/", "-")


def blocks(page: Path, needs: set[str]) -> list[tuple[str, str]]:
    """Return language and text of the blocks that need one of these."""
    return [(found[1], found[3]) for found in FENCE.finditer(page.read_text()) if (found[2] or "") in needs]


ENVIRONMENT = {
    **os.environ,
    "PATH": INSTALLED,
    # Ray leaves files open when it exits; Flower's command line uses functions that its dependencies deprecate
    "PYTHONWARNINGS": "error,ignore::ResourceWarning,ignore:'click.:DeprecationWarning"
    ",ignore:GitWildMatchPattern:DeprecationWarning",
    "COLUMNS": "120",
}


@pytest.fixture
def run(programs):
    """Return a function that runs a block with the forking `fedrema` and `python` of `programs`."""
    return partial(run_in, f"{programs}{os.pathsep}{INSTALLED}")


def run_in(path: str, language: str, text: str, folder: Path) -> None:
    if language == "python" and (file := SAVED.match(text)):
        (folder / file[1]).write_text(text)
    command = ["python", "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    ended = subprocess.run(command, cwd=folder, env={**ENVIRONMENT, "PATH": path}, capture_output=True, text=True)
    assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_all_blocks_of_a_page_run(page, run, tmp_path):
    for language, text in blocks(page, {""}):
        run(language, text, tmp_path)
    for _, text in blocks(page, {"serve"}):
        serve(f"{text.strip()} --port 0", tmp_path)


def serve(text: str, folder: Path) -> None:
    """Start a command that runs until it is interrupted, request the page that it serves, and interrupt it."""
    with subprocess.Popen(text.split(), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert re.search(rb'id="(plotly-source|view)"', answer.read())  # of runs, or of a deployment
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
        finally:
            server.kill()


@pytest.mark.datasets
@pytest.mark.skipif("FEDREMA_DATA" not in os.environ, reason="FEDREMA_DATA names no folder with the real datasets")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_that_need_datasets_run(page, run, tmp_path):
    for language, text in blocks(page, {"datasets"}):
        run(language, text, tmp_path)
    for folder in (
        "benchmarks",
        "examples",
        "research",
        "results",
        "tools",
    ):  # some blocks are written for the repository's root
        shutil.copytree(ROOT / folder, tmp_path / folder, dirs_exist_ok=True)
    for language, text in blocks(page, {"gpu"}):
        text = re.sub(r" +#.*$", "", text, flags=re.M)
        text = re.sub(r"^fedrema run .*$", rf"\g<0> {CUT_DOWN}", text, flags=re.M)
        run(
            language,
            re.sub(r"^fedrema (grid|reproduce|leaderboard)\b.*$", r"\g<0> --minutes 0", text, flags=re.M),
            tmp_path,
        )
    for language, text in blocks(page, {"slow"}):
        run(language, re.sub(r"$", " --quick", text.strip(), flags=re.M), tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, {"pfl"})], ids=name_of)
def test_blocks_that_need_pfl_research_run_or_say_that_it_is_missing(page, run, tmp_path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    for language, text in blocks(page, {"pfl"}):
        command = f"{text.strip()} --quick"
        if find_spec("pfl") is None:
            missing = "compare_pfl: pfl-research is not installed: pip install pfl."
            run(
                language, f'error=$({command} 2>&1) || code=$?; test "$code" = 2; test "$error" = "{missing}"', tmp_path
            )
        elif "FEDREMA_DATA" in os.environ:
            run(language, command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, {"ray"})], ids=name_of)
def test_blocks_that_start_a_ray_cluster_run(page, run, tmp_path):
    python = [block for block in blocks(page, {""}) if block[0] == "python"]  # writes the files that commands read
    for language, text in [*python, *blocks(page, {"ray"})]:
        run(language, text, tmp_path)


@pytest.mark.network
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, {"network"})], ids=name_of)
def test_blocks_that_start_real_nodes_run(page, tmp_path):
    for language, text in blocks(page, {"network"}):
        run_in(INSTALLED, language, text, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_run(example, run, tmp_path):
    for each in EXAMPLES:
        shutil.copy(each, tmp_path)
    run("python", f"import runpy; runpy.run_path({example.name!r}, run_name='__main__')", tmp_path)


def test_the_two_commands_are_in_the_makefile():
    commands = [line for _, text in blocks(ROOT / "README.md", {"make"}) for line in text.splitlines()]
    assert commands == ["make demo", "make test"]
    for command in commands:
        subprocess.run([*command.split(), "-n"], cwd=ROOT, check=True, capture_output=True)


def test_the_readmes_method_runs_with_the_installed_command(tmp_path):
    text = next(text for language, text in blocks(ROOT / "README.md", {""}) if "class Pull" in text)
    (tmp_path / "mine.py").write_text(text)
    run_in(INSTALLED, "bash", "fedrema run mine:Pull --strength 0.5 --rounds 2 --out runs/pull", tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_fence_is_known():
    for page in PAGES:
        for words in re.findall(r"^```(\S.*)$", page.read_text(), re.M):
            kind, _, needs = words.partition(" ")
            assert kind in ("bash", "python", "mermaid", "{toctree}", "{eval-rst}"), (page, words)
            assert needs in ("", "datasets", "gpu", "slow", "make", "install", "network", "serve", "ray", "pfl"), (
                page,
                words,
            )


def test_pages_contain_no_local_paths():
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|home|tmp|opt)/", page.read_text()), page
