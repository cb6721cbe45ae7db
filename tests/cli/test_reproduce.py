"""fedrema reproduce: the whole paper, on digits."""

import re
import shutil

import pytest

from fedrema.cli import main
from fedrema.cli.experiment import ExperimentOptions, select
from fedrema.cli.reproduce import NAMES, _experiment, _names, _ordered
from fedrema.experiments.store import Store
from fedrema.methods import registry

pytestmark = pytest.mark.xdist_group("reproduce")  # one process computes the results that all these tests read


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The results of the whole smoke reproduction."""
    out = tmp_path_factory.mktemp("smoke") / "out"
    assert main(["reproduce", "--smoke", "--device", "cpu", "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def smoke(complete, tmp_path):
    """A copy of the results that a test may change."""
    return shutil.copytree(complete, tmp_path / "smoke")


def test_tables_and_figures_are_written(smoke):
    found = {path.name for path in smoke.iterdir()}
    assert {f"{name}.{ending}" for name in NAMES for ending in ("md", "csv", "tex")} <= found
    figures = {
        *("table1-ranks", "table1-clients", "table2-ranks", "table3-period", "curves-curves", "motivation-samples"),
        *("heatmaps-similarity", "heatmaps-matching", "heatmaps-period", "heatmaps-peers", "methods-curves"),
        "variance-components",
    }
    assert {path.stem for path in smoke.glob("*.png")} == {path.stem for path in smoke.glob("*.pdf")} == figures
    assert {"README.md", "runs"} <= found
    assert "unfinished" not in found


def test_each_run_is_computed_once_however_many_tables_show_it(smoke):
    # With one kind of data: 11 methods, MOON with another µ, 4 more δ, +F, +A&F; 9 methods at each of 3 more s; with
    # two replicates each. And 3 methods on 5 partitions with 2 seeds, of which 2 runs each are replicates of others.
    assert len(Store(smoke / "runs").keys()) == 2 * (11 + 1 + 4 + 2 + 3 * 9) + 3 * (5 * 2 - 2)


def test_replicates_have_their_own_partition_and_training_seed(smoke):
    runs = [run for run in Store(smoke / "runs") if run.method == "local"]
    assert {(run.settings["seed"], run.settings["data-seed"]) for run in runs} == {(0, 0), (1, 1)}
    page = (smoke / "table5.md").read_text()
    assert "| method | replicates |" in page
    assert "over replicates, each with its own partition and training seed" in page


def test_variance_components_are_reported(smoke):
    page = (smoke / "variance.md").read_text()
    assert "### Variance components" in page
    assert "| FedReMa | 5 × 2 |" in page


def test_published_numbers_are_not_compared_with_other_data(smoke):
    for name in NAMES:
        page = (smoke / f"{name}.md").read_text()
        assert page.startswith("## Smoke test on digits: ")
        assert "published" not in page


def test_every_claim_gets_a_verdict(smoke):
    claims = sum(len(_experiment(name, True, ExperimentOptions()).claims) for name in NAMES)
    page = (smoke / "README.md").read_text()
    assert claims >= 15
    assert len(re.findall(r"\| (holds|does not hold|not decided) \|", page)) == claims


def test_the_same_command_again_runs_nothing(smoke, tmp_path, capsys):
    out = tmp_path / "again"
    shutil.copytree(smoke, out)
    before = sorted(path.name for path in (out / "runs").glob("commands-*"))
    assert main(["reproduce", "table5", "--smoke", "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "All runs have finished already." in printed.err
    assert "Smoke test on digits: Table 5" in printed.out
    assert "Table 4" not in printed.out
    assert sorted(path.name for path in (out / "runs").glob("commands-*")) == before


def test_only_tables_with_finished_runs_are_written(tmp_path):
    out = tmp_path / "out"
    arguments = ["table5", "--smoke", "--seeds", "1", "--only", "none", "--device", "cpu", "--quiet", "--out", str(out)]
    assert main(["reproduce", *arguments]) == 0
    # These tables have a row for FedAvg; no run of the other tables is finished.
    assert {path.stem for path in out.glob("*.csv")} >= {"table5", "table1", "table2", "heatmaps", "curves"}
    assert not {path.stem for path in out.glob("*.csv")} & {"table3", "table4"}
    assert "| neither (FedAvg) | 1 |" in (out / "table5.md").read_text()


def test_the_most_important_tables_run_first():
    names = (
        "methods",
        "curves",
        "table5",
        "table1",
        "table3",
        "variance",
        "table2",
        "motivation",
        "heatmaps",
        "table4",
    )
    parts = select([_experiment(name, False, ExperimentOptions()) for name in names], None, None)
    order = [
        "table1",
        "table2",
        "table4",
        "table5",
        "table3",
        "heatmaps",
        "curves",
        "motivation",
        "variance",
        "methods",
    ]
    assert [part.experiment.name for part in _ordered(parts)] == order


def test_the_plan_lists_missing_cells_in_order_and_starts_nothing(smoke, capsys):
    store = Store(smoke / "runs")
    arguments = ["reproduce", "table5", "table3", "--smoke", "--device", "cpu", "--out", str(smoke)]
    assert main([*arguments, "--plan"]) == 0
    assert capsys.readouterr().out == "All runs have finished already.\n"
    before = store.keys()
    assert main([*arguments, "--seeds", "4", "--plan"]) == 0
    printed = capsys.readouterr().out
    cells = re.findall(r"^(table\d) +(.*?)  +2  ", printed, flags=re.M)
    assert [name for name, _ in cells] == ["table5"] * 3 + ["table3"] * 3  # δ = 0.1 and 0.5 are in Table 5 already
    assert [title for _, title in cells[3:]] == ["δ = 0.3", "δ = 0.7", "δ = 0.9"]
    assert "12 runs to do: about" in printed
    assert store.keys() == before


def test_all_selects_every_table_of_the_paper():
    assert _names(("all",)) == [name for name in NAMES if name != "methods"]
    assert _names(("methods", "all"))[0] == "methods"
    assert _names(("table2", "all", "table2"))[:2] == ["table2", "table1"]


def test_every_method_has_a_row():
    rows = {cell.method for cell in _experiment("methods", False, ExperimentOptions()).cells}
    assert rows == set(registry())


def test_rows_and_columns_can_be_selected():
    experiments = [_experiment(name, False, ExperimentOptions()) for name in ("table1", "table3")]
    (part,) = select(experiments, "fedavg,moon,mnist", 2)
    assert [(cell.row.name, cell.column.name) for cell in part.cells] == [("fedavg", "mnist"), ("moon", "mnist")]
    assert part.seeds == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table6"], "There is no experiment 'table6'; valid are table1, table2,"),
        (["table1", "--only", "nobody"], "--only 'nobody' is neither a row nor a column; valid are cifar10,"),
        (["--minutes", "-1"], "--minutes must be 0 or more"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--launcher", "slurm"], "slurm"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_before_any_work(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
