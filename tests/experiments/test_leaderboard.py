"""Which runs the leaderboard consists of, and in which order it shows methods, from made-up runs."""

import re
from dataclasses import replace

import pytest

from fedrema.config.settings import make_settings
from fedrema.experiments.leaderboard.board import ALWAYS, BEST, BEST_TUNED, COMPLETE, PACKAGED, TUNED_FILE, Board
from fedrema.experiments.leaderboard.standings import column_table, costs, overview, round_seconds, tuned_table
from fedrema.experiments.store import key_of
from fedrema.methods import registry
from fedrema.runs.provenance import revisions_of
from tests.experiments.made_runs import keep, made_run, made_summary

METHODS = list(registry())


def keep_cell(board, cell, accuracies):
    for seed, accuracy in enumerate(accuracies):
        key = key_of(cell.settings(seed))
        summary = made_summary(rounds=2, honest_accuracy=accuracy, final_accuracy=accuracy)
        seconds = {"round": [1, 2], "seconds": [0.5, 0.02]}
        ran_on = {"device": "cpu"}
        run = made_run(key, cell.method, seed, summary=summary, curves=seconds, ran_on=ran_on)
        keep(board.store, replace(run, revisions=revisions_of(cell.parsed, "cpu")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder of runs in which methods are the worse, the later they are in the registry."""
    made = Board(tmp_path_factory.mktemp("board"))
    for place, method in enumerate(METHODS):
        cell = made.experiment.cell(method, "digits")
        keep_cell(made, cell, [0.9 - 0.01 * place + 0.001 * seed for seed in range(3)])
    made.store.fold()
    return made.folder


@pytest.fixture
def board(finished, tmp_path):
    """A board with these runs, to which a test may add others."""
    made = Board(tmp_path)
    made.adopt(finished)
    return made


def test_every_method_has_a_row_and_every_column_three_replicates():
    made = Board()
    assert [row.name for row in made.experiment.rows] == METHODS
    assert made.seeds == 3
    assert {*COMPLETE} < {column.name for column in made.experiment.columns}
    for cell in made.experiment.cells:
        settings = [cell.settings(seed) for seed in range(3)]
        assert [each.data.data_seed for each in settings] == [each.simulation.seed for each in settings] == [0, 1, 2]
        assert {each.simulation.rounds for each in settings} == {200}
        assert {each.data.clients for each in settings} == {20}


def test_runs_that_have_not_been_collected_in_a_table_yet_are_adopted_too(tmp_path):
    stopped, made = Board(tmp_path / "stopped"), Board(tmp_path / "made")
    keep_cell(stopped, stopped.experiment.cell("local", "digits"), [0.5, 0.6])
    made.adopt(stopped.folder)
    assert len(made.store.keys()) == 2
    assert made.store.keys() == stopped.store.keys()


def test_untuned_are_the_best_methods_without_a_choice(board):
    assert board.untuned() == [("digits", row) for row in METHODS[:6]] + [("few-strong", row) for row in METHODS[:6]]
    for place, cell in enumerate(cell for cell in board.tuning["digits"].cells if cell.row.base == METHODS[2]):
        keep_cell(board, cell, [0.5 + 0.01 * place])
    assert ("digits", METHODS[2]) not in board.untuned()
    assert ("few-strong", METHODS[2]) in board.untuned()


def test_the_order_is_that_of_honest_accuracy(board):
    assert board.ranked()[1] == METHODS
    table = overview(board, complete=False)
    assert table.headings == ("place", "method", "average rank", "digits")
    titles = [registry()[name].title for name in METHODS]
    assert [row[:3] for row in table.rows] == [(f"{n}", title, f"{n}.0") for n, title in enumerate(titles, 1)]
    assert table.rows[0][3] == "90.1 ± 0.1"
    assert overview(board).headings[3:] == tuple(column.title for column in board.experiment.columns)
    assert set(overview(board).rows[0][4:]) == {"–"}


def test_methods_without_runs_are_named(tmp_path):
    made = Board(tmp_path)
    keep_cell(made, made.experiment.cell("local", "digits"), [0.5, 0.6, 0.7])
    table = overview(made)
    assert [row[1:4] for row in table.rows] == [("Local", "–", "60.0 ± 10.0")]
    assert any(note.startswith("Methods without any run yet: APFL, CReFF,") for note in table.notes)
    assert column_table(made, made.experiment.columns[1]) is None
    assert column_table(made, made.experiment.columns[0], "fedavg") is None


def test_costs_are_per_client_and_round(board):
    summary = made_summary(rounds=10, honest_accuracy=0.5)
    summary = type(summary)(10, summary.metrics, bytes_up=80_000, bytes_down=40_000)
    seconds = [3.0, *(0.01 * n for n in range(1, 20))]
    run = made_run(summary=summary, clients={"names": ["a", "b"]}, curves={"round": [*range(20)], "seconds": seconds})
    assert round_seconds(run) == pytest.approx(0.015)  # the median of the fastest two: 0.01 and 0.02
    assert (run.bytes_sent, run.bytes_received) == (4000, 2000)
    assert costs([run, run]) == ("15", "4.0", "2.0")
    table = column_table(board, board.experiment.columns[0])
    assert table.headings[-3:] == ("ms per round", "kB sent", "kB received")
    assert table.rows[0][-3] == "20"


def test_differences_are_those_from_the_reference(board):
    table = column_table(board, board.experiment.columns[0], METHODS[1])
    assert table.rows[0][-2:] == ("+1.0", "+1.0 to +1.0")
    assert table.rows[1][-2:] == ("–", "–")


def test_only_the_best_are_run_in_the_other_columns(board):
    cells = board.further_cells()
    expected = {*METHODS[:BEST], *ALWAYS}
    assert {cell.row.name for cell in cells} == expected
    assert list(dict.fromkeys(cell.column.name for cell in cells)) == ["many", "dirichlet", "fashion"]
    assert len(cells) == 3 * len(expected)
    columns = [cell.column.name for cell in board.complete_cells()]
    assert columns == [column for column in COMPLETE for _ in METHODS]  # an interrupted command completes columns


def test_every_method_is_tuned_with_eight_settings_on_another_partition():
    for sweep in Board().tuning.values():
        for method in METHODS:
            variants = [cell for cell in sweep.cells if cell.row.base == method]
            assert len(variants) == 8, (sweep.name, method)
            assert {cell.settings(0).data.data_seed for cell in variants} == {1000}


def test_the_best_are_tuned_and_run_with_what_was_chosen(board):
    cells = [cell for cell in board.tuning_cells() if cell.column.name == "digits"]
    assert {cell.row.base for cell in cells} == {*METHODS[:BEST_TUNED]}
    first, *others = [cell for cell in cells if cell.row.base == METHODS[0]]
    keep_cell(board, first, [0.7])
    assert board.choices() == []  # seven of eight are missing
    for place, cell in enumerate(others):
        keep_cell(board, cell, [0.71 + 0.01 * place])
    board.write_tuned()
    (tuned,) = board.tuned_cells()
    plain = board.experiment.cell(METHODS[0], "digits")
    assert (tuned.row.title, tuned.column) == (f"{plain.row.title}, tuned", plain.column)
    by_file = make_settings(METHODS[0], {**plain.values, "tuned": board.folder / TUNED_FILE})
    assert by_file.method == tuned.parsed.method
    assert by_file.local == tuned.parsed.local
    assert dict(others[-1].row.swept).items() <= {**tuned.values}.items()
    assert tuned_table(board) is None
    keep_cell(board, tuned, [0.92, 0.921, 0.922])
    (row,) = tuned_table(board).rows
    assert row[-1] == "+2.0 (+2.0 to +2.0)"
    assert row[3] == "90.1 ± 0.1 → 92.1 ± 0.1"
    assert re.search(r"`--lr 0.2`", row[2])


def test_the_packaged_runs_belong_to_the_leaderboard_and_are_current():
    made = Board()
    made.store.check()
    wanted = {key_of(cell.settings(seed)) for cell in made.experiment.cells for seed in range(3)}
    wanted |= {key_of(cell.settings(0)) for sweep in made.tuning.values() for cell in sweep.cells}
    wanted |= {key_of(cell.settings(seed)) for cell in made.tuned_cells() for seed in range(3)}
    assert {*made.store.keys()} <= wanted
    for run in made.store:
        assert not run.failed
        assert run.summary.rounds == 200
        assert not any(isinstance(value, str) and value.startswith("/") for value in run.settings.values())


def test_the_packaged_file_for_tuned_is_what_the_sweeps_chose(tmp_path):
    made = Board()
    made.folder = tmp_path
    made.write_tuned()
    assert (tmp_path / TUNED_FILE).read_text() == (PACKAGED / TUNED_FILE).read_text()
