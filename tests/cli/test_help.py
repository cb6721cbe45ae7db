"""Help of every command, and the version."""

import contextlib
import dataclasses
import subprocess
import sys

import pytest

import fedrema
from fedrema.cli import COMMANDS, main
from fedrema.cli.arguments import parse_settings

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_help_names_every_command_and_needs_no_torch():
    code = "import sys, fedrema.cli; fedrema.cli.main(['--help']); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(command in shown for command in COMMANDS)


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS), ("methods", "--paper")])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*command, "--help"] if "--paper" not in command else list(command))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_version(capsys):
    assert main(["--version"]) == 0
    assert fedrema.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as stop:
        code = stop.code or 0
    assert code == 0
    assert "usage: fedrema " + command in capsys.readouterr().out


@pytest.mark.parametrize("method", fedrema.registry())
def test_every_method_has_help_for_its_settings(method, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", method, "--help-all"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--lr", "--dataset", "--participation", "--backend", "--out", "--weight-decay", "--schedule"):
        assert option in shown


@pytest.mark.parametrize("method", ["fedprox", "fedavg", "fedrema"])
def test_help_shows_the_essential_options_first_and_help_all_every_option(method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option in ("--help", "-h"):
        with pytest.raises(SystemExit) as stop:
            main(["run", method, option])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        places = [shown.index(f" --{name} ") for name in ("dataset", "federation", "rounds", "out", "seed", "device")]
        assert places == sorted(places)
        assert f"fedrema run {method} --help-all lists all " in " ".join(shown.split())
        own = [field.name.replace("_", "-") for field in dataclasses.fields(fedrema.registry()[method])]
        assert all(f" --{name}" in shown for name in own)
        assert "--participation" not in shown
        assert len(shown.splitlines()) < 100
    with pytest.raises(SystemExit):
        main(["run", method, "--help-all"])
    everything = capsys.readouterr().out
    settings = parse_settings(method, [])
    assert all(f"--{name}" in everything for name in settings.flat())
    for text in (shown, everything):
        assert "None" not in text


def test_help_shows_the_defaults_of_the_dataset(capsys):
    with pytest.raises(SystemExit):
        main(["run", "fedavg", "--dataset", "cifar10", "--help"])
    assert "(default: 100)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--help-all"], ["fedavg,local", "--help-all"]])
def test_help_without_a_method_names_the_two_kinds_of_help(arguments, capsys):
    assert main(["run", *arguments]) == 0
    shown = capsys.readouterr().out
    words = "fedrema run METHOD --help lists the essential options, fedrema run METHOD --help-all lists all of them"
    assert words in " ".join(shown.split())


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "deploy"])
def test_help_never_shows_none_as_a_value(command, capsys):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "{None}" not in capsys.readouterr().out
