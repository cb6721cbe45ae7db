"""docs/leaderboard.md and docs/choosing.md show the committed runs, and their advice agrees with the verdicts."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from fedrema.experiments.claims import judge
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of

ROOT = Path(__file__).parents[2]
PAGES = ("leaderboard.md", "choosing.md")
GRIDS = {
    **{ROOT / "research" / "choosing" / f"{name}.toml": "choosing" for name in ("samples", "skew", "clients")},
    **{ROOT / "research" / "faults" / f"{name}.toml": "faults" for name in ("faults", "settings")},
}
"""Grid files, and the names of the folders of their results."""
pytestmark = pytest.mark.xdist_group("leaderboard")


@pytest.fixture(scope="module")
def generator():
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]  # the script imports modules of its folder; research.faults
    try:
        specification = importlib.util.spec_from_file_location(
            "make_leaderboard", ROOT / "tools" / "make_leaderboard.py"
        )
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        yield module
    finally:
        del sys.path[:2]


def test_the_pages_are_what_the_committed_runs_give(generator, tmp_path, monkeypatch):
    for page in PAGES:
        shutil.copy(ROOT / "docs" / page, tmp_path)
    monkeypatch.setattr(generator, "BOARD", tmp_path / "leaderboard.md")
    monkeypatch.setattr(generator, "CHOOSING", tmp_path / "choosing.md")
    monkeypatch.setattr(generator, "FIGURES", tmp_path)
    monkeypatch.setattr(generator.Board, "write_tuned", lambda board: None)
    generator.make_board()
    generator.make_faults()
    generator.make_scoring()
    generator.make_settings()
    generator.make_choosing()
    for page in PAGES:
        assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text(), "python tools/make_leaderboard.py"
    assert (tmp_path / "leaderboard.png").is_file()


def test_columns_that_have_not_been_computed_are_shown_as_missing(generator):
    page = (ROOT / "docs" / "leaderboard.md").read_text()
    for column in generator.Board().experiment.columns:
        shown = re.search(rf"<!-- {column.name} -->\n(.*?)\n<!-- /{column.name} -->", page, flags=re.S)[1]
        missing = shown == generator.NOT_COMPUTED
        state = re.search(rf"^\| `{column.name}` \|.*\| (.*) \|$", page, flags=re.M)[1]
        assert state.startswith("**not computed**") == missing


@pytest.mark.parametrize("file", GRIDS, ids=lambda file: file.stem)
def test_finished_runs_are_complete_and_every_claim_has_a_verdict(file, generator):
    experiment, store = read_experiment(file), Store(ROOT / "results" / GRIDS[file] / "runs")
    wanted = {key_of(cell.settings(seed)) for cell in experiment.cells for seed in range(experiment.seeds)}
    assert wanted <= {*store.keys()}
    assert experiment.claims
    judgements = [judge(claim, experiment, experiment.seeds, store) for claim in experiment.claims]
    assert not any("not been run" in each.evidence for each in judgements)


def test_the_stores_contain_nothing_else(generator):
    for folder in ("choosing", "faults"):
        wanted = set()
        for file in [file for file, name in GRIDS.items() if name == folder]:
            experiment = read_experiment(file)
            wanted |= {key_of(cell.settings(seed)) for cell in experiment.cells for seed in range(experiment.seeds)}
        assert {*Store(ROOT / "results" / folder / "runs").keys()} == wanted


ADVICE = {
    "skew": ("Without label skew, FedReMa and FedPrior lose little",),
    "samples": (
        "Under strong label skew, joining pays off",
        "With 10 samples per client, a shared classifier",
        "With 60 samples per client, FedReMa is more accurate",
        "Keeping the head private costs accuracy",
    ),
    "clients": ("With 20 clients and more, joining pays off", "With 60 clients, FedReMa is more accurate"),
}
"""Starts of the claims that the advice in the table `In short` relies on."""


@pytest.mark.parametrize("name", ADVICE)
def test_the_claims_behind_the_advice_hold(name):
    file = ROOT / "research" / "choosing" / f"{name}.toml"
    experiment, store = read_experiment(file), Store(ROOT / "results" / "choosing" / "runs")
    for start in ADVICE[name]:
        (claim,) = [claim for claim in experiment.claims if claim.says.startswith(start)]
        assert "added after the runs" not in claim.says
        assert judge(claim, experiment, experiment.seeds, store).verdict == "holds", claim.says


def test_the_advice_on_time_agrees_with_the_measured_times():
    page = (ROOT / "docs" / "methods.md").read_text()
    shown = re.search(r"<!-- times -->\n(.*?)<!-- /times -->", page, flags=re.S)[1]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", shown, flags=re.M)
    times = {title: (float(small), float(convolutional)) for title, small, convolutional in rows}
    for title in ("FedReMa", "FedPer"):
        assert max(times[title]) < 1.1, title
    for title in ("FedReMa", "FedPer", "LG-FedAvg", "FedVF (reconstruction)", "FedProx"):
        assert max(times[title]) <= 1.2, title
    for title in ("Ditto", "APFL", "FedKD"):
        assert min(times[title]) >= 1.7, title
        assert max(times[title]) <= 2.3, title
