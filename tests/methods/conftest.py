"""Fixtures of the tests of methods."""

import pytest

from fedrema.cli import main


@pytest.fixture
def refused_run(capsys, tmp_path, monkeypatch):
    """Return a function that runs `fedrema run` with invalid arguments and returns the error message of one line."""

    def run(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        assert main(["run", *arguments, "--rounds", "1", "--quiet", "--out", "run"]) == 2
        error = capsys.readouterr().err
        assert len(error.strip().splitlines()) == 1
        assert not list(tmp_path.iterdir())
        return error

    return run
