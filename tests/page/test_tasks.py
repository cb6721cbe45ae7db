"""The document about runs of tasks other than many classes."""

import numpy as np
import pytest

from fedrema.page.clients import clients_part
from fedrema.page.document import main_part
from fedrema.page.live_runs import LiveRuns
from fedrema.page.reading import DownsampledRun
from fedrema.page.render import page
from tests.page.test_document import unpacked
from tests.reporting.folders import write_run
from tests.reporting.task_runs import TWO_CLIENTS, write_task_run


def test_the_metrics_of_a_regression(tmp_path):
    write_task_run(tmp_path / "a")
    write_task_run(tmp_path / "b", method="local", values={name: rounds[::-1] for name, rounds in TWO_CLIENTS.items()})
    found = main_part([DownsampledRun(tmp_path / name) for name in "ab"])
    assert [(each["name"], each["title"], each["percent"], each["higher_is_better"]) for each in found["metrics"]] == [
        ("rmse", "RMSE", False, False),
        ("r2", "R²", False, True),
    ]
    assert list(found["words"]) == ["rmse", "worst_tenth", "trained_rmse", "loss", "r2"]
    assert found["words"]["rmse"][0] == "RMSE"
    fedavg = found["groups"][0]
    assert fedavg["curves"]["rmse"]["mean"] == [3, 2, 2.25]
    assert fedavg["statistics"]["honest_rmse"] == pytest.approx([2.0, None])
    assert fedavg["statistics"]["final_r2"] == pytest.approx([0.8 / 3, None])
    assert list(found["differences"]) == ["honest_rmse", "best_rmse", "final_rmse", "worst_tenth", "final_r2"]
    assert found["explanation"].startswith("RMSE, lower is better")
    run = found["runs"][0]
    assert run["outcome"] is None
    assert run["train_counts"] == [30, 31]
    assert run["holds"] == {"number of clients": 2, "training samples": 61, "test samples": 61}


def test_clients_of_a_regression_have_no_classes(tmp_path):
    write_task_run(tmp_path)
    (found,) = clients_part([DownsampledRun(tmp_path)])["runs"]
    assert found["labels"] is None
    np.testing.assert_allclose(unpacked(found["score"]), TWO_CLIENTS["rmse"], atol=1e-3)
    np.testing.assert_allclose(unpacked(found["final"]), [1.5, 10 / 3], atol=1e-3)


@pytest.mark.parametrize(("task", "outcome"), [("ordinal", "level"), ("multilabel", "label"), ("binary", "class")])
def test_what_outcomes_are_called(tmp_path, task, outcome):
    values = {"binary": {"accuracy": [[0.5]]}, "ordinal": {"mae": [[0.5]]}, "multilabel": {"f1": [[0.5]]}}[task]
    write_task_run(tmp_path, task, values, classes=2)
    (run,) = main_part([DownsampledRun(tmp_path)])["runs"]
    assert run["outcome"] == outcome
    assert f"number of {'classes' if outcome == 'class' else outcome + 's'}" in run["holds"]


def test_a_folder_with_several_tasks_shows_the_runs_of_the_latest(tmp_path):
    write_run(tmp_path / "classes")
    watched = LiveRuns(tmp_path)
    watched.refresh()
    assert [run["names"] for run in watched.part("main")["runs"]] == [["north", "south"]]
    write_task_run(tmp_path / "numbers")
    watched.searched = -10.0
    watched.cost["main"] = 0.0  # the page is not updated again at once if making it took long
    watched.refresh()
    found = watched.part("main")
    assert len(found["runs"]) == 1
    (note,) = found["notes"]
    assert note.startswith("Runs of other tasks (")
    assert "part-main" in page({"main": found})
