"""fedrema data."""

from fedrema.cli import main


def test_datasets_are_listed(capsys, tmp_path):
    assert main(["data", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for name in (
        "digits",
        "mnist",
        "fmnist",
        "cifar10",
        "included with scikit-learn",
        "not downloaded; at first use",
    ):
        assert name in shown


def test_data_can_be_fetched_beforehand(capsys, tmp_path, monkeypatch):
    assert main(["data", "--fetch", "digits"]) == 0
    assert main(["data", "--fetch", "imagenet"]) == 2
    assert "imagenet" in capsys.readouterr().err
    monkeypatch.setenv("FEDREMA_MIRROR", "http://127.0.0.1:9")
    assert main(["data", "--data-dir", str(tmp_path), "--fetch", "mnist"]) == 2
    assert "the server is unreachable or does not respond; check" in capsys.readouterr().err
