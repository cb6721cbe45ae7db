"""Values that overflow, for options of runs: one sentence and exit code 2, or a run; never a traceback."""

import pytest

from fedrema.cli import main
from fedrema.cli.arguments import run_options
from fedrema.methods import registry

VALUES = ("1e308", "-1e308", "1e-320", "9" * 20, "9" * 400, "nan", "inf", "-1", "0", "", "x" * 5000)
QUICK = ("--rounds", "1", "--clients", "2", "--samples", "10", "--epochs", "1", "--quiet", "--device", "cpu")
# Each overflowed with the value behind it, or started training without end.
OVERFLOWED = {
    "1e308": ("lr", "fedala:weight-lr", "fedkd:least-loss", "fedpac:head-lr"),
    "1e-320": ("secure-range", "fedprior:held-out", "pfedgraph:spread"),
    "9" * 20: ("threads", "chunk", "seeds", "rounds", "creff:synthetic", "fedala:first-epochs", "fedrema:probes"),
    "9" * 400: ("hidden", "projection", "batch", "chunk", "late-round", "ifca:clusters", "fedem:components"),
    "": ("out", "config", "tuned", "partition-file"),
}


def outcome(method, option, value, capsys, folder):
    place = () if option == "out" else ("--out", str(folder / "run"))
    status = main(["run", method, *QUICK, f"--{option}={value}", *place])
    said = capsys.readouterr().err
    assert status in (0, 2), said
    assert status == 0 or said.count("\n") == 1
    return status, said


@pytest.mark.parametrize(("value", "option"), [(value, name) for value, names in OVERFLOWED.items() for name in names])
def test_a_value_that_overflows_is_refused(value, option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method, _, name = option.rpartition(":")
    status, said = outcome(method or "fedavg", name, value, capsys, tmp_path)
    assert status == 2
    assert f"--{name}" in said
    assert len(said) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
@pytest.mark.parametrize("method", registry())
def test_every_option_of_every_method(method, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = set() if method == "fedavg" else {option.name for option in run_options(["fedavg"])}
    for option in run_options([method]):
        if option.name not in common and not option.is_flag:
            for number, value in enumerate(VALUES):
                outcome(method, option.name, value, capsys, tmp_path / f"{option.name}-{number}")
