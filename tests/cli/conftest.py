"""Fixtures of the tests of commands."""

import pytest


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    """Run the test in an empty folder, with output 120 columns wide; return the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path
