"""Written reports of an experiment: tables in three formats, verdicts, and the README of a folder."""

import shutil
from datetime import UTC, datetime

import pytest

from fedrema.errors import BadInput
from fedrema.experiments.command_log import log_command, read_log
from fedrema.experiments.forecast import Forecaster
from fedrema.experiments.plan import make_plan
from fedrema.experiments.report import write_overview, write_report
from fedrema.experiments.store import Store
from fedrema.experiments.table import Sheet, values_of
from tests.experiments.test_claims import Bench

FILE = """
title = "Table 9: made up"
about = "For a test."
seeds = 2
[settings]
clients = 4
samples = 40
[rows.fedavg]
title = "FedAvg & co"
[rows.fedrema]
title = "FedReMa, δ = 0.5"
[rows.local]
title = "Local"
[published]
fedavg = [61.0, 0.5]
fedrema = 65.4
[also.final_accuracy]
fedrema = 63.8
[also.critical_rounds]
fedrema = 36
[also.seconds]
fedavg = 691.58
[[claims]]
says = "FedReMa is first."
kind = "first"
rows = ["fedrema"]
over = ["fedavg"]
"""


@pytest.fixture
def made(tmp_path):
    bench = Bench(tmp_path, "", FILE)
    alone = {"device": "cpu", "beside": 0, "versions": {"torch": "2"}}
    for seed in (0, 1):
        fedavg = {"best_accuracy": 0.60 + 0.02 * seed, "honest_accuracy": 0.6, "final_accuracy": 0.59}
        bench.keep("fedavg", "", seed, ran_on=alone, **fedavg, seconds={"train": 30.0, "other": 4.0})
        fedrema = {"best_accuracy": 0.70 + 0.022 * seed, "honest_accuracy": 0.7, "final_accuracy": 0.68}
        crowded = alone | {"beside": 2}
        bench.keep("fedrema", "", seed, ran_on=crowded, **fedrema, seconds={"train": 3.21}, critical_rounds=11 + seed)
    return bench


def test_a_line_contains_our_and_the_published_numbers(made):
    sheet = Sheet(made.experiment, 2, made.store)
    assert sheet.headings == [
        *("method", "seeds", "best (peeks)", "published", "difference", "within noise", "honest", "final"),
        *("critical rounds", "seconds"),
    ]
    # Standard error of the difference: √(1.41² / 2 + 0.5² / 2) = 1.06; the difference is 0.
    assert sheet.lines[0] == [
        *("FedAvg & co", "2", "61.0 ± 1.4", "61.0 ± 0.5", "+0.0", "yes"),
        *("60.0 ± 0.0", "59.0 ± 0.0", "–", "34 (691.58)"),
    ]
    assert sheet.lines[1] == [
        *("FedReMa, δ = 0.5", "2", "71.1 ± 1.6", "65.4", "+5.7", "–"),
        *("70.0 ± 0.0", "68.0 ± 0.0 (63.8)", "11.5 ± 0.7 (36)", "3.21*"),
    ]
    assert sheet.lines[2][1:] == ["0", "–", "–", "–", "–", "–", "–", "–", "–"]
    assert sheet.markdown().endswith("Seconds marked * were taken while other runs shared the device.\n")
    assert "In brackets: what was published." in sheet.explanation


def test_seconds_and_rounds_are_not_percentages(made):
    runs = made.store
    by_method = {run.method: [one for one in runs if one.method == run.method] for run in runs}
    assert values_of(by_method["fedavg"], "seconds") == {0: 34.0, 1: 34.0}
    assert values_of(by_method["fedrema"], "critical_rounds") == {0: 11.0, 1: 12.0}
    assert values_of(by_method["fedavg"], "critical_rounds") == {}


def test_latex_has_a_line_per_row_and_the_best_in_bold(made):
    lines = Sheet(made.experiment, 2, made.store).latex().splitlines()
    assert lines[0].startswith("% Table 9: made up: best accuracy")
    assert lines[1] == r"\begin{tabular}{lc}"
    assert r"FedAvg \& co & $61.0{\,\pm\,}1.4$ (61.0) \\" in lines
    assert r"FedReMa, $\delta$ = 0.5 & $\mathbf{71.1{\,\pm\,}1.6}$ (65.4) \\" in lines
    assert r"Local & -- \\" in lines


def test_a_report_has_a_table_verdicts_and_tests(made, tmp_path):
    (judgement,) = write_report(made.experiment, 2, made.store, tmp_path / "out")
    # Differences 10.0 and 10.2: t = 101 with 1 degree of freedom, p = 0.0063, interval 10.1 ± 12.706 · 0.1.
    assert judgement.verdict == "holds"
    page = (tmp_path / "out" / "made.md").read_text()
    assert page.startswith("## Table 9: made up\n\nFor a test.\n\n| method | seeds |")
    assert "| FedReMa is first. | holds | FedReMa, δ = 0.5 10.1 points above FedAvg & co (95 %" in page
    assert "### Differences to the best in best accuracy" in page
    assert "| FedAvg & co | – | FedReMa, δ = 0.5 | -10.10 | -11.37 to -8.83 | 0.0063 | 0.0063 | 2 |" in page
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"made.md", "made.csv", "made.tex"}


def test_the_readme_of_a_folder_lists_finished_and_missing_runs(made, tmp_path):
    out = tmp_path / "out"
    command = ["fedrema", "reproduce", "--only", "a b"]
    log_command(made.store, command, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), 754.3, set(made.store.keys()))
    judged = {"made": write_report(made.experiment, 2, made.store, out)}
    plan = make_plan([(made.experiment, made.experiment.cells, 2)], made.store, Forecaster(made.store, "cpu"))
    write_overview([made.experiment], judged, None, made.store, out, plan)
    page = (out / "README.md").read_text()
    assert "| made | Local | 2 |" in page
    assert "| [Table 9: made up](made.md) ([csv](made.csv), [tex](made.tex)) | 4 of 6 | Local (2 of 2) |" in page
    assert "| `fedrema reproduce --only 'a b'` | cpu | 4 | 13 minutes |" in page
    assert "| FedReMa is first. | holds |" in page
    (logged,) = read_log(made.store)
    assert logged.versions == [{"torch": "2"}]
    assert (logged.started, logged.seconds) == ("2026-01-02T03:04:05+00:00", 754.3)


def test_logs_of_two_machines_are_merged(made, tmp_path):
    other = Store(tmp_path / "other")
    times = [datetime(2026, 1, 2, hour, tzinfo=UTC) for hour in (3, 4, 5)]
    for store, command, time in ((made.store, "a", times[1]), (other, "b", times[0])):
        log_command(store, [command], time, 1.0, set())
    for file in other.folder.iterdir():
        shutil.copy(file, made.store.folder)
    assert [logged.command for logged in read_log(made.store)] == ["b", "a"]
    log_command(made.store, ["c"], times[2], 1.0, set())
    assert [logged.command for logged in read_log(made.store)] == ["b", "a", "c"]
    (file,) = made.store.folder.glob("commands-*.jsonl")
    file.write_text("{")
    with pytest.raises(BadInput, match=f"{file.name} is not a log of commands"):
        read_log(made.store)
