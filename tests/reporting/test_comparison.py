"""`fedrema.compare`: values, tables, figures, and what notebooks show."""

import pandas as pd
import pytest
from matplotlib import figure

import fedrema
from fedrema.methods.fedrema import FedReMa
from fedrema.reporting.tables import comparison_csv
from fedrema.runs.directory import find_runs
from tests.reporting.test_tables import write_two_groups


@pytest.fixture
def comparison(tmp_path):
    return fedrema.compare(write_two_groups(tmp_path))


def test_runs_folders_and_lists_of_them_are_the_same(tmp_path, comparison):
    runs = list(comparison.runs)
    for given in (tmp_path, str(tmp_path), [runs[0], runs[1:]], [run.path for run in runs], tuple(runs)):
        assert {run.path for run in fedrema.compare(given).runs} == {run.path for run in runs}
    assert len(fedrema.compare(runs[0]).groups) == 1
    with pytest.raises(fedrema.BadInput, match="a value of type int cannot be compared"):
        fedrema.compare([3])
    with pytest.raises(fedrema.BadInput, match="There is no run to compare"):
        fedrema.compare([])


def test_rows_are_the_columns_of_the_csv_file(tmp_path, comparison):
    frame = pd.DataFrame(comparison.rows())
    lines = comparison_csv(comparison.runs).splitlines()
    assert list(frame.columns) == lines[0].split(",")
    assert len(frame) == len(lines) - 1 == len(comparison.groups)
    assert comparison.csv() == comparison_csv(comparison.runs)


def test_plots_are_figures_that_notebooks_show(comparison):
    drawn = comparison.plot()
    assert isinstance(drawn, figure.Figure)
    assert drawn._repr_png_().startswith(b"\x89PNG")
    assert len(find_runs([run.path for run in comparison.runs])) == len(comparison.runs)
    with pytest.raises(fedrema.BadInput, match="'speed' cannot be drawn"):
        comparison.plot("speed")


def test_a_notebook_shows_the_tables(comparison):
    shown = comparison._repr_html_()
    assert shown.count("<table") == 1 + bool(comparison.differences())
    for row in comparison.rows():
        assert row["method"] in shown
        assert row["method"] in repr(comparison)
    assert "| method |" in comparison.markdown()
    assert r"\toprule" in comparison.latex()


def test_a_method_shows_its_settings():
    shown = FedReMa(delta=0.3)._repr_html_()
    assert "<strong>FedReMa</strong>" in shown
    assert ">0.3<" in shown


def test_relations_are_drawn_with_names(tmp_path):
    run = fedrema.run("fedrema", rounds=2, clients=4, out=tmp_path / "run", record="relations")
    drawn = fedrema.relations_figure(run)
    labels = [label.get_text() for label in drawn.axes[0].get_xticklabels()]
    assert sorted(labels) == ["0", "1", "2", "3"]
    assert "round 2" in drawn.axes[0].get_title(loc="left")
    assert "round 1" in fedrema.relations_figure(run, "S", 1).axes[0].get_title(loc="left")
    with pytest.raises(fedrema.BadInput, match="round 9 has no recorded matrices; valid are 1 to 2"):
        fedrema.relations_figure(run, number=9)
    with pytest.raises(fedrema.BadInput, match="matrix 'X' was not recorded in round 2; valid are "):
        fedrema.relations_figure(run, "X")
    plain = fedrema.run("local", rounds=1, clients=2, out=tmp_path / "plain")
    with pytest.raises(fedrema.BadInput, match="has no matrices between clients"):
        fedrema.relations_figure(plain)
