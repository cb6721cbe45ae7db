"""Shell completion, in a real bash, and in zsh and fish where they are installed."""

import shutil
import subprocess

import pytest

from fedrema.base.options import Purpose
from fedrema.cli import COMMANDS, main
from fedrema.cli.completion import completed_commands
from fedrema.cli.deploy import COMMANDS as DEPLOY
from fedrema.config.settings import Settings
from tests.cli.refusals import refused


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A function that returns the file with the script for a shell."""
    from contextlib import redirect_stdout

    folder = tmp_path_factory.mktemp("completion")

    def write(shell):
        file = folder / shell
        if not file.exists():
            with file.open("w") as stream, redirect_stdout(stream):
                assert main(["completion", shell]) == 0
        return file

    return write


def completed(file, *words):
    """Return what bash offers for the last of the words."""
    code = (
        f"source {file}; COMP_WORDS=(fedrema {' '.join(repr(word) for word in words)}); COMP_CWORD={len(words)}; "
        "_fedrema; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_methods_options_and_values(script):
    file = script("bash")
    assert set(COMMANDS) <= set(completed(file, ""))
    assert completed(file, "co") == ["compare", "completion"]
    assert {"fedrema", "fedrep"} <= set(completed(file, "run", "fedr"))
    assert "--rounds" in completed(file, "run", "fedrema", "--ro")
    assert "--delta" in completed(file, "run", "fedrema", "--de")
    assert set(completed(file, "run", "fedrema", "--dp", "")) == {"none", "central", "local", "sample"}
    assert set(completed(file, "deploy", "")) == set(DEPLOY)
    assert "--secure-aggregation" in completed(file, "deploy", "init", "--secure")
    assert set(completed(file, "completion", "")) <= {"bash", "zsh", "fish"}
    assert completed(file, "report", "") == []  # bash then completes files
    subprocess.run(["bash", "-n", file], check=True)


def test_every_option_of_a_run_is_completed():
    found = completed_commands()
    assert {f"--{name}" for name in Settings.names(*Purpose)} <= found["run"].keys()
    assert found["compare"]["--format"] == ("table", "markdown", "latex", "csv")
    assert {"--plot", "--no-plot", "--help"} <= found["compare"].keys()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell, script):
    file = script(shell)
    assert "leaderboard" in file.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", file], check=True)


def test_other_shells_are_refused(capsys):
    assert "bash, zsh" in refused(capsys, "completion", "tcsh")
    refused(capsys, "completion")
