"""Grids whose primary metric is an error: tables, claims, sweeps and figures respect its direction and unit."""

import pytest

from fedrema.errors import BadInput
from fedrema.experiments import figures
from fedrema.experiments.claims import judge
from fedrema.experiments.comparisons import compare_with_reference, comparisons_markdown, runs_of, scores
from fedrema.experiments.finished_run import finished_run
from fedrema.experiments.report import write_report
from fedrema.experiments.spec import FigureSpec
from fedrema.experiments.sweep import choices, choices_markdown, tuned_file
from fedrema.experiments.table import Sheet, statistic
from fedrema.tasks import METRICS
from tests.experiments.made_runs import made_run, made_summary
from tests.experiments.test_claims import ABOVE, COLLAPSE, FILE, FIRST, Bench
from tests.experiments.test_sweep import FILE as SWEEP
from tests.reporting.task_runs import write_task_run

NOISE = (-0.01, 0.0, 0.01)
ERRORS = {"fedavg": 0.5, "fedper": 0.7, "fedrema": 0.3}


def with_errors(folder, claim, text=FILE, columns=("few", "many"), **errors):
    """Return an experiment whose runs have these RMSE as best, honest and final value."""
    made = Bench(folder, claim, text)
    for row, error in (ERRORS | errors).items():
        for column in columns:
            for seed, noise in enumerate(NOISE):
                value = error + noise * {"fedavg": 2, "fedper": 3}.get(row, 1)
                made.keep(row, column, seed, metric="rmse", best_rmse=value, honest_rmse=value, final_rmse=1.5 * value)
    return made


def test_the_table_names_metric_and_unit(tmp_path):
    sheet = Sheet(with_errors(tmp_path, FIRST).experiment, 3, with_errors(tmp_path, FIRST).store)
    assert sheet.headings[2:6] == ["seeds", "best RMSE (peeks)", "honest RMSE", "final RMSE"]
    assert sheet.lines[0][3:6] == ["0.500 ± 0.020", "0.500 ± 0.020", "0.750 ± 0.030"]
    assert sheet.explanation.startswith("RMSE, lower is better, mean ± standard deviation over training seeds.")
    latex = sheet.latex()
    assert "best RMSE, mean ± standard deviation, lower is better" in latex
    assert r"FedReMa & $\mathbf{0.300{\,\pm\,}0.010}$" in latex
    assert r"FedAvg & $0.500" in latex


def test_published_errors_are_compared_in_their_unit(tmp_path):
    text = FILE + "kind = 'first'\nrows = ['fedrema']\n[published.few]\nfedavg = [0.4, 0.02]\n"
    made = with_errors(tmp_path, "", text)
    assert Sheet(made.experiment, 3, made.store).lines[0][4:7] == ["0.400 ± 0.020", "+0.100", "no"]


def test_the_lowest_error_is_first(tmp_path):
    made = with_errors(tmp_path, FIRST)
    found = judge(made.experiment.claims[0], made.experiment, 3, made.store)
    assert (found.verdict, found.honest_verdict) == ("holds", "holds")
    assert "FedReMa 0.200 below FedAvg (95 % −0." in found.evidence
    assert "By honest RMSE: holds." in found.evidence


def test_a_higher_error_refutes_a_claim(tmp_path):
    made = with_errors(tmp_path, ABOVE, fedrema=0.9)
    found = judge(made.experiment.claims[0], made.experiment, 3, made.store)
    assert found.verdict == "does not hold"
    assert "0.400 above FedAvg" in found.evidence or "0.200 above FedPer" in found.evidence


def test_an_error_that_rises_collapses(tmp_path):
    made = with_errors(tmp_path, COLLAPSE)  # the final error is 1.5 times the best
    found = judge(made.experiment.claims[0], made.experiment, 3, made.store)
    assert found.verdict == "holds"
    assert "FedPer best 0.700, final 1.05 (3 seeds)" in found.evidence
    made = with_errors(tmp_path, COLLAPSE + "share = 0.6\n")
    assert judge(made.experiment.claims[0], made.experiment, 3, made.store).verdict == "does not hold"


def test_differences_are_to_the_lowest_error(tmp_path):
    made = with_errors(tmp_path, FIRST)
    table = scores(runs_of(made.experiment.cells, 3, made.store), "best")
    found = compare_with_reference(table, ("few",), higher_is_better=False)
    assert {each.other for each in found} == {"fedrema"}
    text = comparisons_markdown(found, made.experiment, metric=METRICS["rmse"])
    assert "+0.200" in text
    assert "Differences in RMSE, where negative is better, paired by training seed" in text


def test_a_sweep_chooses_the_lowest_error(tmp_path):
    made = Bench(tmp_path, "", SWEEP)
    for row, error in (("local lr = 0.01", 0.5), ("local lr = 0.1", 0.25)):
        for seed in (0, 1):
            made.keep(row, "", seed, metric="rmse", honest_rmse=error)
    (choice,) = choices(made.experiment, 2, made.store)
    assert (dict(choice.settings), choice.honest, choice.metric) == ({"lr": 0.1}, 0.25, "rmse")
    text = choices_markdown([choice])
    assert "| digits | local, lr = 0.1 | 0.250 | 2 |" in text
    assert "Chosen by the mean honest RMSE over seeds" in text
    assert "lr = 0.1" in tuned_file([choice], "title")


def test_report_and_figures(tmp_path):
    made = with_errors(tmp_path, FIRST)
    write_report(made.experiment, 3, made.store, tmp_path / "out")
    assert "### Differences to the best in best RMSE" in (tmp_path / "out" / "made.md").read_text()
    lines = tuple(row.name for row in made.experiment.rows), tuple(column.name for column in made.experiment.columns)
    assert figures.draw(FigureSpec("ranks", *lines, ""), made.experiment, 3, made.store, tmp_path / "out")


def test_runs_of_different_tasks_do_not_share_a_table(tmp_path):
    made = with_errors(tmp_path, FIRST)
    made.keep("fedavg", "few", 0, best_accuracy=0.5)
    with pytest.raises(BadInput, match="need the same primary metric, but these have accuracy and rmse"):
        Sheet(made.experiment, 3, made.store)


def test_quantities_without_a_metric_are_those_of_the_primary_one():
    runs = [made_run(seed=seed, summary=made_summary(metric="mae", best_mae=1.0 + seed)) for seed in (0, 1)]
    assert str(statistic(runs, "best")) == "1.50 ± 0.71"
    assert statistic(runs, "best_accuracy") is None


def test_what_is_kept_of_a_regression(tmp_path):
    run = write_task_run(tmp_path / "run")
    kept = finished_run("key", Bench(tmp_path, FIRST).experiment.cells[0].settings(0), run)
    assert kept.curve("rmse") == {1: 3.0, 2: 2.0, 3: 2.25}
    assert kept.clients.accuracy == []
    assert kept.clients.primary == [1.5, pytest.approx(10 / 3, rel=1e-4)]
