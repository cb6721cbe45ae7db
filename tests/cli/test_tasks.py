"""Commands on a run of a regression: progress, comparison, report, and a new client."""

import numpy as np
import pytest
from rich.progress import Progress

import fedrema
from fedrema.cli import main
from fedrema.reporting.progress import Watch
from fedrema.simulation.records import MetricRecord, RoundRecord
from fedrema.simulation.state import Round


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two methods on five clients, four rounds."""
    folder = tmp_path_factory.mktemp("regression")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(150, 3)).astype(np.float32)
    y = x @ [1.0, -2.0, 0.5] + 10
    federation = fedrema.Federation.from_arrays(x, y, np.arange(150) % 5, task="regression")
    for method in ("fedavg", "local"):
        fedrema.run(method, federation=federation, rounds=4, lr=0.05, batch=10, metrics="mae", out=folder / method)
    return folder


def test_compare(folder, capsys):
    assert main(["compare", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "RMSE, lower is better" in said
    assert "Also final: R², MAE (lower is better)." in said
    assert "in honest RMSE, negative is better" in said
    assert (folder / "curves.png").stat().st_size > 1000
    assert main(["compare", str(folder), "--no-plot", "--quantity", "final_mae"]) == 0
    assert "in final MAE, negative is better" in " ".join(capsys.readouterr().out.split())


def test_report(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert '"title":"RMSE"' in (folder / "report.html").read_text()


def test_progress_names_the_primary_metric():
    progress = Progress(disable=True)
    task = progress.add_task("run", total=3, state="")
    watch = Watch(progress, task, None, lines=False)
    watch(Round(RoundRecord(1, metrics={"rmse": MetricRecord(0.25), "r2": MetricRecord(0.5)}), {}))
    assert progress.tasks[task].fields["state"] == "RMSE  0.250"
    watch(Round(RoundRecord(2, metrics={"accuracy": MetricRecord(0.25)}), {}))
    assert progress.tasks[task].fields["state"] == "accuracy  25.0%"
