"""Records of long, growing and damaged runs."""

import numpy as np
import pytest

from fedrema.errors import BadInput
from fedrema.page.reading import DownsampledRun, RecordsFile, thinned_notes
from fedrema.runs.records import RecordChain
from fedrema.simulation.records import MetricSummary, Summary
from tests.reporting.folders import round_record, write_run


def file_of(path, **options):
    return RecordsFile(RecordChain(path, "a run"), ["north", "south"], **options)


def lines(first, last):
    chain = RecordChain(None, "a run")
    with_checksum = [chain.seal(round_record(number, 0.5, [0.5, None])) for number in range(1, last)]
    return b"".join(with_checksum[first - 1 :])


def test_short_files_are_read_completely(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 11))
    file = file_of(path, most=10)
    assert file.grow()
    assert (file.count, file.stride) == (10, 1)
    kept = file.kept()
    assert [one.record.round for one in kept] == list(range(1, 11))
    assert kept[0].clients.score[0] == 0.5
    assert np.isnan(kept[0].clients.score[1])
    assert kept[0].record == round_record(1, 0.5, [])  # lists over clients are kept as arrays only


def test_every_kth_round_of_a_long_file_is_read_with_the_first_and_the_last(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 24))
    file = file_of(path, most=10)
    file.grow()
    assert file.stride == 4  # 23 // 2 = 11 are still too many
    assert [one.record.round for one in file.kept()] == [1, 4, 8, 12, 16, 20, 23]
    assert len(file.parsed) == 7


def test_evaluated_rounds_are_kept(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 101))
    file = file_of(path, every=5, most=10)
    file.grow()
    assert file.stride == 10
    assert [one.record.round for one in file.kept()] == [1, *range(10, 101, 10)]


def test_an_incomplete_last_line_is_ignored_until_it_is_complete(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 3) + lines(3, 4)[:-40])
    file = file_of(path)
    assert file.grow()
    assert [one.record.round for one in file.kept()] == [1, 2]
    assert not file.grow()
    with path.open("ab") as stream:
        stream.write(lines(3, 4)[-40:])
    assert file.grow()
    assert [one.record.round for one in file.kept()] == [1, 2, 3]
    assert file.kept()[-1].record == round_record(3, 0.5, [])


@pytest.mark.parametrize("bad", [b"{]\n", b"[1]\n", lines(1, 2), lines(3, 4), lines(2, 3).replace(b"0.5", b"0.6")])
def test_a_damaged_line_is_refused_by_its_number(tmp_path, bad):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 2) + bad + lines(3, 5))
    with pytest.raises(BadInput, match=r"rounds\.jsonl line 2 was altered or damaged since fedrema wrote it: restore"):
        file_of(path).grow()


def test_damage_in_a_part_that_was_read_before_is_found(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 4))
    file = file_of(path)
    assert file.grow()
    path.write_bytes(lines(1, 4) + lines(5, 6))
    with pytest.raises(BadInput, match="line 4 was altered"):
        file.grow()
    path.write_bytes(lines(1, 6))
    assert file.grow()
    assert len(file.kept()) == 5


def test_a_replaced_file_is_read_again(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(lines(1, 6))
    file = file_of(path)
    file.grow()
    assert len(file.kept()) == 5
    shorter = tmp_path / "shorter"
    shorter.write_bytes(lines(1, 4))
    shorter.replace(path)
    assert file.grow()
    assert [one.record.round for one in file.kept()] == [1, 2, 3]
    path.unlink()
    assert file.grow()
    assert not file.grow()
    assert file.kept() == []


def test_a_thinned_run_has_no_sums_and_a_note_says_so(tmp_path):
    accuracies = [0.5 + place / 100 for place in range(20)]
    write_run(tmp_path / "going", accuracies=accuracies, ended=False, rounds=30)
    run = DownsampledRun(tmp_path / "going", most=8)
    assert [record.round for record in run.rounds] == [1, 4, 8, 12, 16, 20]
    assert run.summary["best_accuracy"] == accuracies[-1]
    assert (run.summary.seconds, run.summary.bytes_up) == ({}, 0)
    assert thinned_notes([run]) == [
        "Of 20 rounds, every 4th is shown, and the first and the last.",
        "Headline numbers of unfinished runs are computed from the rounds shown.",
    ]
    whole = DownsampledRun(tmp_path / "going")
    assert whole.summary["seconds"] == {"train": 20.0, "evaluate": 10.0}
    assert thinned_notes([whole]) == []


def test_refresh_reads_new_records_and_the_summary(tmp_path):
    write_run(tmp_path / "going", ended=False)
    run = DownsampledRun(tmp_path / "going")
    run.refresh()
    assert not run.refresh()
    run.directory.append(round_record(4, 0.9))
    assert run.refresh()
    assert run.rounds[-1].accuracy == 0.9
    summary = Summary(4, {"accuracy": MetricSummary(0.9, 4, 0.9, 0.8, 0.7)}, bytes_up=7)
    run.directory.write_json(run.directory.summary_file, summary.as_json())
    assert run.refresh()
    assert run.summary == summary
