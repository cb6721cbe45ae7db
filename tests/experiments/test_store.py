"""The store of finished runs: one file per run during a command, one table at its end, merged by copying."""

import dataclasses
import lzma
import shutil

import pytest

from fedrema.engine import REVISIONS
from fedrema.errors import BadInput
from fedrema.experiments.store import Store
from tests.experiments.made_runs import keep, made_run, made_summary

ON_CPU = {"device": "cpu", "started": "2026-01-01T00:00:00+00:00"}
LATER = {"device": "cpu", "started": "2026-01-02T00:00:00+00:00"}


def run(key, best=0.1 + 0.2, ran_on=ON_CPU, **parts):
    return made_run(key, summary=made_summary(3, best_accuracy=best), ran_on=ran_on, **parts)


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_single_files_are_merged_into_one_table_unchanged(tmp_path):
    store = Store(tmp_path)
    runs = [
        run(key, number / 7, curves={"round": [1, 2], "accuracy": [1 / 3, None]}) for number, key in enumerate("abc", 1)
    ]
    for one in runs:
        keep(store, one)
    assert names(store) == ["a.json", "b.json", "c.json"]
    assert list(store) == runs
    store.fold()
    (table,) = names(store)
    assert table.endswith(".jsonl.xz")
    assert list(store) == list(Store(tmp_path)) == runs
    assert store.at("b").summary.metrics["accuracy"].best == 2 / 7
    before = (tmp_path / table).stat()
    store.fold()
    assert (tmp_path / table).stat() == before
    keep(store, run("d"))
    store.fold()
    assert len(names(store)) == 1
    assert store.keys() == ["a", "b", "c", "d"]


def test_tables_of_two_machines_are_merged_by_copying(tmp_path):
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    for store, keys in ((one, "ab"), (other, "bc")):
        for key in keys:
            keep(store, run(key))
        store.fold()
    keep(other, run("d"))
    shutil.copytree(other.folder, one.folder, dirs_exist_ok=True)
    assert len(names(one)) == 3
    assert one.keys() == ["a", "b", "c", "d"]
    one.fold()
    assert len(names(one)) == 1
    assert list(Store(one.folder)) == list(one)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_runs_with_one_key_the_finished_current_or_latest_one_is_used(order, tmp_path):
    current, later = run("a"), run("a", 0.5, LATER)
    diverged = made_run("a", failed="Training diverged.")
    outdated = dataclasses.replace(later, revisions={"method": 0, **REVISIONS})
    for number, (worse, better) in enumerate([(current, later), (outdated, current), (diverged, current)]):
        store = Store(tmp_path / str(number))
        for each in [(worse, better)[place] for place in order]:
            keep(store, each)
            store.fold()
        assert list(store) == [better]


def test_a_run_that_diverged_keeps_its_file_and_is_tried_again_without_it(tmp_path):
    store = Store(tmp_path)
    keep(store, run("a"))
    keep(store, made_run("b", failed="Training diverged."))
    store.fold()
    assert len(names(store)) == 2
    assert store.at("b").failed
    (tmp_path / "b.json").unlink()
    assert store.keys() == ["a"]


def test_after_a_crash_between_writing_and_removing_every_run_is_read_once(tmp_path):
    store = Store(tmp_path)
    for key in "ab":
        keep(store, run(key))
    singles = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    store.fold()
    for name, content in singles.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".c.json.1234.part").write_text("{")  # half-written when the process was killed
    again = Store(tmp_path)
    assert again.keys() == ["a", "b"]
    again.fold()
    assert [name for name in names(again) if not name.startswith(".")] == [next(tmp_path.glob("*.xz")).name]


def test_a_table_replaced_by_another_process_is_read_again(tmp_path):
    store, other = Store(tmp_path), Store(tmp_path)
    keep(store, run("a"))
    assert store.keys() == ["a"]
    keep(other, run("b"))
    other.fold()
    assert store.keys() == ["a", "b"]
    keep(other, run("a", 0.7, LATER))
    assert store.at("a").summary["best_accuracy"] == 0.7


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: content[:-20], "is not a table of finished runs of fedrema: .*restore it or remove it"),
        (lambda content: b"nonsense", "is not a table of finished runs of fedrema: .*restore it or remove it"),
        (lambda content: lzma.compress(b"{}\n"), "has format None, and this version of fedrema reads 3"),
        (lambda content: lzma.compress(b"[1]\n"), "is not a table of finished runs of fedrema"),
        (
            lambda content: lzma.compress(b'{"format": 3, "key": "a"}\n'),
            "is not a table of finished runs of fedrema: Object missing",
        ),
    ],
)
def test_a_damaged_table_is_refused_by_name(damage, sentence, tmp_path):
    store = Store(tmp_path)
    keep(store, run("a"))
    store.fold()
    (table,) = tmp_path.iterdir()
    table.write_bytes(damage(table.read_bytes()))
    with pytest.raises(BadInput, match=f"{table.name} {sentence}") as raised:
        Store(tmp_path).check()
    assert "\n" not in str(raised.value)
