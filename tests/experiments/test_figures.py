"""Figures of an experiment: their content, against numbers computed by hand."""

import dataclasses
import itertools
import shutil

import numpy as np
import pytest

from fedrema.experiments.figures import FIGURES, draw, file_stem
from fedrema.experiments.figures.by_round import chance, figure_of_curves, figure_of_matching, figure_of_period
from fedrema.experiments.figures.by_row import client_means, figure_of_clients, figure_of_ranks, figure_of_samples
from fedrema.experiments.figures.matrices import figure_of_peers, figure_of_similarity, weights
from fedrema.experiments.figures.panels import Results
from fedrema.experiments.spec import FigureSpec
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.tasks import Runner, finished_runs, missing_tasks
from fedrema.methods import find_method
from fedrema.reporting.plots import Look
from tests.experiments.made_runs import made_run, made_summary
from tests.fixtures import unwatched

FILE = """
title = "Small and smaller"
seeds = 2
[settings]
rounds = 6
clients = 8
groups = 4
hidden = 4
epochs = 1
record = "relations"
[columns.n40]
title = "40 samples"
samples = 40
[columns.n20]
title = "20 samples"
samples = 20
[rows.local]
title = "Local"
[rows.fedavg]
title = "FedAvg"
[rows.fedrema]
title = "FedReMa"
[rows.eager]
title = "FedReMa, eager"
method = "fedrema"
delta = 0.99
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "small.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def experiment(file):
    return read_experiment(file)


def run_experiment(experiment, seeds, folder):
    store = Store(folder / "runs")
    for task in missing_tasks(experiment.cells, seeds, store):
        Runner(store, folder / "work", unwatched).run(task)
    return store


@pytest.fixture(scope="module")
def store(experiment, tmp_path_factory):
    return run_experiment(experiment, 2, tmp_path_factory.mktemp("store"))


def figure_of(experiment, kind, rows=None, columns=None, title=""):
    names = [tuple(line.name for line in lines) for lines in (experiment.rows, experiment.columns)]
    return FigureSpec(kind, rows or names[0], columns or names[1], title)


@pytest.fixture
def results(experiment, store):
    def make(kind, rows=None, columns=None, title="", of=store, seeds=2):
        return Results(figure_of(experiment, kind, rows, columns, title), experiment, seeds, of)

    return make


def caption(figure):
    return figure.get_supxlabel().replace("\n", " ")


def named(axes):
    return {text.get_text() for text in axes.texts}


@pytest.mark.parametrize("kind", FIGURES)
def test_each_kind_is_written_completely_and_reproducibly(kind, experiment, store, tmp_path):
    folder = tmp_path / "pictures"
    paths = draw(figure_of(experiment, kind), experiment, 2, store, folder)
    assert paths == [folder / f"small-{kind}.png", folder / f"small-{kind}.pdf"]
    assert sorted(folder.iterdir()) == sorted(paths)
    png, pdf = (path.read_bytes() for path in paths)
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == 1440  # 7.2 inches at 200 dots per inch
    assert len(png) > 10_000
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf  # text as TrueType, not as outlines
    again = draw(figure_of(experiment, kind), experiment, 2, store, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [png, pdf]
    draw(figure_of(experiment, kind), experiment, 2, Store(tmp_path / "none"), folder)
    assert list(folder.iterdir()) == []  # figures of runs that no longer exist are removed


@pytest.mark.parametrize("kind", FIGURES)
def test_no_figure_is_written_without_data(kind, experiment, tmp_path):
    folder = tmp_path / "pictures"
    assert draw(figure_of(experiment, kind), experiment, 2, Store(tmp_path / "none"), folder) == []
    assert not folder.exists()


@pytest.mark.parametrize("kind", FIGURES)
def test_one_seed_of_one_round_can_be_drawn(kind, file, tmp_path_factory, tmp_path):
    experiment = read_experiment(file, {"rounds": 1})
    store = run_experiment(experiment, 1, tmp_path_factory.getbasetemp() / "one_round")
    paths = draw(figure_of(experiment, kind), experiment, 1, store, tmp_path)
    assert len(paths) == (0 if kind == "components" else 2)  # one seed has no variance


def test_the_second_figure_of_a_kind_is_numbered(experiment):
    figures = tuple(
        figure_of(experiment, kind, title=title) for kind, title in (("period", "a"), ("ranks", ""), ("period", "b"))
    )
    several = dataclasses.replace(experiment, figures=figures)
    assert [file_stem(one, several) for one in figures] == ["small-period", "small-ranks", "small-period-2"]
    assert file_stem(figure_of(experiment, "period", title="c"), several) == "small-period"


def test_curves_are_means_over_seeds_in_a_panel_per_column(results, experiment, store):
    figure = figure_of_curves(results("curves", rows=("fedavg", "fedrema")))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["40 samples", "20 samples"]
    for axes, column in zip(figure.axes, ("n40", "n20"), strict=True):
        runs = finished_runs(experiment.cell("fedavg", column), 2, store)
        values = 100 * np.array([run.curves["accuracy"] for run in runs])
        assert axes.lines[0].get_ydata() == pytest.approx(values.mean(axis=0))
        band = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (band.min(), band.max()) == (pytest.approx(values.min()), pytest.approx(values.max()))
        assert named(axes) == {"FedAvg", "FedReMa"}
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.get_suptitle() == "Small and smaller. Test accuracy by round"
    assert caption(figure).startswith("Line: mean over 2 training seeds; band: lowest to highest seed.")
    assert "Not run" not in caption(figure)


def look_of(method):
    declared = find_method(method).reports
    return Look(declared.colour, declared.stroke, declared.emphasis)


def test_rows_have_the_colours_and_strokes_of_their_methods(results, file, tmp_path):
    looks = results("curves").looks
    assert looks["fedavg"] == look_of("fedavg")
    assert looks["fedrema"] == look_of("fedrema")
    assert looks["eager"].colour not in {looks[row].colour for row in ("local", "fedavg", "fedrema")}
    assert results("curves", rows=("eager",)).looks == looks  # independent of the other rows
    path = tmp_path / "parts.toml"
    path.write_text(
        "[rows.none]\nmethod = 'fedavg'\n[rows.mds]\nmethod = 'fedrema'\ndelta = 0.1\n[rows.both]\nmethod = 'fedrema'\n"
    )
    parts = read_experiment(path)
    looks = Results(figure_of(parts, "curves"), parts, 1, Store(tmp_path / "none")).looks
    assert (looks["none"], looks["both"]) == (look_of("fedavg"), look_of("fedrema"))
    assert len({look.colour for look in looks.values()}) == 3


@pytest.fixture
def partly(experiment, store, tmp_path):
    """A store without Local, without FedAvg on 20 samples, and with one diverged seed of 'eager' on 40 samples."""
    some = Store(tmp_path / "partly")
    some.folder.mkdir()
    for cell, seed in itertools.product(experiment.cells, range(2)):
        settings = cell.settings(seed)
        if cell.row.name == "local" or (cell.row.name, cell.column.name) == ("fedavg", "n20"):
            continue
        if (cell.row.name, cell.column.name, seed) == ("eager", "n40", 1):
            some.put_diverged(settings, "diverged")
        else:
            shutil.copy(store.folder / f"{key_of(settings)}.json", some.folder)
    return some


def test_missing_runs_are_left_out_and_named(results, partly):
    figure = figure_of_curves(results("curves", of=partly))
    left, right = figure.axes
    assert named(left) == {"FedAvg", "FedReMa", "FedReMa, eager"}
    assert named(right) == {"FedReMa", "FedReMa, eager"}
    assert "Line: mean over 1 to 2 training seeds" in caption(figure)
    assert caption(figure).endswith(
        "Not run: Local; FedAvg at 20 samples. Diverged, at least in one seed: FedReMa, eager at 40 samples."
    )
    only = figure_of_curves(results("curves", rows=("local", "fedavg"), of=partly))
    assert [axes.get_title(loc="left") for axes in only.axes] == ["40 samples"]
    assert caption(only).endswith("Not run: Local, 20 samples.")


def test_numbers_of_samples_are_in_ascending_order_with_deviations(results, experiment, store):
    figure = figure_of_samples(results("samples", rows=("fedavg",)))
    best, honest = figure.axes
    assert [tick.get_text() for tick in best.get_xticklabels()] == ["20", "40"]
    assert best.get_xscale() == "log"
    for axes, quantity in ((best, "best_accuracy"), (honest, "honest_accuracy")):
        runs = [finished_runs(experiment.cell("fedavg", column), 2, store) for column in ("n20", "n40")]
        values = 100 * np.array([[run.summary[quantity] for run in some] for some in runs])
        line, _, (bars,) = axes.containers[0]
        assert list(line.get_xdata()) == [20, 40]
        assert [*line.get_ydata()] == pytest.approx([*values.mean(axis=1)])
        spans = [segment[:, 1] for segment in bars.get_segments()]
        assert [top - bottom for bottom, top in spans] == pytest.approx([*(2 * values.std(axis=1, ddof=1))])
        assert named(axes) == {"FedAvg"}


def test_similarities_are_those_of_the_first_seed_with_frames_around_groups(results, experiment, store):
    figure = figure_of_similarity(results("similarity", rows=("fedavg", "fedrema"), columns=("n40",)))
    (first, _) = finished_runs(experiment.cell("fedavg", "n40"), 2, store)
    rounds = list(first.matrices["S"])
    *panels, bar = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == 2 * [f"Round {number}" for number in rounds]
    assert panels[0].get_ylabel() == "FedAvg"
    assert panels[len(rounds)].get_ylabel() == "FedReMa"
    assert np.asarray(panels[1].images[0].get_array()) == pytest.approx(np.array(first.matrices["S"][rounds[1]]))
    assert {axes.images[0].get_clim() for axes in panels} == {(0, 1)}
    assert [frame.get_xy() for frame in panels[0].patches] == [(place - 0.5, place - 0.5) for place in (0, 2, 4, 6)]
    assert {frame.get_width() for frame in panels[0].patches} == {2}
    assert bar.get_ylabel() == "Similarity $S_{ij}$"
    assert "Training seed 0. Frames: the true groups." in caption(figure)


def test_matching_is_compared_with_chance(results, experiment, store):
    figure = figure_of_matching(results("matching", rows=("fedavg", "fedrema"), columns=("n40",)))
    precision, recall = figure.axes
    kept = [run.matching for run in finished_runs(experiment.cell("fedavg", "n40"), 2, store)]
    for axes, part in ((precision, "precision"), (recall, "recall")):
        assert axes.lines[0].get_ydata() == pytest.approx(100 * np.mean([getattr(one, part) for one in kept], axis=0))
        assert axes.get_ylim()[0] == 0
    dashed = [line for line in precision.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [pytest.approx(100 / 7)]  # one relevant peer of seven
    assert not [line for line in recall.lines if line.get_linestyle() == "--"]


def test_the_chance_level_equals_a_calculation_by_hand():
    assert chance([0, 0, 1, 1]) == pytest.approx(1 / 3)
    assert chance([0, 0, 0, 1]) == pytest.approx((3 * 2 / 3 + 0) / 4)


class Made(Store):
    """A store of made-up runs, by name of row and seed."""

    def __init__(self, experiment, runs):
        self.runs = {
            key_of(experiment.cell(row, column).settings(seed)): run for (row, column, seed), run in runs.items()
        }

    def find(self, settings):
        return self.runs.get(key_of(settings))


def made(seed=0, summary=None, curves=None, clients=None, **settings):
    parts = {"summary": made_summary(rounds=4, **(summary or {})), "curves": curves or {}}
    return made_run("", "fedrema", seed, settings, clients=clients, **parts)


def test_a_trace_is_shown_until_the_period_ends(experiment, results):
    def run(seed, ratios, critical):
        curves = {"round": [1, 2, 3, 4], "gap_ratio": ratios}
        return made(seed, {"critical_rounds": critical}, curves, delta=0.5)

    ended, lasting = run(0, [1.0, 0.8, 0.4, None], 3), run(1, [1.0, 0.6, 0.8, 0.7], 4)
    store = Made(experiment, {("fedrema", "n40", 0): ended, ("fedrema", "n40", 1): lasting})
    figure = figure_of_period(results("period", columns=("n40",), of=store))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "FedReMa (delta = 0.5)"
    threshold, first, dot, second, mean = axes.lines
    assert threshold.get_ydata()[0] == 0.5
    assert list(first.get_xdata()) == [1, 2, 3]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (3, pytest.approx(0.4))
    assert second.get_ydata() == pytest.approx([1.0, 0.6, 0.8, 0.7])
    assert mean.get_ydata() == pytest.approx([1.0, 0.7, 0.6])  # while both are in the period
    assert axes.get_ylabel() == "Gap relative to its peak"
    assert caption(figure).startswith(
        "Thin: each of 2 training seeds; thick: their mean while all are in the critical period."
    )
    assert "Without a dot, the critical period lasts to the end." in caption(figure)
    assert "Not run: Local, FedAvg, FedReMa, eager." in caption(figure)


def test_weights_of_peers_are_shares_by_row(results, experiment, store):
    figure = figure_of_peers(results("peers", columns=("n40",)))
    first, second, _ = figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["FedReMa", "FedReMa, eager"]
    counts = finished_runs(experiment.cell("fedrema", "n40"), 2, store)[0].matrix("G")
    assert np.asarray(first.images[0].get_array()) == pytest.approx(100 * counts / counts.sum(axis=1, keepdims=True))
    assert first.images[0].get_clim() == second.images[0].get_clim()
    assert "Not recorded" not in caption(figure)  # FedAvg and Local declare no such matrix
    assert weights(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist() == [[0.25, 0.75], [0.0, 0.0]]


def test_clients_are_dots_and_the_best_method_is_first(experiment, results):
    groups = [0, 0, 1, 1]

    def run(seed, *accuracies):
        return made(seed, clients={"names": list("abcd"), "accuracy": list(accuracies), "groups": groups})

    runs = {
        ("fedavg", "n40", 0): run(0, 0.2, 0.4, None, 0.6),
        ("fedavg", "n40", 1): run(1, 0.4, 0.4, None, 0.2),
        ("fedrema", "n40", 0): run(0, 0.9, 0.9, 0.8, 0.6),
    }
    assert client_means([runs["fedavg", "n40", 0], runs["fedavg", "n40", 1]]) == pytest.approx(
        [30, 40, np.nan, 40], nan_ok=True
    )
    figure = figure_of_clients(results("clients", columns=("n40",), of=Made(experiment, runs)))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FedReMa", "FedAvg"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    first, second, bar = axes.lines[:3]
    assert first.get_xdata() == pytest.approx([90, 90])
    assert second.get_xdata() == pytest.approx([80, 60])
    assert first.get_color() != second.get_color()
    assert bar.get_xdata() == pytest.approx([80, 80])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["group", "1", "2"]
    assert "mean over 1 to 2 training seeds, coloured by its group" in caption(figure)


def test_ranks_are_labelled_and_bars_join_rows_that_do_not_differ(experiment, results):
    accuracies = {"fedrema": (0.9, 0.8), "fedavg": (0.7, 0.7), "eager": (0.5, 0.75)}
    runs = {
        (row, column, 0): made(0, {"best_accuracy": value})
        for row, values in accuracies.items()
        for column, value in zip(("n40", "n20"), values, strict=True)
    }
    figure = figure_of_ranks(results("ranks", of=Made(experiment, runs), seeds=1))
    (axes,) = figure.axes
    # Ranks (1, 1), (2, 3) and (3, 2); Nemenyi's q for three is 2.343, and CD = 2.343 · √(3 · 4 / (6 · 2)) = 2.34.
    assert {"FedReMa  1.00", "FedAvg  2.50", "2.50  FedReMa, eager", "CD = 2.34"} <= named(axes)
    assert {"1", "2", "3"} <= named(axes)
    bars = [line for line in axes.lines if line.get_linewidth() > 3]
    assert len(bars) == 1
    start, end = bars[0].get_xdata()
    assert start == pytest.approx(1, abs=0.05)
    assert end == pytest.approx(2.5, abs=0.05)
    assert "Left out, as runs are missing: Local." in caption(figure)
    assert "Average rank by best accuracy" in caption(figure)


def test_a_long_title_and_caption_do_not_overlap_the_axes(results):
    plain, long = (figure_of_ranks(results("ranks", title=title)) for title in ("short", "long " * 60))
    assert long.get_figheight() > plain.get_figheight() + 0.3
    for figure in (plain, long):
        figure.draw_without_rendering()
        frame = figure.axes[0].get_window_extent()
        assert figure._suptitle.get_window_extent().y0 >= frame.y1
        assert figure._supxlabel.get_window_extent().y1 <= frame.y0
        assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1
        assert figure._supxlabel.get_window_extent().x1 <= figure.bbox.x1
