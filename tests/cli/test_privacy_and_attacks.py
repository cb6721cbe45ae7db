"""--dp, --attack and --defence on the command line: results in files and tables, resuming, refusals."""

import json

import pytest

from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.page.document import main_part
from fedrema.page.reading import DownsampledRun
from fedrema.reporting.tables import comparison_csv, comparison_markdown
from fedrema.runs.run import Run
from tests.cli.refusals import refused

QUICK = ("--clients", "5", "--groups", "5", "--samples", "20", "--epochs", "1", "--device", "cpu", "--quiet")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_epsilon_is_in_records_summary_tables_and_on_the_page():
    pytest.importorskip("opacus")
    for name, private in (("private", ("--dp", "central", "--dp-clip", "adaptive")), ("open", ())):
        assert main(["run", "fedrema", "--rounds", "2", "--out", name, *QUICK, *private]) == 0
    run, plain = Run("private"), Run("open")
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["epsilon"] == run.rounds[-1].privacy.epsilon > run.rounds[0].privacy.epsilon
    assert summary["delta"] == pytest.approx(5**-1.1)
    assert "epsilon" not in json.loads((plain.path / "summary.json").read_text())
    table = comparison_markdown([run, plain])
    assert "| ε |" in table
    assert "δ = 0.17" in table
    assert "ε" not in comparison_markdown([plain])
    assert "epsilon" in comparison_csv([run]).splitlines()[0].split(",")
    part = main_part([DownsampledRun("private"), DownsampledRun("open")])
    statistics = {group["label"]: group["statistics"]["epsilon"] for group in part["groups"]}
    assert sorted(map(bool, statistics.values())) == [False, True]
    assert [each["holds"].get("privacy budget ε", "")[-8:] for each in part["runs"]].count("δ = 0.17") == 1


def test_attackers_are_in_summary_tables_and_on_the_page():
    attack = ("--attack", "scale", "--attackers", "0.4", "--defence", "median")
    assert main(["run", "fedrema", "--rounds", "2", "--out", "attacked", *QUICK, *attack]) == 0
    run = Run("attacked")
    attackers = json.loads((run.path / "summary.json").read_text())["attackers"]
    assert len(attackers) == 2
    assert "2 of 5 clients (scale)" in comparison_markdown([run])
    assert main_part([DownsampledRun("attacked")])["runs"][0]["holds"]["simulated attackers"] == 2
    assert list(run.predictions().rows) == [row for row in range(5) if row not in attackers]


@pytest.mark.parametrize(
    "settings",
    [
        ("--dp", "central", "--dp-clip", "adaptive"),
        ("--dp", "local"),
        ("--dp", "sample"),
        ("--attack", "label-flip", "--defence", "trimmed-mean"),
    ],
    ids=" ".join,
)
def test_a_run_can_be_resumed_with_more_rounds(settings):
    pytest.importorskip("opacus")
    assert main(["run", "fedavg", "--rounds", "4", "--out", "whole", *QUICK, *settings]) == 0
    assert main(["run", "fedavg", "--rounds", "2", "--out", "part", *QUICK, *settings]) == 0
    assert main(["resume", "part", "--rounds", "4", "--quiet"]) == 0
    whole, part = Run("whole"), Run("part")
    assert [each.accuracy for each in whole.rounds] == [each.accuracy for each in part.rounds]
    assert [each.client_loss for each in whole.rounds] == [each.client_loss for each in part.rounds]
    assert [each.privacy for each in whole.rounds] == [each.privacy for each in part.rounds]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dp", "secret"), "--dp"),
        (("--dp", "local", "--dp-clip", "-1"), "--dp-clip must be a number above 0 or adaptive"),
        (("--dp-delta", "0.1"), "--dp-delta has no effect without --dp"),
        (("--attack", "noise", "--attackers", "2"), "--attackers must be above 0 and below 1"),
        (("--defence", "krum", "--defence-share", "0.4"), "2 f + 2 participants"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(arguments, words, capsys, tmp_path):
    assert words in refused(capsys, "run", "fedavg", "--rounds", "1", "--out", "run", *QUICK, *arguments)
    assert not (tmp_path / "run").exists()


def test_methods_that_are_not_covered_are_refused_before_any_file_is_written(capsys, tmp_path):
    pytest.importorskip("opacus")
    said = refused(capsys, "run", "fedpac", "--rounds", "1", "--out", "run", *QUICK, "--dp", "local")
    assert "does not cover" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", [("--dp", "local"), ("--attack", "noise"), ("--defence", "median")])
def test_a_deployment_does_not_ignore_these_settings(setting, capsys):
    assert "simulations only" in refused(capsys, "deploy", "init", "mine", "fedavg", "--classes", "3", *setting)


def test_the_same_settings_are_refused_in_python():
    import fedrema

    with pytest.raises(BadInput, match="--dp-noise must be 0 or more"):
        fedrema.run("fedavg", dp="local", dp_noise=-1.0)
