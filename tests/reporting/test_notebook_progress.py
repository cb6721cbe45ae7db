"""Progress bars in notebooks."""

import IPython
import IPython.display
import pytest

import fedrema
from fedrema.reporting import notebook_progress


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, bar):
        self.shown.append(bar._repr_html_())


@pytest.fixture
def notebook(monkeypatch):
    """What a kernel would display."""
    shown = []

    def display(bar, display_id):
        assert display_id
        shown.append(bar._repr_html_())
        return Handle(shown)

    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": None})())
    monkeypatch.setattr(IPython.display, "display", display)
    return shown


def test_a_notebook_shows_a_bar_that_ends_at_the_last_round(notebook, tmp_path):
    fedrema.run("fedrema", rounds=4, clients=4, out=tmp_path / "run")
    assert notebook_progress.in_notebook()
    assert 'value="1" max="4"' in notebook[0]
    assert 'value="4" max="4"' in notebook[-1]
    assert "FedReMa" in notebook[-1]
    assert "accuracy" in notebook[-1]
    notebook.clear()
    fedrema.resume(tmp_path / "run", rounds=6)
    assert 'value="5" max="6"' in notebook[0]
    notebook.clear()
    fedrema.resume(tmp_path / "run", rounds=7, progress=False)
    assert not notebook


def test_each_run_of_a_series_has_its_bar(notebook, tmp_path):
    fedrema.run("local", rounds=2, clients=2, seeds=2, out=tmp_path / "runs")
    assert ["seed 0" in notebook[0], "seed 1" in notebook[-1]] == [True, True]


def test_a_terminal_shows_bars_only_on_request(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedrema.reporting.progress.SECONDS_BETWEEN_LINES", 0.0)
    fedrema.run("local", rounds=2, clients=2, out=tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    fedrema.run("local", rounds=2, clients=2, out=tmp_path / "shown", progress=True)
    assert "Local round 2/2" in capsys.readouterr().err
