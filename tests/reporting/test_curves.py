import dataclasses
import itertools

import matplotlib.figure
import pytest
from matplotlib.text import Text

from fedrema.core import Reports
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.reporting.curves import draw_curves
from fedrema.reporting.plots import Look, apart, looks
from fedrema.runs.run import Run
from tests.reporting.folders import replace_records, round_record, write_run, write_two_groups


@pytest.fixture
def figures(monkeypatch):
    """A list of the figures that are drawn, for inspection."""
    made = []
    before = matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        made.append(figure)
        before(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return made


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("SVG", b"<?xml"), ("pdf", b"%PDF")])
def test_the_file_extension_chooses_the_format_and_no_other_file_is_left(tmp_path, suffix, start):
    path = tmp_path / "pictures" / f"curves.{suffix}"
    draw_curves([write_run(tmp_path / "a")], path)
    assert path.read_bytes().startswith(start)
    assert list(path.parent.iterdir()) == [path]


def test_other_file_extensions_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"curves.gif cannot be drawn: names ending in .png, .svg or .pdf are valid"):
        draw_curves([write_run(tmp_path / "a")], tmp_path / "curves.gif")


def test_curves_show_mean_band_and_end_of_the_period(tmp_path, figures):
    low = write_run(tmp_path / "0", "fedrema", 0, accuracies=(0.5, 0.6, 0.7), critical=(True, False, False))
    high = write_run(tmp_path / "1", "fedrema", 1, accuracies=(0.7, 0.6, 0.9), critical=(True, True, False))
    draw_curves([low, high], tmp_path / "curves.png")
    (axes,) = figures[0].axes
    curve, end = axes.lines
    assert curve.get_ydata() == pytest.approx([60, 60, 80])
    assert end.get_xdata() == [1.5, 1.5]  # last critical rounds 1 and 2
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(50), pytest.approx(90))
    assert axes.get_title(loc="left") == "Accuracy by round: digits, grouped, s = 0.1, 2 clients"
    caption = figures[0].get_supxlabel()
    assert caption == (
        "Line: mean over 2 training seeds; band: lowest to highest seed. Dotted: end of the critical period."
    )


def test_a_period_that_has_not_ended_is_not_marked(tmp_path, figures):
    draw_curves([write_run(tmp_path / "0", "fedrema", critical=(True, True, True))], tmp_path / "curves.png")
    assert len(figures[0].axes[0].lines) == 1
    assert figures[0].get_supxlabel() == "One training seed."


def test_low_first_rounds_are_cut_off_and_the_caption_says_so(tmp_path, figures):
    climbing = (0.1, 0.3, *(0.8 + 0.01 * (number % 5) for number in range(20)))
    runs = [write_run(tmp_path / method, method, accuracies=climbing) for method in ("local", "fedavg")]
    draw_curves(runs, tmp_path / "curves.png")
    bottom, top = figures[0].axes[0].get_ylim()
    assert 70 < bottom < 80 < 84 < top < 90
    assert figures[0].get_supxlabel() == "One training seed each. Some of the first rounds are below the visible range."


def test_only_rounds_of_all_seeds_are_drawn(tmp_path, figures):
    runs = [
        write_run(tmp_path / "0", seed=0, accuracies=(0.5, 0.6, 0.7), ended=False, rounds=9),
        write_run(tmp_path / "1", seed=1, accuracies=(0.6,), ended=False, rounds=9),
        write_run(tmp_path / "2", "local", seed=0, accuracies=(), ended=False, rounds=9),
        write_run(tmp_path / "3", "fedper", accuracies=(0.1, 0.2)),
    ]
    draw_curves(runs, tmp_path / "curves.png")
    assert [list(line.get_xdata()) for line in figures[0].axes[0].lines] == [[1], [1, 2]]
    assert figures[0].get_supxlabel().startswith("Line: mean over 1 to 2 training seeds")


def test_seeds_without_a_common_round_make_no_curve(tmp_path):
    first, second = (write_run(tmp_path / str(seed), seed=seed, accuracies=(0.5,)) for seed in (0, 1))
    record = dataclasses.replace(second.rounds[0], round=2)
    replace_records(second, [record])
    with pytest.raises(BadInput, match="Quantity 'accuracy' cannot be drawn: no round of these runs has it"):
        draw_curves([first, Run(second.path)], tmp_path / "curves.png")


def test_many_groups_have_separate_labels_and_different_strokes(tmp_path, figures):
    runs = [write_run(tmp_path / str(number), lr=number / 10) for number in range(10)]
    draw_curves(runs, tmp_path / "curves.png")
    axes = figures[0].axes[0]
    figures[0].draw_without_rendering()  # sizes at the figure's own resolution, not the file's
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)  # without leaders
    assert [text.get_text() for text in axes.texts] == [f"FedAvg lr={number / 10:g}" for number in range(10)]
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))
    frame = axes.get_window_extent()
    assert frame.y0 < boxes[0].y0 < boxes[-1].y1 < frame.y1
    assert all(frame.x1 < box.x0 and box.x1 <= figures[0].bbox.x1 for box in boxes)
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 10


def test_labels_move_only_if_they_overlap():
    line = 0.05
    assert apart([0.2, 0.8], line) == pytest.approx([0.2, 0.8])
    assert apart([0.5, 0.5], line) == pytest.approx([0.5 - line / 2, 0.5 + line / 2])
    assert apart([1.0, 1.0], line) == pytest.approx([1 - 1.5 * line, 1 - line / 2])


def test_every_method_declares_its_own_colour_and_stroke():
    declared = {name: (kind.reports.colour, kind.reports.stroke) for name, kind in registry().items()}
    assert None not in {colour for colour, _ in declared.values()}
    assert len(set(declared.values())) == len(declared)


def test_a_method_looks_the_same_in_every_figure():
    declared = {name: kind.reports for name, kind in registry().items()}
    fedrema, fedavg = (Look(one.colour, one.stroke, one.emphasis) for one in (declared["fedrema"], declared["fedavg"]))
    assert looks(["fedavg", "fedrema"], declared) == [fedavg, fedrema]
    first, mine, again, other = looks(["fedrema", "mine", "fedrema", "fedavg"], {**declared, "mine": Reports()})
    assert (first, other) == (fedrema, fedavg)
    assert len({(look.colour, look.stroke) for look in (first, mine, again, other)}) == 4
    (own,) = looks(["mine"], {"mine": Reports(colour="#123456", stroke=":", emphasis=2.0)})
    assert own == Look("#123456", ":", 2.0)
    many = looks([""] * 32, {})
    assert len(set(many)) == 32
    assert looks([""] * 33, {})[32] == many[0]  # looks repeat after all have been used


def test_traces_have_the_titles_that_methods_declare(tmp_path, figures):
    run = write_run(tmp_path / "a", "fedrema", accuracies=(0.5,))
    replace_records(run, [round_record(1, 0.5, trace={"gap_ratio": 0.75, "mean_gap": 0.1})])
    draw_curves([Run(run.path)], tmp_path / "curves.png", "gap_ratio")
    assert figures[0].axes[0].get_ylabel() == "Gap relative to its peak (%)"
    assert figures[0].axes[0].lines[0].get_ydata() == pytest.approx([75])
    draw_curves([Run(run.path)], tmp_path / "curves.png", "mean_gap")
    assert figures[1].axes[0].get_ylabel() == "Mean gap"
    assert figures[1].axes[0].lines[0].get_ydata() == pytest.approx([0.1])


def test_curves_of_other_quantities(tmp_path, figures):
    runs = write_two_groups(tmp_path)
    draw_curves(runs, tmp_path / "curves.png", "critical")  # FedAvg has none: left out
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["FedReMa"]
    assert figures[0].axes[0].get_ylabel() == "Critical"
    assert figures[0].axes[0].get_ylim()[0] < 0.1
    draw_curves(runs, tmp_path / "curves.png", "worst_tenth")
    assert figures[1].axes[0].get_ylabel() == "Test accuracy of the worst tenth of the clients (%)"
    with pytest.raises(BadInput, match="Quantity 'speed' cannot be drawn: no round of these runs has it"):
        draw_curves(runs, tmp_path / "curves.png", "speed")
    with pytest.raises(BadInput, match="Quantity 'client_accuracy' cannot be drawn: it is not one number per round"):
        draw_curves(runs, tmp_path / "curves.png", "client_accuracy")
