"""Invalid input to any command: one sentence, exit code 2, no traceback, no files."""

import numpy as np
import pytest
import torch

from fedrema.cli import main

QUICK = ("--rounds", "2", "--quiet", "--out", "run")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def refuse(capsys, *arguments: str) -> str:
    """Run a command that must fail; return its error message of one line."""
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fedrema: ")
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    return shown.err


def own_data(**changes) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.random((30, 5), np.float32),
        "y": generator.integers(0, 3, 30),
        "client": np.repeat([0, 1, 2], 10),
        **changes,
    }
    np.savez("own.npz", **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "fedmagic"], "Method 'fedmagic' is unknown; valid are"),
        (["run", "fedrma"], "Method 'fedrma' is unknown; perhaps you meant fedrema; valid are"),
        (["compar"], "Command 'compar' is unknown; perhaps you meant compare; valid are"),
        (["run", "fedavg", "--dataset", "imagenet"], "imagenet"),
        (["run", "fedavg", "--speed", "9"], "fedrema run fedavg has no option --speed"),
        (["run", "fedavg", "--s", "-0.1"], "--s -0.1 is outside 0 to 1"),
        (["run", "fedavg", "--samples", "1000"], "1797"),
        (["run", "fedavg", "--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'."),
        (["run", "fedavg", "--precision", "bf16", "--device", "cpu"], "--precision bf16 needs a CUDA device"),
        (
            ["run", "fedavg", "--net", "resnet"],
            "--net 'resnet' is unknown; valid are auto, mlp, cnn, alexnet, mlp-bn, cnn-bn, alexnet-bn",
        ),
        (["run", "fedavg", "--net", "cnn"], "--net cnn cannot take samples of shape (1, 8, 8)"),
        (["run", "fedavg", "--federation", "missing.npz"], "missing.npz"),
        (["run", "fedavg", "--federation", "nowhere:data"], "nowhere"),
        (["resume", "missing"], "missing does not exist: name the folder of a run"),
        (["compare", "missing"], "missing does not exist"),
        (["export", "missing"], "missing does not exist"),
        (["personalize", "missing", "--data", "new.npz"], "missing is not the folder of a run"),
        (["personalize", "missing"], "--data"),
        (["methods", "fedmagic"], "Method 'fedmagic' is unknown"),
        (
            ["partition", "--partition", "magic"],
            "--partition must be grouped, dirichlet, shards, iid or quantity, got 'magic'.",
        ),
        (["partition", "--plot", "fed.gif"], "fed.gif"),
        (["bench", "--method", "fedrema,fedmagic"], "Method 'fedmagic' is unknown"),
        (["dance"], "Command 'dance' is unknown"),
    ],
)
def test_invalid_requests_are_refused_in_one_sentence(arguments, words, capsys, in_an_empty_folder):
    extra = QUICK if arguments[0] == "run" else ()
    assert words in refuse(capsys, *arguments, *extra)
    assert not list(in_an_empty_folder.iterdir())


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (
            "fedproto",
            (),
            "FedProto does not support the task regression; fedrema methods lists the tasks of each method.",
        ),
        ("fedrema", ("--align", "1"), "FedReMa+F does not support the task regression"),
        (
            "fedavg",
            ("--metrics", "auc"),
            "--metrics auc is not defined for the task regression; valid are mae, rmse, r2.",
        ),
        ("fedavg", ("--metrics", "speed"), "--metrics 'speed' is unknown; valid are accuracy, balanced_accuracy, f1,"),
        (
            "fedavg",
            ("--class-weights", "balanced"),
            "--class-weights balanced needs classes, but the task is regression",
        ),
        ("fedavg", ("--regression-loss", "log"), "--regression-loss must be squared, absolute or huber, got 'log'"),
    ],
)
def test_what_does_not_fit_the_task_is_refused_before_the_first_round(
    method, options, words, capsys, in_an_empty_folder
):
    own_data(y=np.linspace(0, 1, 30))
    assert words in refuse(capsys, "run", method, "--federation", "own.npz", *options, *QUICK)
    assert not (in_an_empty_folder / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_a_gpu_is_refused(capsys):
    assert "--device cuda: this machine has no usable CUDA device" in refuse(
        capsys, "run", "fedavg", "--device", "cuda", *QUICK
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.full((30, 5), np.nan, np.float32)}, "NaN"),
        ({"y": np.full(30, -1)}, "-1"),
        ({"y": np.full(30, 0.5)}, "y is 0.5 for every sample: there is nothing to predict"),
        (
            {"y": np.r_[np.linspace(0, 1, 29), np.nan]},
            "y is nan in row 29 (client '2'); every sample needs a finite number",
        ),
        ({"y": np.full((30, 2), 2)}, "y has 2 in row 0 (client '0'), label 0; labels must be 0 or 1"),
        ({"client": None}, "client"),
        ({"split": np.repeat([1, 0, 0], 10)}, "client '0' has only test samples"),
        ({"y": np.zeros(29, int)}, "29"),
    ],
)
def test_invalid_own_data_is_refused(changes, words, capsys, in_an_empty_folder):
    own_data(**changes)
    assert words in refuse(capsys, "run", "fedavg", "--federation", "own.npz", *QUICK)
    assert not (in_an_empty_folder / "run").exists()


def test_a_truncated_file_of_own_data_is_refused(capsys, in_an_empty_folder):
    own_data()
    file = in_an_empty_folder / "own.npz"
    file.write_bytes(file.read_bytes()[:-200])
    assert "own.npz" in refuse(capsys, "run", "fedavg", "--federation", "own.npz", *QUICK)


def test_pickled_data_is_not_opened(capsys):
    own_data(x=np.array([{"a": 1}] * 30, dtype=object))
    refuse(capsys, "run", "fedavg", "--federation", "own.npz", *QUICK)


def test_a_file_in_place_of_a_folder_is_refused(capsys, in_an_empty_folder):
    (in_an_empty_folder / "file").write_text("")
    for arguments in (
        ["run", "fedavg", "--out", "file"],
        ["run", "fedavg", "--dataset", "mnist", "--data-dir", "file"],
        ["resume", "file"],
        ["export", "file"],
        ["data", "--data-dir", "file"],
        ["compare", "file"],
    ):
        assert "file" in refuse(capsys, *arguments)
    assert (in_an_empty_folder / "file").read_text() == ""


def test_a_network_that_cannot_be_stacked_is_refused(capsys, in_an_empty_folder):
    (in_an_empty_folder / "random_slopes.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    net = nn.Module()\n"
        "    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU())\n"
        "    from fedrema.models.body_and_head import BodyAndHead\n"
        "    return BodyAndHead(body, nn.Linear(8, classes))\n"
    )
    words = refuse(capsys, "run", "fedavg", "--net", "random_slopes:net", "--backend", "stacked", *QUICK)
    assert "'body.2' (RReLU)" in words
    assert "use --backend loop" in words
    assert main(["run", "fedavg", "--net", "random_slopes:net", *QUICK]) == 0


def test_divergence_names_round_and_client(capsys, in_an_empty_folder):
    words = refuse(capsys, "run", "fedavg", "--lr", "1e20", "--clip", "0", "--rounds", "30", "--quiet", "--out", "run")
    assert "diverged in round" in words
    assert "of client" in words
    assert (in_an_empty_folder / "run" / "checkpoint" / "state.safetensors").is_file()
