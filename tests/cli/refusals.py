"""Commands that must fail."""

from fedrema.cli import main


def refused(capsys, *arguments):
    """Run a command that must fail; return its error message of one line."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err
