"""Tables, differences and curves of tasks other than many classes."""

import csv
import io

import pytest
from rich.console import Console

import fedrema
from fedrema.errors import BadInput
from fedrema.reporting.curves import quantity_words
from fedrema.reporting.groups import group_runs
from fedrema.reporting.plots import Curve, Look, about_curves, cut_start
from fedrema.reporting.tables import (
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    comparison_table,
    differences_table,
    paired_differences,
)
from tests.reporting.task_runs import TWO_CLIENTS, write_task_run


def shown(table, width=80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def scaled(factor):
    return {name: [[factor * value for value in each] for each in rounds] for name, rounds in TWO_CLIENTS.items()}


def two_methods(folder):
    """FedAvg with an RMSE of 2 in its best round, Local with one of 3: two seeds each, the second 10 % higher."""
    return [
        write_task_run(folder / method / str(seed), values=scaled(factor * (1 + seed / 10)), method=method, seed=seed)
        for method, factor in (("fedavg", 1.0), ("local", 1.5))
        for seed in (0, 1)
    ]


def test_a_regression_has_rmse_and_r2(tmp_path):
    run = write_task_run(tmp_path / "run")
    text = " ".join(shown(comparison_table([run])).split())
    # Best: round 2, (1 + 3) / 2; final: the mean of 3, 2 and 2.25; worst tenth: of 4, 3 and 3.
    assert "FedAvg 1 2.00 2.00 2.42 3.33 0.267 3.0" in text
    assert "RMSE, lower is better, mean ± standard deviation" in text
    assert "t interval" not in text  # of two clients


def test_the_lowest_rmse_and_the_highest_r2_are_highlighted(tmp_path):
    lines = comparison_markdown(two_methods(tmp_path)).splitlines()
    fedavg, local = (next(line for line in lines if line.startswith(f"| {name} |")) for name in ("FedAvg", "Local"))
    assert fedavg.startswith(
        "| FedAvg | 2 | **2.10 ± 0.14** | **2.10 ± 0.14** | **2.54 ± 0.17** | **3.50 ± 0.24** | 0.28"
    )
    assert local.startswith("| Local | 2 | 3.15 ± 0.21 | 3.15 ± 0.21 | 3.81 ± 0.26 | 5.25 ± 0.35 | **0.420 ± 0.028** |")
    latex = comparison_latex(two_methods(tmp_path))
    assert r"worst tenth & R$^2$ & seconds" in latex
    assert r"FedAvg & $2$ & $\mathbf{2.10 \pm 0.14}$" in latex


def test_differences_are_to_the_lowest_rmse(tmp_path):
    runs = two_methods(tmp_path)
    (found,) = paired_differences(runs)
    assert (found.reference, found.label, found.mean) == ("FedAvg", "Local", pytest.approx(1.05))
    text = shown(differences_table([found], primary=runs[0].metric))
    assert "Difference to FedAvg in honest RMSE, negative is better" in text
    assert "+1.05" in text
    (other,) = paired_differences(runs, "final_r2")
    assert (other.reference, other.label) == ("Local", "FedAvg")
    row = next(csv.DictReader(io.StringIO(comparison_csv(runs, "final_r2"))))
    assert (float(row["best_rmse"]), row["compared"], row["reference"]) == (pytest.approx(2.1), "final_r2", "Local")


def test_a_narrow_terminal_shows_all_columns(tmp_path):
    runs = two_methods(tmp_path)
    narrow, wide = shown(comparison_table(runs), 72), shown(comparison_table(runs), 120)
    assert "FedAvg" in narrow
    assert "too narrow for all standard deviations" in " ".join(narrow.split())
    assert "too narrow" not in wide
    assert wide.count("±") > narrow.count("±")


def test_binary_runs_have_the_auc_and_say_for_how_many_clients_it_is_undefined(tmp_path):
    values = {"accuracy": [[0.5, 0.8, 0.9]], "auc": [[None, 0.7, None]]}
    text = " ".join(shown(comparison_table([write_task_run(tmp_path, "binary", values, classes=2)]), 100).split())
    assert "Also final: AUC (percent)." in text
    assert "Excluded, because the metric is undefined on their test samples: AUC, 2 of 3 clients." in text


def test_added_metrics_of_classes_are_columns(tmp_path):
    values = {"accuracy": [[0.5, 0.8]], "log_loss": [[0.25, 0.75]]}
    text = shown(comparison_table([write_task_run(tmp_path, "multiclass", values, classes=4)]), 100)
    assert "0.500" in text
    assert "Also final: log loss (lower is better)." in " ".join(text.split())
    assert "t interval" not in text


def test_the_mean_over_five_clients_has_a_t_interval(tmp_path):
    values = {"accuracy": [[0.5, 0.6, 0.7, 0.8, 0.9]], "auc": [[0.5] * 5]}
    text = " ".join(shown(comparison_table([write_task_run(tmp_path, "binary", values, classes=2)]), 100).split())
    # The standard deviation is √0.025 = 0.158, and t of 4 degrees of freedom 2.776: 0.7 ± 2.776 · 0.158 / √5.
    assert "Mean over clients of the final accuracy, 95 % t interval over clients: FedAvg 70.0 (50.4 to 89.6)." in text


def test_runs_of_different_tasks_are_not_compared(tmp_path):
    runs = [write_task_run(tmp_path / "a"), write_task_run(tmp_path / "b", "count", {"deviance": [[1.0, 2.0]]})]
    with pytest.raises(BadInput, match=r"Runs of different tasks \(count, regression\) cannot be compared: name runs"):
        comparison_table(runs)


def test_words_of_curves(tmp_path):
    groups = group_runs([write_task_run(tmp_path)])
    assert quantity_words("rmse", groups) == ("RMSE", "Test RMSE of the clients' models, lower is better")
    assert quantity_words("r2", groups) == ("R²", "Test R² of the clients' models")
    assert quantity_words("worst_tenth", groups)[0] == "RMSE of the worst tenth"
    assert quantity_words("trained_rmse", groups)[1] == "Test RMSE right after local training, lower is better"


def test_high_errors_of_the_first_rounds_are_cut_off():
    import numpy as np
    from matplotlib.figure import Figure

    values = np.array([900.0, 50.0, *np.linspace(2, 1, 38)])
    curve = Curve("a", Look("#000000"), np.arange(40), values, values, values, 1)
    axes = Figure().subplots()
    axes.plot(values)
    assert cut_start(axes, [curve], higher_is_better=False, least=0.0) == "above"
    assert axes.get_ylim()[1] < 5
    assert "Some of the first rounds are above the visible range." in about_curves([curve], "above")


def test_a_run_names_its_metric(tmp_path):
    run = fedrema.load(write_task_run(tmp_path).path)
    assert run.metric == "rmse"
    assert list(run.metrics) == ["rmse", "r2"]
    assert run.metrics["rmse"].best == 2.0
    assert run.curve()[1].tolist() == [3.0, 2.0, 2.25]
    assert "3 rounds, best RMSE 2)" in repr(run)
