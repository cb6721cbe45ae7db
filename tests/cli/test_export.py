"""fedrema export."""

import pytest
from safetensors.torch import load_file

import fedrema
from fedrema.cli import main
from fedrema.config.settings import make_settings
from fedrema.runs.execute import execute
from tests.cli.refusals import refused

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

QUICK = ("--rounds", "3", "--clients", "4", "--samples", "20", "--epochs", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for seed in (0, 1):
        values = {"rounds": 1, "clients": 3, "groups": 3, "seed": seed, "quiet": True}
        execute(make_settings("fedrema", {**values, "out": folder / f"seed-{seed}"}))
    return folder


def test_export_all_runs_below_a_folder(trained, capsys):
    assert main(["export", str(trained)]) == 0
    text = capsys.readouterr().out
    assert text.count("3 models: ") == 2
    assert f"{trained}/seed-1/models" in text
    assert "--overwrite" in refused(capsys, "export", str(trained))
    assert main(["export", str(trained), "--overwrite"]) == 0


def test_export_of_some_clients_to_a_folder(trained, tmp_path, capsys):
    place = tmp_path / "place"
    assert main(["export", str(trained / "seed-0"), "--out", str(place), "--clients", "2"]) == 0
    assert "1 model: " in capsys.readouterr().out
    assert sorted(file.name for file in place.iterdir()) == [
        "2.safetensors",
        "MODEL_CARD.md",
        "README.md",
        "index.json",
    ]
    assert "there are 2: name one of them" in refused(capsys, "export", str(trained), "--out", str(place))
    assert "'9' is not in" in refused(capsys, "export", str(trained), "--overwrite", "--clients", "9")
    assert "needs at least one folder" in refused(capsys, "export")


def test_exported_models_are_adapted_as_in_use(in_an_empty_folder):
    assert main(["run", "fedbabu", *QUICK, "--quiet", "--out", "run"]) == 0
    assert main(["export", "run", "--out", "used"]) == 0
    assert main(["export", "run", "--out", "left", "--no-adapt"]) == 0
    run = fedrema.load("run")
    used, left = (load_file(f"{folder}/0.safetensors") for folder in ("used", "left"))
    random_head = run.personal_parameters(row=0)["head.weight"]
    assert (left["3.weight"] == random_head).all()
    assert (used["3.weight"] - random_head).abs().max() > 1e-3
    assert "trains a little more" in (in_an_empty_folder / "left" / "README.md").read_text()
    assert "trains a little more" not in (in_an_empty_folder / "used" / "README.md").read_text()


def test_models_can_be_exported_unadapted_if_their_data_is_missing(in_an_empty_folder, capsys):
    assert main(["partition", "--clients", "4", "--samples", "20", "--save", "own.npz"]) == 0
    assert main(["run", "per-fedavg", "--federation", "own.npz", "--rounds", "1", "--quiet", "--out", "run"]) == 0
    assert main(["partition", "--clients", "4", "--samples", "20", "--data-seed", "1", "--save", "own.npz"]) == 0
    assert main(["export", "run"]) == 2
    assert "The data of run has changed since" in capsys.readouterr().err
    (in_an_empty_folder / "own.npz").unlink()
    assert main(["export", "run"]) == 2
    assert "own.npz" in (complaint := capsys.readouterr().err)
    assert "--no-adapt" in complaint
    assert not (in_an_empty_folder / "run" / "models").exists()
    assert main(["export", "run", "--no-adapt"]) == 0


def test_prototypes_are_exported_with_models_that_predict_by_them(in_an_empty_folder):
    assert main(["run", "fedproto", *QUICK, "--quiet", "--out", "run"]) == 0
    assert main(["export", "run"]) == 0
    added = load_file("run/models/0.added.safetensors")
    assert added["prototypes"].shape == (10, 32)
    assert added["known"].tolist() == [1.0] * 9 + [0.0]  # no client has samples of class 9
