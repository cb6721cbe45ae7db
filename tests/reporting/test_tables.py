import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from fedrema.errors import BadInput
from fedrema.reporting.groups import data_title, group_runs
from fedrema.reporting.tables import (
    comparison_csv,
    comparison_markdown,
    comparison_table,
    differences_table,
    paired_differences,
)
from fedrema.runs.run import Run
from tests.reporting.folders import replace_records, write_run, write_two_groups


def shown(content, width=110):
    console = Console(width=width, file=io.StringIO())
    console.print(content)
    return console.file.getvalue()


def row(text, start):
    return " ".join(next(line for line in text.splitlines() if line.startswith(start)).split())


def test_tables_show_mean_and_deviation_over_seeds(tmp_path):
    text = shown(comparison_table(write_two_groups(tmp_path)), width=80)
    # 80, 84, 82: mean 82, sample standard deviation 2. Critical rounds 1, 2, 2. Three rounds of 1.5 s.
    assert row(text, "FedReMa") == "FedReMa 3 80.0±0.0 82.0±2.0 80.0±0.0 70.0±0.0 1.7 4.5"
    assert row(text, "FedAvg") == "FedAvg 3 80.0±0.0 78.0±2.0 80.0±0.0 70.0±0.0 – 4.5"
    assert "different data" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_one_seed_has_no_deviation_and_without_periods_there_is_no_column_for_them(tmp_path):
    text = shown(comparison_table([write_run(tmp_path / "a")]))
    assert row(text, "FedAvg") == "FedAvg 1 80.0 80.0 80.0 70.0 4.5"
    assert "critical" not in text


def test_runs_on_other_devices_or_backends_are_in_the_same_group(tmp_path):
    runs = [
        write_run(tmp_path / "a", seed=1, device="cpu", backend="loop", quiet=True, record="none"),
        write_run(tmp_path / "b", seed=0, device="cuda", backend="stacked", quiet=False, record="relations"),
    ]
    (group,) = group_runs(runs)
    assert group.label == "FedAvg"
    assert [run.settings["seed"] for run in group.runs] == [0, 1]


def test_labels_contain_settings_that_differ_within_a_method(tmp_path):
    runs = [
        write_run(tmp_path / "a", "fedrema", delta=0.3, weigh="samples", flag=True, peer=None),
        write_run(tmp_path / "b", "fedavg", momentum=0.5),
        write_run(tmp_path / "c", "fedrema", delta=0.5, weigh="samples", flag=True, peer=None),
        write_run(tmp_path / "d", "own.place:Mine"),
        write_run(tmp_path / "e", "gone-since"),
    ]
    labels = [group.label for group in group_runs(runs)]
    assert labels == ["FedReMa delta=0.3", "FedReMa delta=0.5", "FedAvg", "Mine", "gone-since"]
    runs[2:] = [write_run(tmp_path / "f", "fedrema", delta=0.3, weigh="uniform", flag=False, peer=1.0)]
    labels = [group.label for group in group_runs(runs)]
    assert labels == ["FedReMa weigh=samples flag=yes peer=none", "FedReMa weigh=uniform flag=no peer=1", "FedAvg"]
    runs[2:] = [write_run(tmp_path / "g", "fedrema", delta=0.9, weigh="uniform", flag=False, peer=1.0)]
    assert group_runs(runs)[0].label == "FedReMa delta=0.3 weigh=samples flag=yes and 1 more"


def test_labels_are_always_unique(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", fingerprint="b" * 64),
        write_run(tmp_path / "c", "one:Mine"),
        write_run(tmp_path / "d", "two:Mine", fingerprint="a" * 64),
    ]
    assert [group.label for group in group_runs(runs)] == [
        "FedAvg data=aaaaaa",
        "FedAvg data=bbbbbb",
        "Mine data=aaaaaa (1)",
        "Mine data=aaaaaa (2)",
    ]


def test_of_equal_runs_only_one_is_used(tmp_path):
    runs = [
        write_run(tmp_path / "a", honest=0.5),
        write_run(tmp_path / "b", honest=0.6),
        write_run(tmp_path / "c", ended=False),
    ]
    (group,) = group_runs(runs)
    assert group.values("honest_accuracy") == {0: 0.6}


def test_unfinished_runs_are_marked(tmp_path):
    runs = [
        write_run(tmp_path / "a", "fedavg", 0, rounds=60, ended=False),
        write_run(tmp_path / "b", "local", 0, 0.7),
        write_run(tmp_path / "c", "local", 1, ended=False, accuracies=(0.1,), rounds=3),
        write_run(tmp_path / "d", "fedper", ended=False, accuracies=(), rounds=9),
    ]
    text = shown(comparison_table(runs))
    assert "FedAvg (running, round 3/60)" in text
    assert row(text, "Local").startswith("Local (1 of 2 running, round 1/3) 1 ")  # only finished runs are used
    assert row(text, "FedPer").endswith(" – – – – –")
    reasons = {one.label: one.reason for one in paired_differences(runs, "honest_accuracy", "local")}
    assert reasons == {"FedAvg": "still running", "FedPer": "still running"}
    assert paired_differences(runs[3:]) == []


def test_a_run_that_was_continued_for_longer_is_another_group(tmp_path):
    run = write_run(tmp_path / "a", accuracies=(0.1, 0.2))
    longer = write_run(tmp_path / "b", accuracies=(0.1, 0.2, 0.3), rounds=2)  # resumed: config.json says 2
    assert [group.label for group in group_runs([run, longer])] == ["FedAvg rounds=2", "FedAvg rounds=3"]


def test_a_paired_interval_equals_a_calculation_by_hand(tmp_path):
    (found,) = paired_differences(write_two_groups(tmp_path))
    # -2, -4, -6: mean -4, deviation 2, error 2/√3 = 1.1547, times t(0.975, 2) = 4.302653 is 4.96828.
    assert (found.label, found.reference, found.pairs) == ("FedAvg", "FedReMa", 3)
    assert found.mean == pytest.approx(-0.04)
    assert (found.low, found.high) == (pytest.approx(-0.0896828, abs=1e-6), pytest.approx(0.0096828, abs=1e-6))
    text = shown(differences_table([found]))
    assert row(text, "FedAvg") == "FedAvg -4.0 -9.0 to +1.0 3"
    assert "Difference to FedReMa in honest accuracy, percentage points" in text


def test_equal_differences_for_all_seeds_have_an_interval_of_zero_width(tmp_path):
    runs = [
        write_run(tmp_path / f"{method}{seed}", method, seed, value)
        for method, value in (("fedavg", 0.75), ("local", 0.5))
        for seed in (0, 1)
    ]
    (found,) = paired_differences(runs)
    assert (found.mean, found.low, found.high) == (-0.25, -0.25, -0.25)


def test_differences_from_a_named_reference(tmp_path):
    runs = write_two_groups(tmp_path)
    assert paired_differences(runs, reference="fedavg")[0].mean == pytest.approx(0.04)
    assert paired_differences(runs, reference="FEDAVG")[0].label == "FedReMa"
    with pytest.raises(BadInput, match=r"'nobody' is not among the groups; valid are 'FedReMa', 'FedAvg'"):
        paired_differences(runs, reference="nobody")
    runs = [write_run(tmp_path / str(lr), "local", lr=lr) for lr in (0.1, 0.2)]
    with pytest.raises(BadInput, match=r"'local' matches several groups; valid are 'Local lr=0.1', 'Local lr=0.2'"):
        paired_differences(runs, reference="local")
    assert paired_differences(runs, reference="local lr=0.2")[0].label == "Local lr=0.1"


def test_the_reason_for_a_missing_interval_is_shown(tmp_path):
    runs = [
        *write_two_groups(tmp_path),
        write_run(tmp_path / "one", "local", 1, 0.5),
        write_run(tmp_path / "none", "fedper", 9, 0.5),
        write_run(tmp_path / "other", "fedper", 0, 0.5, fingerprint="b" * 64),
    ]
    found = {one.label: one for one in paired_differences(runs)}
    assert (found["Local"].mean, found["Local"].reason) == (pytest.approx(-0.34), "one seed in common: no interval")
    assert found["FedPer data=aaaaaa"].reason == "no seed in common"
    assert found["FedPer data=bbbbbb"].reason == "other data"
    text = shown(differences_table(list(found.values())))
    assert row(text, "FedPer data=bbbbbb") == "FedPer data=bbbbbb – other data 0"
    assert row(text, "Local") == "Local -34.0 one seed in common: no interval 1"
    text = shown(comparison_table(runs))
    assert "The groups ran on different data: their accuracies are not comparable." in text


def test_tables_as_markdown(tmp_path):
    lines = comparison_markdown(write_two_groups(tmp_path)).splitlines()
    head = "| method | seeds | best (peeks) | honest | final (last 5) | worst tenth | critical rounds | seconds |"
    assert lines[0] == head
    assert lines[2].startswith("| FedReMa | 3 | **80.0 ± 0.0** | **82.0 ± 2.0** |")
    assert "| FedAvg | -4.0 | -9.0 to +1.0 | 3 |" in lines
    alone = comparison_markdown([write_run(tmp_path / "alone", "own:A|B")])
    assert "| A\\|B | 1 | 80.0 |" in alone  # without a second row nothing is bold
    assert "Difference" not in alone


def test_tables_as_csv(tmp_path):
    runs = [*write_two_groups(tmp_path), write_run(tmp_path / "new", "local", ended=False, accuracies=())]
    rows = list(csv.DictReader(io.StringIO(comparison_csv(runs))))
    assert [one["method"] for one in rows] == ["FedReMa", "FedAvg", "Local"]
    assert float(rows[0]["honest_accuracy"]) == pytest.approx(0.82)
    assert float(rows[0]["honest_accuracy_std"]) == pytest.approx(0.02)
    assert (rows[0]["difference"], rows[1]["reference"]) == ("", "FedReMa")
    assert float(rows[1]["difference_low"]) == pytest.approx(-0.0896828, abs=1e-6)
    assert (rows[2]["running"], rows[2]["best_accuracy"]) == ("(running, round 0/0)", "")


def test_the_data_of_the_runs_is_described(tmp_path):
    groups = group_runs([write_run(tmp_path / "a")])
    assert data_title(groups) == "digits, grouped, s = 0.1, 2 clients"
    own = group_runs([write_run(tmp_path / "b", info={"federation": "mine.npz"}, fingerprint="b")])
    assert data_title(own) == "mine.npz, 2 clients"
    assert data_title([*groups, *own]) == "different data"


def test_missing_and_incomplete_runs_are_refused(tmp_path):
    with pytest.raises(BadInput, match="no run to compare"):
        group_runs([])
    run = write_run(tmp_path / "a")
    run.directory.write_manifest(replace(run.manifest, settings={}))
    with pytest.raises(BadInput, match="is incomplete: 'settings' lacks 'seed'"):
        comparison_table([Run(run.path)])
    run.directory.config_file.write_text(json.dumps({"model_type": "other"}))
    with pytest.raises(BadInput, match="does not describe a run: 'method' is missing"):
        comparison_table([Run(run.path)])


def test_variants_have_the_papers_titles_and_show_settings_only_if_titles_are_equal(tmp_path):
    runs = [
        write_run(tmp_path / "a", "fedrema", align=0.0, alternate=False),
        write_run(tmp_path / "b", "fedrema", align=1.0, alternate=False),
        write_run(tmp_path / "c", "fedrema", align=0.0, alternate=True),
        write_run(tmp_path / "d", "fedrema", align=1.0, alternate=True),
        write_run(tmp_path / "e", "fedrema", align=0.5, alternate=True),
        write_run(tmp_path / "f", "fedprox", mu=-1.0),  # an invalid value today, but the run can still be shown
    ]
    labels = [group.label for group in group_runs(runs)]
    assert labels == ["FedReMa", "FedReMa+A", "FedReMa+A&F align=0.5", "FedReMa+A&F align=1", "FedReMa+F", "FedProx"]


def test_other_ways_of_scoring_are_named_below_the_table(tmp_path):
    run = write_run(tmp_path / "a", "fedbabu", ended=False)
    records = [
        replace(record, alternatives={"unadapted": {"accuracy": record.accuracy - 0.2}}) for record in run.rounds
    ]
    replace_records(run, records)
    text = comparison_markdown([Run(run.path), write_run(tmp_path / "b")])
    # Accuracies 30, 50, 60: best 60, mean of all three 46.7.
    assert "Scored in other ways: FedBABU, without fine-tuning: 60.0 best, 46.7 final." in text
