"""Argument lists as settings, and their help."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest

from fedrema.cli.arguments import as_arguments, fill, parse_arguments, parse_settings, parse_several, peek, positional
from fedrema.errors import BadInput
from fedrema.methods import registry


@dataclasses.dataclass(frozen=True)
class Inner:
    """How."""

    deep_value: int = 3
    """A number inside."""


@dataclasses.dataclass(frozen=True)
class Command:
    """Do something, 100 % of it.

    More about it.
    """

    inner: Inner
    needed: str
    """What is needed: a text."""
    file: Path = positional()
    """The file to read."""
    names: tuple[str, ...] = positional(("all",))
    """Names of things."""
    colours: tuple[str, ...] = ()
    """Colours to use."""
    kind: Literal["a", "b"] = "a"
    """Which kind."""
    fast: bool = True
    """Be fast."""
    no_plot: bool = False
    """Draw nothing."""
    zero: int = 0
    """A number."""


def parse(*arguments: str) -> Command:
    return parse_arguments(Command, arguments, "fedrema command")


def test_every_field_is_an_option_or_a_positional_argument():
    expected = Command(Inner(5), "x", Path("in"), ("one", "two"), ("red", "blue"), "b", False, True, -4)
    options = ["--needed=x", "--colours", "red", "blue", "--kind", "b", "--no-fast", "--no-plot", "--zero", "-4"]
    assert parse("in", "one", *options, "--deep-value", "5", "--", "two") == expected
    assert parse("in", "one", "two", *options, "--deep_value=5") == expected
    assert parse("in", "--needed", "x") == Command(Inner(), "x", Path("in"))
    assert parse("in", "--needed", "x", "--no-fast", "--fast").fast is True


def test_missing_required_arguments_are_named():
    with pytest.raises(BadInput, match=r"^fedrema command needs --needed: what is needed\.$"):
        parse("in")
    with pytest.raises(BadInput, match=r"^fedrema command needs the file to read\.$"):
        parse("--needed", "x")


def test_values_fill_a_dataclass_and_nested_ones():
    assert fill(Command, {"needed": "x", "file": Path("in"), "deep_value": 1, "other": 2}, "it").inner.deep_value == 1


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal_and_shows_defaults(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "usage: fedrema command [-h] FILE [NAME [NAME ...]] [OPTIONS]\n\nDo something, 100 % of it."
    )
    for words in ("More about it.", "--kind {a,b}", "(default: a)", "--fast, --no-fast", "(default: on)", "--no-plot"):
        assert words in shown
    assert "A number. (default: 0)" in " ".join(shown.split())
    assert "Inner options:\n  How." in shown
    assert "--no-no-plot" not in shown
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("method", ["fedrema", "fedprior"])
def test_the_help_of_a_run_fits_the_terminal(method, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse_settings(method, [option])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_help_shows_the_defaults_of_a_preset_and_a_file(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("lr = 0.125")
    with pytest.raises(SystemExit):
        parse_settings("fedavg", ["--paper", "table1-mnist", "--config", str(tmp_path / "mine.toml"), "-h"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 500)" in shown
    assert "(default: 0.125)" in shown


def test_the_last_value_of_an_option_can_be_read_before_parsing_the_others():
    arguments = ["--dataset", "mnist", "--unknown", "--dataset=cifar10", "--config"]
    assert peek(arguments, "dataset", "config", "paper") == {"dataset": "cifar10"}


@pytest.mark.parametrize("name", registry())
def test_settings_as_arguments_read_back_as_the_same_settings(name):
    arguments = ["--lr", "0.3", "--no-keep-momentum", "--head", "fc", "--data-dir", "a b", "--late", "0.1"]
    settings = parse_settings(name, arguments)
    written = json.loads(json.dumps(settings.flat()))
    assert parse_settings(name, as_arguments(written)) == settings


def test_options_are_given_to_the_methods_that_have_them():
    fedavg, fedrema = parse_several(["fedavg", "fedrema"], ["--delta", "0.3", "--alternate", "--lr=0.2"])
    assert (fedrema.method.delta, fedrema.method.alternate) == (0.3, True)
    assert fedavg.local.lr == fedrema.local.lr == 0.2
    with pytest.raises(BadInput, match="fedrema run fedavg,fedrema has no option --mu"):
        parse_several(["fedavg", "fedrema"], ["--mu", "1"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--learning-rate", "1"],
            "fedrema run fedavg has no option --learning-rate; fedrema run fedavg --help-all lists the valid options.",
        ),
        (["--lrr", "1"], "perhaps you meant --lr"),
        (["--lr", "fast"], "--lr must be a number, got 'fast'."),
        (["--backend", "warp"], "--backend must be auto, loop or stacked, got 'warp'."),
        (["--rounds", "2.5"], "--rounds must be a whole number, got '2.5'."),
        (["--lr"], "--lr: expected one argument; fedrema run fedavg --help-all lists the valid options."),
        (["--quiet=yes"], "--quiet/--no-quiet: ignored explicit argument 'yes'"),
        (["--no-lr"], "fedrema run fedavg has no option --no-lr"),
        (["--lr", "0.1", "fast"], "fedrema run fedavg: unexpected argument 'fast'"),
        (["-x"], "fedrema run fedavg has no option -x"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--participation", "0"], "--participation must be in (0, 1], got 0.0"),
        (["--participation", "1.5"], "--participation must be in (0, 1], got 1.5"),
        (["--dropout", "1"], "--dropout must be in [0, 1), got 1.0"),
        (["--late", "-0.1"], "--late must be in [0, 1), got -0.1"),
        (["--momentum", "1"], "--momentum must be in [0, 1), got 1.0"),
        (["--lr", "nan"], "--lr must be 0 or more, got nan"),
        (["--clip", "-1"], "--clip must be 0 or more, got -1.0"),
        (["--batch", "-1"], "--batch must be 0 or more, got -1"),
        (["--lr-decay", "2"], "--lr-decay must be in (0, 1], got 2.0"),
        (["--hidden", "0"], "--hidden must be at least 1, got 0"),
        (["--checkpoint-every", "-1"], "--checkpoint-every must be 0 or more, got -1"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--s", "1.5"], "--s 1.5 is outside 0 to 1"),
        (["--paper", "table9"], "--paper 'table9' is unknown; valid are table1-mnist"),
        (["--config", "missing.toml"], "--config missing.toml cannot be read: No such file"),
    ],
)
def test_invalid_arguments_are_reported_in_one_sentence(arguments, words):
    with pytest.raises(BadInput) as caught:
        parse_settings("fedavg", arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
