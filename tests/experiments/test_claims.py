"""Verdicts on claims, from made-up runs whose numbers can be checked by hand."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import fedrema
from fedrema.experiments.claims import claims_markdown, judge
from fedrema.experiments.comparisons import (
    HEADINGS,
    compare_with_reference,
    comparison_lines,
    comparisons_markdown,
    runs_of,
    scores,
)
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.simulation.records import Summary
from tests.experiments.made_runs import keep, made_run, made_summary

FILE = """
seeds = 5
[settings]
rounds = 3
[columns.few]
title = "few samples"
samples = 40
[columns.many]
title = "many samples"
samples = 80
[rows.fedavg]
title = "FedAvg"
[rows.fedper]
title = "FedPer"
[rows.fedrema]
title = "FedReMa"
[[claims]]
says = "It is so."
"""
FIRST = "kind = 'first'\nrows = ['fedrema']\n"
ABOVE = "kind = 'above'\nrows = ['fedrema']\nover = ['fedavg', 'fedper']\ncolumns = ['few']\n"
COLLAPSE = "kind = 'collapse'\nrows = ['fedper']\n"
FASTER = "kind = 'faster'\nrows = ['fedrema']\nover = ['fedavg']\nshare = 0.5\ncolumns = ['few']\n"
FALLS = "kind = 'falls'\nrows = ['fedavg']\ncolumns = ['few']\ncurve = 'recall'\n"
NO_WORSE = "kind = 'no-worse'\nrows = ['fedrema']\nover = ['fedavg']\ncolumns = ['few']\n"
LIGHTER = "kind = 'lighter'\nrows = ['fedper']\nover = ['fedavg']\nshare = 0.5\ncolumns = ['few']\n"
AROUND = (-0.01, 0.0, 0.01)
"""Deviations of three seeds from their mean."""


class Bench:
    """An experiment with one claim, and a store for made-up runs."""

    def __init__(self, folder, claim, text=FILE):
        (folder / "made.toml").write_text(text + claim)
        self.experiment = read_experiment(folder / "made.toml")
        self.store = Store(folder / "runs")

    def keep(self, row, column, seed, failed="", matching=None, ran_on=None, outdated=False, **summary):
        key = key_of(self.experiment.cell(row, column).settings(seed))
        parts = {"failed": failed, "matching": matching, "ran_on": ran_on, "summary": made_summary(**summary)}
        run = made_run(key, row, seed, **parts)
        keep(self.store, replace(run, revisions={"cpu": 0}) if outdated else run)

    def score(self, row, column, *best, honest=None):
        for seed, value in enumerate(best):
            self.keep(row, column, seed, best_accuracy=value, honest_accuracy=(honest or best)[seed])

    def judge(self):
        return judge(self.experiment.claims[0], self.experiment, 5, self.store)


@pytest.fixture
def bench(tmp_path):
    return lambda claim, text=FILE: Bench(tmp_path, claim, text)


def fill(bench, column, fedavg=0.5, fedper=0.4, fedrema=0.6):
    """Store three seeds: the differences from FedReMa deviate by 0, 1 and 2 points from their mean."""
    bench.score("fedavg", column, *(fedavg + 2 * noise for noise in AROUND))
    bench.score("fedper", column, *(fedper + noise for noise in (0.0, 0.01, -0.01)))
    bench.score("fedrema", column, *(fedrema + noise for noise in AROUND))


def test_the_first_must_be_significantly_above_the_next(bench):
    made = bench(FIRST)
    for column in ("few", "many"):
        fill(made, column)
    found = made.judge()
    # Differences from FedAvg 11, 10, 9: standard error 1 / √3, t = 17.3, p = 0.0033; t₀.₉₇₅ = 4.303 with 2 degrees.
    # From FedPer 19, 19, 22: mean 20, p = 0.0025; Holm: 2 · 0.0025 is the larger of 0.0050 and 1 · 0.0033.
    assert (found.verdict, found.honest_verdict) == ("holds", "holds")
    text = "FedReMa 10.0 points above FedAvg (95 % 7.5 to 12.5, corrected p = 0.005, 3 seeds)"
    assert found.evidence == f"few samples: {text}; many samples: {text}. By honest accuracy: holds."
    assert found.claim is made.experiment.claims[0]


def test_a_row_significantly_below_another_is_not_the_first(bench):
    made = bench(FIRST)
    fill(made, "few")
    fill(made, "many", fedavg=0.7)
    found = made.judge()
    assert found.verdict == "does not hold"
    assert "few samples, holds: FedReMa 10.0 points above FedAvg" in found.evidence
    assert "many samples, does not hold: FedReMa 10.0 points below FedAvg (95 % −12.5 to −7.5," in found.evidence
    assert found.evidence.endswith("By honest accuracy: does not hold (holds in 1 of 2 columns).")


def test_insignificant_differences_are_undecided(bench):
    made = bench(FIRST)
    fill(made, "few")
    fill(made, "many", fedavg=0.59)  # 2, 1 and 0 points: t = 1.73, p = 0.23
    found = made.judge()
    assert found.verdict == "not decided"
    assert (
        "many samples, not decided: FedReMa 1.0 points above FedAvg (95 % −1.5 to 3.5, corrected p = 0.225, 3 seeds;"
        " about 13 needed to decide)" in found.evidence  # effect 1, level 0.05 / 2: (2.2414 + 0.8416)² + 2.2414² / 2
    )


@pytest.mark.parametrize(
    ("claim", "verdict", "text"),
    [
        (
            FIRST + "columns = ['few']\n",
            "not decided",
            "few samples: FedReMa 31.7 points above FedPer (95 % −26.6 to 89.9, corrected p = 0.144",
        ),
        (
            ABOVE,
            "not decided",
            "few samples: FedReMa 31.7 points above FedPer (95 % −26.6 to 89.9, corrected p = 0.144",
        ),
    ],
)
def test_the_rival_is_named_that_a_row_is_not_significantly_above(claim, verdict, text, bench):
    made = bench(claim)
    fill(made, "few")
    made.score("fedper", "few", 0.1, 0.55, 0.2)
    assert made.judge().verdict == verdict
    assert text in made.judge().evidence


def test_ties_are_undecided(bench):
    made = bench(FIRST + "columns = ['few']\n")
    fill(made, "few")
    made.score("fedavg", "few", *(0.6 + noise for noise in AROUND))
    found = made.judge()
    assert found.verdict == "not decided"
    assert found.evidence.startswith("few samples: FedReMa level with FedAvg (95 % 0.0 to 0.0, corrected p = 1.000,")


def test_a_bound_that_is_rounded_to_zero_has_no_sign(bench):
    made = bench(ABOVE)
    fill(made, "few")
    # 4.303 / √3 = 2.484 on either side of 2.46: the lower bound is -0.024.
    made.score("fedavg", "few", *(0.5754 + 2 * noise for noise in AROUND))
    assert "FedReMa 2.5 points above FedAvg (95 % 0.0 to 4.9," in made.judge().evidence


def test_the_verdict_by_honest_accuracy_may_differ(bench):
    made = bench(FIRST + "columns = ['few']\n")
    fill(made, "few")
    made.score("fedavg", "few", 0.48, 0.5, 0.52, honest=(0.68, 0.7, 0.72))
    found = made.judge()
    assert (found.verdict, found.honest_verdict) == ("holds", "does not hold")
    assert found.evidence.endswith("By honest accuracy: does not hold.")


def test_an_experiment_with_honest_accuracy_has_one_verdict(bench):
    made = bench(ABOVE, "quantity = 'honest_accuracy'\n" + FILE)
    fill(made, "few")
    found = made.judge()
    assert (found.verdict, found.honest_verdict) == ("holds", None)
    assert "By honest" not in found.evidence


def test_claims_about_missing_runs_are_undecided(bench):
    made = bench(FIRST)
    found = made.judge()
    assert (found.verdict, found.honest_verdict) == ("not decided", "not decided")
    assert found.evidence.startswith("few samples: 3 of 3 rows have not been run; many samples: 3 of 3 rows")
    fill(made, "few")
    made.score("fedavg", "many", 0.5)
    made.keep("fedper", "many", 0, failed="Training diverged.")
    assert (
        "many samples, not decided: FedReMa has not been run, FedAvg has fewer than 2 scored runs, FedPer has diverged."
        in made.judge().evidence
    )


def test_a_column_that_contradicts_a_claim_decides_it_although_another_is_missing(bench):
    made = bench(FIRST)
    fill(made, "few", fedavg=0.7)
    assert made.judge().verdict == "does not hold"


def test_a_row_that_is_significantly_above_decides_although_another_is_missing(bench):
    made = bench(ABOVE)
    fill(made, "few", fedavg=0.7)
    for seed in range(3):
        made.keep("fedper", "few", seed, failed="Training diverged.")
    found = made.judge()
    assert found.verdict == "does not hold"
    assert found.evidence.startswith("few samples: FedReMa 10.0 points below FedAvg (95 % −12.5 to −7.5,")


def test_rows_without_common_seeds_are_not_compared(bench):
    made = bench(ABOVE)
    fill(made, "few")
    for seed in (0, 1):
        made.keep("fedavg", "few", seed, failed="Training diverged.")
    made.keep("fedavg", "few", 3, best_accuracy=0.5, honest_accuracy=0.5)
    found = made.judge()
    assert found.verdict == "not decided"
    text = "few samples: seeds in common are missing, so far FedReMa 9.0 points above FedAvg (1 seed, no test)."
    assert found.evidence.startswith(text)


def test_each_row_must_be_above_each_of_the_others(bench):
    made = bench("kind = 'above'\nrows = ['fedrema', 'fedavg']\nover = ['fedper', 'fedavg']\ncolumns = ['few']\n")
    fill(made, "few")
    found = made.judge()
    # FedAvg is not compared with itself, nor FedReMa with FedAvg, of which the same is claimed: two comparisons.
    assert found.verdict == "holds"
    assert found.evidence.startswith("few samples: FedAvg 10.0 points above FedPer")
    made.score("fedper", "few", 0.9, 0.91, 0.9)
    assert made.judge().verdict == "does not hold"


@pytest.mark.parametrize("claim", [FIRST, FASTER.replace("'fedavg'", "")])
def test_a_row_alone_is_not_compared(claim, bench):
    text = FILE.replace('[rows.fedavg]\ntitle = "FedAvg"\n[rows.fedper]\ntitle = "FedPer"\n', "")
    made = bench(claim, text)
    for seed in range(3):
        for column in ("few", "many"):
            made.keep("fedrema", column, seed, best_accuracy=0.5, honest_accuracy=0.5, seconds={"train": 1.0})
    assert made.judge().verdict == "not decided"
    assert "there is no row to compare with" in made.judge().evidence


def test_a_collapse_is_a_loss_of_a_share_of_the_best_accuracy_in_every_column(bench):
    made = bench(COLLAPSE)
    for seed, final in enumerate((0.3, 0.34)):
        made.keep("fedper", "few", seed, best_accuracy=0.4, final_accuracy=final)  # 32 is 80 % of 40, exactly
    made.keep("fedper", "few", 2, failed="Training diverged.")
    found = made.judge()
    assert found.verdict == "not decided"
    assert found.evidence == (
        "few samples, holds: FedPer best 40.0, final 32.0 (2 seeds);"
        " many samples, not decided: FedPer has not been run."
    )
    made.keep("fedper", "many", 0, best_accuracy=0.5, final_accuracy=0.1)
    found = made.judge()
    assert (found.verdict, found.honest_verdict) == ("holds", None)
    assert found.evidence.endswith("many samples: FedPer best 50.0, final 10.0 (1 seed).")
    made.keep("fedper", "many", 0, best_accuracy=0.5, final_accuracy=0.41)
    assert made.judge().verdict == "does not hold"


def test_an_outdated_run_of_another_method_does_not_mark_a_collapse(bench):
    made = bench(COLLAPSE)
    for column in ("few", "many"):
        made.keep("fedper", column, 0, best_accuracy=0.5, final_accuracy=0.1)
    made.keep("fedavg", "few", 0, outdated=True, best_accuracy=0.5, final_accuracy=0.4)
    assert (made.judge().verdict, made.judge().outdated) == ("holds", False)
    made.keep("fedper", "few", 0, outdated=True, best_accuracy=0.5, final_accuracy=0.1)
    assert made.judge().outdated


def timed(made, row, *seconds, device="NVIDIA H200", beside=0, first=0):
    for seed, value in enumerate(seconds, first):
        parts = {"train": value - 1, "score": 1.0}
        made.keep(row, "few", seed, seconds=parts, ran_on={"device": device, "beside": beside})


def test_seconds_are_compared_on_one_device(bench):
    made = bench(FASTER)
    timed(made, "fedrema", 40, 60)
    assert made.judge().evidence == "few samples: FedAvg has not been run."
    timed(made, "fedavg", 90, 110)
    found = made.judge()
    assert found.verdict == "holds"
    assert found.evidence == (
        "few samples: FedReMa 50.0 s, FedAvg 100.0 s, a ratio of 0.50 where at most 0.5 is claimed"
        " (NVIDIA H200, 2 and 2 runs)."
    )
    timed(made, "fedrema", 41, 60)
    assert made.judge().verdict == "does not hold"
    timed(made, "fedrema", 1, 1, device="cpu")
    found = made.judge()
    assert found.verdict == "not decided"
    assert "they ran on different devices, NVIDIA H200 and cpu" in found.evidence
    timed(made, "fedrema", 30, first=2)  # one run on the device of the others: only that one is compared
    assert "FedReMa 30.0 s, FedAvg 100.0 s, a ratio of 0.30" in made.judge().evidence


def test_times_of_runs_that_were_alone_on_a_device_are_preferred(bench):
    made = bench(FASTER)
    timed(made, "fedrema", 80, 80, beside=3)
    timed(made, "fedavg", 100)
    found = made.judge()
    assert found.verdict == "does not hold"
    assert found.evidence.endswith("(NVIDIA H200, 2 and 1 runs; other runs shared it, so times are less reliable).")
    timed(made, "fedrema", 20, first=2)
    found = made.judge()
    assert found.verdict == "holds"
    assert "a ratio of 0.20" in found.evidence
    assert found.evidence.endswith("(NVIDIA H200, 1 and 1 runs; runs that shared it left out).")


def matched(made, seed, *recall):
    curve = {"round": list(range(1, len(recall) + 1)), "precision": [1.0] * len(recall), "recall": list(recall)}
    made.keep("fedavg", "few", seed, matching=curve)


def test_a_falling_curve_is_lower_in_its_last_half_than_in_its_first_tenth(bench):
    made = bench(FALLS)
    matched(made, 0, 0.9, 0.7, *[0.1] * 8, *[0.5] * 10)
    assert (
        made.judge().evidence
        == "few samples: FedAvg: recall 0.80 in rounds 1–2, 0.50 in rounds 11–20 (difference −0.30, 1 seed, no test)."
    )
    matched(made, 1, 0.8, None, *[0.1] * 8, *[0.2, 0.6] * 5)
    matched(made, 2, 0.7, 0.9, *[0.1] * 8, *[0.6] * 9, None)
    made.keep("fedavg", "few", 3, failed="Training diverged.")
    # 0.8 three times, then 0.5, 0.4 and 0.6: standard error 0.1 / √3, t = 5.196, p = 0.035; 4.303 · 0.0577 = 0.248.
    found = made.judge()
    assert found.verdict == "holds"
    assert found.evidence == (
        "few samples: FedAvg: recall 0.80 in rounds 1–2, 0.50 in rounds 11–20"
        " (difference −0.30, 95 % −0.55 to −0.05, corrected p = 0.035, 3 seeds)."
    )


def test_a_curve_that_rises_or_scatters_does_not_fall(bench):
    made = bench(FALLS)
    for seed, last in enumerate((0.9, 0.8, 0.85)):
        matched(made, seed, 0.2, 0.3, last)  # the first round against the last: half of three is one
    found = made.judge()
    assert found.verdict == "does not hold"
    assert "recall 0.20 in rounds 1, 0.85 in rounds 3 (difference 0.65" in found.evidence
    matched(made, 0, 0.2, 0.3, 0.0)
    assert made.judge().verdict == "not decided"


def test_claims_about_curves_are_undecided_without_recorded_similarities(bench):
    made = bench(FALLS)
    assert made.judge().evidence == "few samples: FedAvg: recall was not recorded in two rounds or more."
    matched(made, 0, 0.5)
    matched(made, 1, None, None)
    assert "was not recorded in two rounds or more" in made.judge().evidence


def test_tables_of_claims_and_comparisons(bench):
    made = bench(FIRST.replace("'first'", "'first'\ncolumns = ['few']") + "[[claims]]\nsays = 'a|b'\n" + ABOVE)
    fill(made, "few")
    judgements = [judge(claim, made.experiment, 5, made.store) for claim in made.experiment.claims]
    lines = claims_markdown(judgements).splitlines()
    assert lines[:2] == ["| claim | verdict | evidence |", "|---|---|---|"]
    assert lines[2].startswith("| It is so. | holds | few samples: FedReMa 10.0 points above FedAvg")
    assert lines[3].startswith("| a\\|b | holds |")
    made.keep("fedper", "many", 0, best_accuracy=0.3)
    made.keep("fedavg", "many", 0, best_accuracy=0.5)
    table = scores(runs_of(made.experiment.cells, 5, made.store), "best_accuracy")
    comparisons = compare_with_reference(table, ("few", "many"))
    shown = comparison_lines(comparisons, made.experiment)
    assert [len(line) for line in shown] == [len(HEADINGS)] * 4
    assert shown[0] == ["FedAvg", "few samples", "FedReMa", "-10.00", "-12.48 to -7.52", "0.0033", "0.005", "3"]
    assert shown[2] == ["FedPer", "many samples", "FedAvg", "-20.00", "–", "–", "–", "1 (one seed in common: no test)"]
    assert shown[3][3:] == ["–", "–", "–", "–", "0 (no seed in common)"]
    text = comparisons_markdown(comparisons, made.experiment)
    assert text.splitlines()[0] == "| row | data | compared with | difference | 95 % | p | corrected p | seeds |"
    assert "Holm" in text.splitlines()[-1]


@functools.cache
def table_of_the_paper(name):
    return read_experiment(Path(fedrema.__file__).parent / "experiments" / "paper" / f"{name}.toml")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("table1", ["first"]),
        ("table2", ["first", "above", "collapse"]),
        ("table3", ["first"]),
        ("table4", ["above", "above", "faster"]),
        ("table5", ["above", "above", "faster"]),
        ("motivation", ["above", "above"]),
    ],
)
def test_the_papers_claims_are_undecided_before_any_run(name, kinds, tmp_path):
    experiment = table_of_the_paper(name)
    assert [claim.kind for claim in experiment.claims] == kinds
    for claim in experiment.claims:
        found = judge(claim, experiment, experiment.seeds, Store(tmp_path))
        assert found.verdict == "not decided"
        assert "not been run" in found.evidence
        assert claim.says.endswith(".")


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table4", "table5"])
def test_the_published_means_agree_with_the_papers_claims_about_accuracies(name):
    experiment = table_of_the_paper(name)
    for claim in experiment.claims:
        if claim.kind in ("first", "above"):
            for column in claim.columns:
                means = {row: experiment.cell(row, column).published.mean for row in (*claim.rows, *claim.over)}
                assert min(means[row] for row in claim.rows) > max(means[row] for row in claim.over)


@pytest.mark.parametrize(
    ("fedavg", "margin", "verdict"),
    [
        # The difference deviates by 1, 0 and -1 points from its mean: 95 % ± 4.303 / √3 = 2.48 points.
        (0.57, 0.02, "holds"),  # 0.5 to 5.5
        (0.60, 0.03, "holds"),  # -2.5 to 2.5, within three points
        (0.60, 0.02, "not decided"),
        (0.62, 0.02, "not decided"),  # -4.5 to 0.5
        (0.65, 0.02, "does not hold"),  # -7.5 to -2.5
    ],
)
def test_a_row_is_no_worse_if_the_interval_excludes_the_margin(bench, fedavg, margin, verdict):
    made = bench(NO_WORSE + f"share = {margin}\n")
    fill(made, "few", fedavg=fedavg)
    assert made.judge().verdict == verdict
    assert made.judge().evidence.startswith("few samples: FedReMa ")
    assert "needed to decide" not in made.judge().evidence.partition("By honest")[0]


def test_a_row_without_runs_is_not_called_no_worse(bench):
    made = bench(NO_WORSE)
    made.score("fedavg", "few", 0.5, 0.6)
    assert made.judge().verdict == "not decided"
    assert "FedReMa has not been run" in made.judge().evidence


def test_a_row_is_lighter_by_the_bytes_that_a_client_sends(bench):
    made = bench(LIGHTER)
    assert "2 of 2 rows have not been run" in made.judge().evidence
    for row, sent in (("fedavg", 8000), ("fedper", 4000)):
        key = key_of(made.experiment.cell(row, "few").settings(0))
        summary = Summary(2, made_summary(best_accuracy=0.5).metrics, bytes_up=sent)
        keep(made.store, made_run(key, row, summary=summary, clients={"names": ["a", "b"]}))
    found = made.judge()
    assert (found.verdict, found.evidence) == (
        "holds",
        "few samples: FedPer 1,000 bytes per client and round, FedAvg 2,000.",
    )
    stricter = replace(made.experiment.claims[0], share=0.4)
    assert judge(stricter, made.experiment, 1, made.store).verdict == "does not hold"
