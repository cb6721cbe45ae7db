"""Extreme values for every option of every command: one sentence and exit code 2, or the command's work."""

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from fedrema.cli.arguments import run_options
from fedrema.cli.completion import completed_commands
from fedrema.methods import registry
from tests.cli.time_limit import seconds

VALUES = ("1e308", "nan", "inf", "-1", "0", "", "9" * 12, "9" * 20, "9" * 400, "x" * 5000)
QUICK = ("--rounds", "1", "--clients", "2", "--samples", "10", "--epochs", "1", "--device", "cpu")
GRID = """
format = 1
title = "Tiny"
seeds = 1

[settings]
rounds = 1

[rows.local]
"""
# What each command gets before the option. Where it would train or serve for long, it is refused after the option has
# been read: a folder that exists, data that is missing, an address of another machine.
LINES = {
    "run": ("run", "fedavg", *QUICK, "--quiet", "--out", "run"),
    "resume": ("resume", "both", "--quiet"),
    "compare": ("compare", "both"),
    "report": ("report", "both"),
    "verdict": ("verdict", "both"),
    "watch": ("watch", "both", "--host", "203.0.113.1"),
    "grid": ("grid", "tiny.toml", "--plan"),
    "reproduce": ("reproduce", "table1", "--plan"),
    "leaderboard": ("leaderboard", "--plan"),
    "methods": ("methods",),
    "data": ("data",),
    "partition": ("partition", "--clients", "2", "--samples", "10"),
    "predict": ("predict", "both/fedavg", "rows.npz", "--client", "0"),
    "export": ("export", "both/fedavg"),
    "personalize": ("personalize", "both/fedavg", "--data", "rows.npz"),
    "bench": ("bench", "--network", "mlp", "--method", "fedavg", *QUICK, "--federation", "missing.npz"),
    "doctor": ("doctor",),
    "completion": ("completion", "bash"),
    "deploy init": ("deploy", "init", "taken", "fedavg", "--deal"),
    "deploy demo": ("deploy", "demo", "taken", "fedavg"),
    "deploy server": ("deploy", "server", "missing"),
    "deploy approve": ("deploy", "approve", "hospitals/nodes/node-1"),
    "deploy client": ("deploy", "client", "missing"),
    "deploy status": ("deploy", "status", "hospitals"),
    "deploy check": ("deploy", "check", "hospitals/nodes/node-1"),
    "deploy audit": ("deploy", "audit", "hospitals/nodes/node-1"),
    "deploy model": ("deploy", "model", "hospitals/nodes/node-1"),
    "deploy add": ("deploy", "add", "hospitals", "node-1"),
    "deploy key": ("deploy", "key", "missing"),
    "deploy renew": ("deploy", "renew", "hospitals"),
    "deploy forget": ("deploy", "forget", "hospitals", "nobody"),
}
HEAVY = ("run", "bench", "deploy init", "deploy demo")
"""They have the options of a run."""
SEEDS = ("seed", "data-seed")
OPTIONS = {
    command: [option for option in options if not option.startswith("--help")]
    for command, options in completed_commands().items()
}
MATRIX = [
    # test_extreme_values.py has those of `run` with each method.
    (command, option)
    for command, options in OPTIONS.items()
    for option in options
    if command != "run" and (command not in HEAVY or option in OPTIONS["bench"] or option not in OPTIONS["run"])
]


pytestmark = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")  # Flower's own


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    assert main(["run", "local,fedavg", *QUICK, "--quiet", "--out", str(folder / "both")]) == 0
    assert main(["deploy", "init", str(folder / "hospitals"), "fedavg", "--deal", "--nodes", "2"]) == 0
    generator = np.random.default_rng(0)
    np.savez(folder / "rows.npz", x=generator.random((12, 1, 8, 8), np.float32), y=np.arange(12) % 10)
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    (folder / "tiny.toml").write_text(GRID)
    return folder


@pytest.fixture
def here(world, tmp_path, monkeypatch):
    """An empty folder with links to what the commands read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDREMA_DATA", str(tmp_path))
    for each in world.iterdir():
        (tmp_path / each.name).symlink_to(each)
    return tmp_path


def outcome(command, option, value, capsys):
    with seconds(60):
        status = main([*LINES[command], f"{option}={value}"])
    said = capsys.readouterr().err
    assert status in (0, 1, 2), said
    assert "Traceback" not in said
    return status, said


def test_every_command_is_here():
    assert set(LINES) == set(OPTIONS)


@pytest.mark.parametrize("command", [name for name in OPTIONS if name not in HEAVY])
def test_a_huge_value_of_every_option(command, here, capsys):
    for option in OPTIONS[command]:
        outcome(command, option, "9" * 12, capsys)


@pytest.mark.parametrize("method", registry())
def test_a_huge_count_of_every_method_is_refused(method, here, capsys):
    """None of them starts to train for a million years."""
    common = set() if method == "fedavg" else {option.name for option in run_options(["fedavg"])}
    for option in run_options([method]):
        if option.kind is int and option.name not in {*SEEDS, *common}:
            assert main(["run", method, *QUICK, "--quiet", f"--{option.name}={10**12}", "--out", "run"]) == 2, option
            assert f"--{option.name}" in capsys.readouterr().err
            assert not (here / "run").exists()


@pytest.mark.parametrize("setting", ["rounds", "epochs", "clients", "batch", "late_round"])
def test_a_huge_count_is_refused_with_the_valid_range(setting, here):
    with pytest.raises(fedrema.BadInput, match=r"must be from [01] to 10000000, got 10000001"):
        fedrema.run("fedavg", **{"rounds": 1, "out": "run", setting: 10**7 + 1})


@pytest.mark.matrix
@pytest.mark.parametrize(("command", "option"), MATRIX)
def test_every_option_of_every_command(command, option, here, capsys):
    for value in VALUES[::2] if command in HEAVY else VALUES:
        outcome(command, option, value, capsys)
