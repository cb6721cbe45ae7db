"""Grids: reading the file, running and resuming cells, storing and showing results."""

import dataclasses
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
from scipy import stats

from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.forecast import Forecaster
from fedrema.experiments.spec import Published
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.table import Sheet, Statistic, statistic, within_noise
from fedrema.experiments.tasks import Runner, finished_runs, missing_tasks
from fedrema.reporting.statistics import welch_interval
from fedrema.runs.execute import Interrupted, execute
from tests.experiments.made_runs import made_run, made_summary
from tests.fixtures import unwatched

FILE = """
title = "Two by two"
seeds = 2
[settings]
rounds = 3
clients = 4
samples = 40
hidden = 4
epochs = 1
[columns.small]
title = "small steps"
lr = 0.01
[columns.large]
title = "large steps"
lr = 0.1
[rows.fedavg]
[rows.mine]
title = "FedReMa, patient"
method = "fedrema"
delta = 0.25
[published.large]
fedavg = [50.0, 2.0]
mine = 60
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


def run_missing(cells, seeds, store, work, watching=unwatched):
    """Run the missing cells; return the errors of each task."""
    runner = Runner(store, work, watching)
    return [runner.run(task) for task in missing_tasks(cells, seeds, store)]


def test_cells_are_rows_times_columns(file):
    experiment = read_experiment(file)
    assert (experiment.name, experiment.title, experiment.seeds) == ("two", "Two by two", 2)
    assert [(cell.row.name, cell.column.name) for cell in experiment.cells] == [
        ("fedavg", "small"), ("fedavg", "large"), ("mine", "small"), ("mine", "large"),
    ]  # fmt: skip
    mine = experiment.cell("mine", "large")
    settings = mine.settings(7)
    assert (settings.method.name, settings.method.delta) == ("fedrema", 0.25)
    assert (settings.local.lr, settings.simulation.rounds, settings.simulation.seed) == (0.1, 3, 7)
    assert mine.published == Published(60.0)
    assert experiment.cell("fedavg", "large").published == Published(50.0, 2.0)
    assert experiment.cell("fedavg", "small").published is None
    assert mine.title == "FedReMa, patient, large steps"


def test_arguments_override_the_file(file):
    experiment = read_experiment(file, {"rounds": 9})
    assert {cell.settings(0).simulation.rounds for cell in experiment.cells} == {9}


def test_rows_override_columns_and_columns_override_common_settings(tmp_path):
    path = tmp_path / "over.toml"
    path.write_text(
        "[settings]\nlr = 0.1\nclip = 5\n[columns.c]\nlr = 0.2\nepochs = 2\n[rows.fedavg]\nepochs = 3\n"
        "[rows.fedper]\npaper = 'table1-mnist'\n"
    )
    fedavg, fedper = (cell.settings(0) for cell in read_experiment(path).cells)
    assert (fedavg.local.lr, fedavg.local.epochs, fedavg.local.clip) == (0.2, 3, 5)
    assert (fedper.data.dataset, fedper.local.epochs) == ("mnist", 2)


def test_without_columns_there_is_a_cell_per_row(tmp_path):
    path = tmp_path / "rows.toml"
    path.write_text("[rows.local]\n[rows.fedavg]\ntitle = 'FedAvg'\n[published]\nlocal = [1.0, 0.1]\n")
    experiment = read_experiment(path)
    assert [cell.title for cell in experiment.cells] == ["local", "FedAvg"]
    assert experiment.cells[0].published == Published(1.0, 0.1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rows = 3", "rows must be a table of settings, got 3"),
        ("", "has no rows"),
        (
            "[rows.fedavg]\n[more]\n",
            "unknown field 'more'; valid are about, also, claims, columns, figures",
        ),
        ("seeds = 0\n[rows.fedavg]", "seeds must be a whole number of at least 1, got 0"),
        ("seeds = true\n[rows.fedavg]", "seeds must be a whole number of at least 1, got True"),
        ("quantity = 'luck'\n[rows.fedavg]", "quantity 'luck' is unknown"),
        ("[rows.nothing]", "cell nothing × all: Method 'nothing' is unknown"),
        ("[rows.fedavg]\ncolour = 3", "cell fedavg × all: 'colour' is not a setting of fedavg"),
        ("[rows.fedavg]\nlr = -1.0", "cell fedavg × all: --lr must be"),
        ("[rows.fedavg]\nlr = [1, 2]", "cell fedavg × all: lr must be a number, got"),
        ("[rows.fedavg]\n[published]\nfedper = 3", "'fedper' in .published. is not a row; rows are fedavg"),
        ("[rows.fedavg]\n[columns.a]\n[published.b]\nfedavg = 3", r"\[published.b\] is not a column; columns are a"),
        ("[rows.fedavg]\n[published]\nfedavg = 'good'", "must be a number or .mean, deviation., got 'good'"),
        ("[rows.fedavg]\n[published]\nfedavg = [1, 2, 3]", "must be a number or .mean, deviation., got"),
        ("rows = [", "is not valid TOML"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(text, sentence, tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=sentence):
        read_experiment(path)
    assert main(["grid", str(path), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("fedrema: ")
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--minutes", "-1"], "--minutes must be 0 or more, got -1.0"),
        (["--only", "nobody"], "--only 'nobody' is neither a row nor a column; valid are fedavg, large, mine, small"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, sentence, file, tmp_path, capsys):
    assert main(["grid", str(file), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["grid", str(tmp_path / "none.toml")]) == 2
    assert "none.toml cannot be read" in capsys.readouterr().err


def test_a_grid_is_run_stored_and_shown(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["grid", str(file), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    guess = r"about (?:a second|\d+ seconds) \(a rough estimate until the first have finished\)"
    assert re.match(rf"8 runs to do: {guess}, up to 0\.1 GB for one cell\.\n", printed.err)
    assert "Two by two" in printed.out
    assert [path.suffixes for path in (out / "runs").iterdir()] == [[".jsonl", ".xz"]]
    assert len(Store(out / "runs").keys()) == 8
    assert not (out / "unfinished").exists()
    text = (out / "two.md").read_text()
    assert "| FedReMa, patient | large steps | 2 |" in text
    assert "60.0" in text
    csv = (out / "two.csv").read_text().splitlines()
    published, ours = "published,difference,within noise", "honest,final,critical rounds,seconds"
    assert csv[0] == f"method,data,seeds,best (peeks),{published},{ours}"
    assert len(csv) == 5
    # The same command again: no run is missing, and nothing changes.
    before = {path.name: path.read_bytes() for path in (out / "runs").iterdir()}
    assert main(["grid", str(file), "--out", str(out)]) == 0
    assert "All runs have finished already." in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (out / "runs").iterdir()}
    # One more seed of one row: only these runs are missing, and their time is known.
    assert main(["grid", str(file), "--out", str(out), "--seeds", "3", "--only", "fedavg"]) == 0
    told = capsys.readouterr().err
    assert re.match(r"2 runs to do: about (?:a second|\d+ seconds), up to 0\.1 GB for one cell\.\n", told)
    assert len(list((out / "runs").iterdir())) == 1
    assert len(Store(out / "runs").keys()) == 10
    assert "| fedavg | large steps | 3 |" in (out / "two.md").read_text()
    assert "| FedReMa, patient | large steps | 2 |" in (out / "two.md").read_text()


def test_a_cell_equals_the_result_of_fedrema_run(file, tmp_path):
    cell = read_experiment(file).cell("mine", "large")
    store = Store(tmp_path / "runs")
    assert run_missing([cell], 2, store, tmp_path / "work") == [[]]
    kept = finished_runs(cell, 2, store)
    assert [one.seed for one in kept] == [0, 1]
    settings = cell.settings(1)
    settings = dataclasses.replace(settings, output=dataclasses.replace(settings.output, out=tmp_path / "run"))
    single = execute(settings)
    assert kept[1].summary["best_accuracy"] == single.summary["best_accuracy"]
    assert kept[1].curves["accuracy"] == pytest.approx(single.curve()[1].tolist(), abs=1e-5)
    assert kept[1].curves["round"] == [1, 2, 3]
    assert "out" not in kept[1].settings


def test_a_run_that_two_tables_share_is_computed_once(file, tmp_path):
    cells = read_experiment(file).cells
    store = Store(tmp_path / "runs")
    assert len(missing_tasks([*cells, *cells], 2, store)) == 4
    other = read_experiment(file, {"device": "cpu", "backend": "loop"}).cells
    assert key_of(cells[0].settings(0)) == key_of(other[0].settings(0))  # the backend is not part of the key
    longer = read_experiment(file, {"rounds": 4}).cells
    keys = {key_of(cells[0].settings(0)), key_of(cells[0].settings(1)), key_of(longer[0].settings(0))}
    assert len(keys) == 3


def test_a_stopped_grid_resumes_from_its_checkpoint(file, tmp_path, capsys):
    cell = read_experiment(file).cell("mine", "small")
    whole = Store(tmp_path / "whole")
    run_missing([cell], 1, whole, tmp_path / "work")

    def stopping(settings):
        return lambda result: os.kill(os.getpid(), signal.SIGINT) if result.record["round"] == 2 else None

    store = Store(tmp_path / "runs")
    with pytest.raises(Interrupted):
        run_missing([cell], 1, store, tmp_path / "unfinished", stopping)
    assert finished_runs(cell, 1, store) == []
    seen = []
    run_missing([cell], 1, store, tmp_path / "unfinished", lambda _: lambda result: seen.append(result.record["round"]))
    assert seen == [3]
    stopped, undisturbed = (finished_runs(cell, 1, each)[0].curves for each in (store, whole))
    assert len(stopped.pop("seconds")) == len(undisturbed.pop("seconds")) == 3
    assert stopped == undisturbed


def test_a_finished_run_that_is_not_yet_stored_is_not_repeated(file, tmp_path):
    cell = read_experiment(file).cell("fedavg", "small")
    settings = cell.settings(0)
    folder = tmp_path / "unfinished" / key_of(settings)
    execute(dataclasses.replace(settings, output=dataclasses.replace(settings.output, out=folder)))
    store = Store(tmp_path / "runs")
    assert run_missing([cell], 1, store, tmp_path / "unfinished", lambda _: pytest.fail("it has been run")) == [[]]
    assert len(finished_runs(cell, 1, store)) == 1
    assert not folder.exists()


def test_divergence_is_recorded_and_other_cells_run(tmp_path, capsys):
    path = tmp_path / "wild.toml"
    path.write_text(
        "[settings]\nrounds = 2\nclients = 3\nsamples = 40\nhidden = 4\n"
        "[rows.fedavg]\n[rows.wild]\nmethod = 'fedavg'\nlr = 1e30\nclip = 0\n"
    )
    assert main(["grid", str(path), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert "fedrema: wild, seed 0: Training diverged" in printed.err
    assert "| wild | 0, 1 diverged | – |" in (tmp_path / "out" / "wild.md").read_text()
    assert main(["grid", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "All runs have finished already." in capsys.readouterr().err


def test_only_tasks_that_fit_into_the_time_limit_are_started(file, tmp_path, capsys):
    command = ["grid", str(file), "--out", str(tmp_path / "out"), "--seeds", "1"]
    assert main([*command, "--minutes", "0"]) == 0
    store = Store(tmp_path / "out" / "runs")
    assert store.keys() == []
    assert main([*command, "--minutes", "10"]) == 0
    assert len(store.keys()) == 4
    (later, *_) = missing_tasks(read_experiment(file, {"rounds": 1000000}).cells, 1, store)
    assert Forecaster(store, "cpu").seconds(later) > 600
    capsys.readouterr()
    page = tmp_path / "out" / "two.md"
    assert "published" in page.read_text()
    assert main([*command, "--minutes", "10", "--rounds", "1000000"]) == 0
    assert "4 runs to do: about" in capsys.readouterr().err
    assert page.read_text().startswith("## Two by two (1000000 rounds)\n")
    assert "published" not in page.read_text()  # published numbers are for another number of rounds
    assert len(store.keys()) == 4
    assert not (tmp_path / "out" / "unfinished").exists()


def test_folders_of_two_machines_can_be_merged(file, tmp_path):
    cells = read_experiment(file).cells
    for number, folder in enumerate(("one", "two")):
        store = Store(tmp_path / folder)
        run_missing(cells[2 * number : 2 * number + 2], 1, store, tmp_path / "work")
    for path in (tmp_path / "two").iterdir():
        shutil.copy(path, tmp_path / "one")
    assert missing_tasks(cells, 1, Store(tmp_path / "one")) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"format": 99}', "has format 99, and this version of fedrema reads 3"),
        ("[]", "is not"),
        ("{", "is not a fin"),
        ('{"format": 3}', "is not a finished run of fedrema: Object missing"),
    ],
)
def test_results_of_another_version_are_refused(content, sentence, file, tmp_path, capsys):
    folder = tmp_path / "out" / "runs"
    folder.mkdir(parents=True)
    (folder / "old.json").write_text(content)
    assert main(["grid", str(file), "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["old.json"]


def made(*accuracies) -> list[FinishedRun]:
    return [made_run(seed=seed, summary=made_summary(best_accuracy=value)) for seed, value in enumerate(accuracies)]


def test_means_and_deviations_equal_a_calculation_by_hand():
    found = statistic(made(0.5, 0.6, 0.7), "best_accuracy")
    assert (found.mean, found.deviation, found.count) == (pytest.approx(60), pytest.approx(10), 3)
    assert str(found) == "60.0 ± 10.0"
    assert str(statistic(made(0.5), "best_accuracy")) == "50.0"
    assert statistic(made(None), "best_accuracy") is None


def test_differences_within_welchs_interval_are_noise():
    # Variances of the means 3²/9 = 1 and 4²/4 = 4: standard error √5, 25 / (1/8 + 16/3) = 4.58 degrees of freedom,
    # t₀.₉₇₅ = 2.643: differences up to 5.91 are noise. (Twice the standard error would be 4.47.)
    ours = Statistic(60.0, 3.0, 9)
    assert within_noise(ours, Published(65.9, 4.0), 4) is True
    assert within_noise(ours, Published(54.1, 4.0), 4) is True
    assert within_noise(ours, Published(66.0, 4.0), 4) is False
    assert within_noise(ours, Published(54.0, 4.0), 4) is False
    assert within_noise(ours, Published(60.0), 5) is None
    assert within_noise(ours, Published(60.0, 1.0), 1) is None  # one seed has no deviation
    assert within_noise(Statistic(60.0, 0.0, 1), Published(60.0, 1.0), 5) is None
    assert within_noise(Statistic(60.0, 0.0, 3), Published(60.0, 0.0), 3) is True
    assert within_noise(Statistic(60.0, 0.0, 3), Published(60.1, 0.0), 3) is False


def test_welchs_interval_equals_scipys():
    first, second = np.random.default_rng(0).normal(5, 1, 7), np.random.default_rng(1).normal(4, 3, 4)
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    found = welch_interval(first.mean() - second.mean(), (first.std(ddof=1), 7), (second.std(ddof=1), 4))
    assert found == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_a_table_marks_missing_runs(file, tmp_path):
    sheet = Sheet(read_experiment(file), 2, Store(tmp_path / "none"))
    assert sheet.lines[1] == ["fedavg", "large steps", "0", "–", "50.0 ± 2.0", "–", "–", "–", "–", "–"]
    assert sheet.lines[0][4:7] == ["–", "–", "–"]
    assert sheet.markdown().splitlines()[3] == "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    assert json.dumps(sheet.headings)


def test_published_numbers_are_compared_with_the_quantity_named_in_the_file(tmp_path):
    path = tmp_path / "q.toml"
    text = "[settings]\nrounds = 7\nclients = 3\nsamples = 40\nhidden = 4\n[rows.fedavg]\n[published]\nfedavg = 50.0\n"
    differences = {}
    for quantity in ("best", "final"):
        path.write_text(f"quantity = '{quantity}_accuracy'\n{text}")
        assert main(["grid", str(path), "--out", str(tmp_path / "out"), "--quiet"]) == 0
        experiment, store = read_experiment(path), Store(tmp_path / "out" / "runs")
        sheet = Sheet(experiment, 1, store)
        assert f"compared with {quantity} accuracy" in sheet.explanation
        differences[quantity] = float(sheet.lines[0][4])
        (run,) = finished_runs(experiment.cells[0], 1, store)
        assert differences[quantity] == pytest.approx(100 * run.summary[f"{quantity}_accuracy"] - 50, abs=0.051)
    assert differences["best"] > differences["final"]
