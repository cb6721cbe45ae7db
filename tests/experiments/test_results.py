"""The committed results are consistent, and docs/results.md shows them."""

import re
from pathlib import Path

import pytest

from fedrema.cli.reproduce import NAMES
from fedrema.experiments.command_log import read_log
from fedrema.experiments.store import Store

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
PAGE = (ROOT / "docs" / "reproduction.md").read_text()


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_every_run_can_be_read_and_belongs_to_a_logged_command():
    store = Store(RESULTS / "runs")
    store.check()
    runs = list(store)
    # `again`: how many of them replaced runs of an earlier command.
    assert len(runs) == sum(command.runs - command.again for command in read_log(store))
    assert {run.settings["rounds"] for run in runs if run.settings["net"] == "auto"} == {500}
    assert {run.device for run in runs} == {"NVIDIA H200"}
    assert not any(run.failed for run in runs)


@pytest.mark.parametrize("name", [name for name in NAMES if f"<!-- {name} -->" in PAGE])
def test_the_page_shows_the_committed_tables(name):
    shown = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, flags=re.S)[1]
    table = rows((RESULTS / f"{name}.md").read_text())
    assert rows(shown) == table[: len(rows(shown))]
    assert len(rows(shown)) > 2


def test_the_page_shows_every_verdict():
    shown = rows(re.search(r"<!-- verdicts -->\n(.*?)<!-- /verdicts -->", PAGE, flags=re.S)[1])[2:]
    expected = [
        line
        for line in rows((RESULTS / "README.md").read_text())
        if re.search(r"\| (holds|does not hold|not decided)†? \|", line)
    ]
    assert sorted(shown) == sorted(expected)
    assert len(shown) >= 15


def test_every_shown_figure_exists():
    for page in (PAGE, (RESULTS / "README.md").read_text().replace("](", "](../results/paper/")):
        for path in re.findall(r"!\[[^]]*\]\(([^)]*)\)", page):
            assert (ROOT / "docs" / path).resolve().is_file(), path


def test_results_contain_no_local_paths():
    for file in [*RESULTS.glob("*.md"), *(RESULTS / "runs").glob("*.jsonl")]:
        assert not re.search(r"/(tmp|home|root|work)/", file.read_text()), file
