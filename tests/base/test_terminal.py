"""Untrusted text on the terminal: control sequences and rich markup in names, titles, paths and errors are escaped."""

import io
import json
import logging

import numpy as np
import pytest
from rich.table import Table
from rich.text import Text

import fedrema
from fedrema.base.terminal import Console, print_safe, safe, safe_lines, safe_logger
from fedrema.cli import main

EVIL = "[/x]\x1b]0;evil\x07\nfedrema: all is well\u202e\x9b31m"
SHOWN = r"[/x]\x1b]0;evil\x07\nfedrema: all is well\u202e\x9b31m"


def assert_clean(text):
    """Assert that a text has only printable characters and line breaks."""
    odd = {character for character in text if not character.isprintable() and character != "\n"}
    assert not odd
    assert "\nfedrema: all is well" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("north", "north"),
        ("Zürich – 北 ± 3 …", "Zürich – 北 ± 3 …"),
        (EVIL, SHOWN),
        ("tab\tzero\u200bwidth\udc80", r"tab\tzero\u200bwidth\udc80"),
    ],
)
def test_invisible_characters_are_escaped(text, expected):
    assert safe(text) == expected
    assert safe_lines(f"{text}\nnext").endswith("\nnext")


def test_only_richs_own_control_sequences_reach_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=200)
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.print(EVIL, Text(EVIL, "bold"), table, ":skull:")
    with console.status(Text(EVIL)):
        pass
    shown = stream.getvalue()
    assert "\x1b[1m" in shown  # rich's own styles are kept
    assert "\x1b]0;" not in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
    assert shown.count("[/x]") >= 5
    assert ":skull:" in shown


def test_printed_and_logged_text_is_escaped(capsys, tmp_path):
    print_safe(EVIL, 3)
    assert capsys.readouterr().out == f"{SHOWN} 3\n"
    log = safe_logger("fedrema.tried")
    handler = logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        log.warning("client %s does not count: %s", EVIL, EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            safe_logger("fedrema.tried").exception("a bug")
    finally:
        log.removeHandler(handler)
        handler.close()
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"client {SHOWN} does not count: {SHOWN}"
    assert not any(character for line in lines for character in line if not character.isprintable())


@pytest.fixture
def evil_data(tmp_path):
    """A federation whose clients' names contain control sequences and markup."""
    file = tmp_path / "own.npz"
    generator = np.random.default_rng(0)
    names = np.repeat([EVIL, f"{EVIL}2", "[bold]three[/bold]"], 12)
    np.savez(file, x=generator.normal(size=(36, 6)).astype(np.float32), y=np.tile(np.arange(3), 12), client=names)
    return file


def test_partition_run_compare_export_and_resume_escape_names(evil_data, tmp_path, capsys):
    assert main(["partition", "--federation", str(evil_data)]) == 0
    said = capsys.readouterr().out
    assert_clean(said)
    assert "[/x]" in said
    assert "[bold]three" in said
    out = tmp_path / "[/x] run"
    quick = ["--federation", str(evil_data), "--epochs", "1", "--hidden", "4", "--device", "cpu"]
    assert main(["run", "fedavg", *quick, "--rounds", "2", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert_clean(said.out + said.err)
    assert "[/x] run" in said.out
    assert main(["resume", str(out), "--rounds", "3"]) == 0
    assert main(["export", str(out)]) == 0
    assert main(["export", str(out), "--clients", EVIL]) == 2  # the export already exists
    # A run's folder may have been edited by others.
    directory = fedrema.load(out).directory
    directory.write_json(directory.config_file, directory.config() | {"method": EVIL})
    assert main(["compare", str(out), "--no-plot"]) == 0
    assert main(["compare", str(out), "--no-plot", "--format", "markdown"]) == 0
    said = capsys.readouterr()
    assert_clean(said.out + said.err)
    assert "[/x]" in said.out


def test_personalize_escapes_file_names(evil_data, tmp_path, capsys):
    quick = ["--federation", str(evil_data), "--epochs", "1", "--hidden", "4", "--device", "cpu", "--quiet"]
    assert main(["run", "fedrema", *quick, "--rounds", "1", "--out", str(tmp_path / "run")]) == 0
    arrays = np.load(evil_data)
    new = tmp_path / "[_x]\x1b[31m.npz"
    np.savez(new, x=arrays["x"][:12], y=arrays["y"][:12])
    assert main(["personalize", str(tmp_path / "run"), "--data", str(new)]) == 0
    said = capsys.readouterr().out
    assert_clean(said)
    assert r"[_x]\x1b[31m: " in said


def test_a_grid_escapes_titles_and_paths(tmp_path, capsys):
    (tmp_path / "grid.toml").write_text(
        f"""title = {json.dumps(EVIL)}
seeds = 1
[settings]
rounds = 1
clients = 3
samples = 40
hidden = 4
epochs = 1
[rows.fedavg]
title = "[/x] \\u001b[31mred"
"""
    )
    assert main(["grid", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "[y] out")]) == 0
    said = capsys.readouterr()
    assert_clean(said.out + said.err)
    assert r"\x1b[31mred" in said.out
    assert "[y] out" in said.out.replace("\n", "")


def test_error_messages_are_escaped(tmp_path, capsys):
    assert main([EVIL]) == 2
    assert main(["export", str(tmp_path / "x\x1b[31m")]) == 2
    assert main(["run", f"fedavg{EVIL}"]) == 2
    said = capsys.readouterr().err
    assert_clean(said)
    assert r"x\x1b[31m does not exist" in said


def test_names_and_errors_of_nodes_are_escaped(tmp_path, capsys):
    pytest.importorskip("flwr")
    from flwr.app import Error, Message

    from fedrema.cli.deploy import say
    from fedrema.deploy.flower_conductor import Conductor
    from fedrema.deploy.folder import NodeFolder, ServerFolder
    from fedrema.deploy.run_config import read_run_config
    from fedrema.deploy.run_state import locked_run, log_file
    from tests.deploy.flower_in_process import InProcessGrid

    words = ["--rounds", "2", "--epochs", "1", "--samples", "40", "--hidden", "6"]
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", "--deal", "--nodes", "a,b,c", *words]) == 0
    place = ServerFolder.open(tmp_path / "f")
    config = {**place.run_config(), "folder": str(place.run)}
    nodes = [NodeFolder.open(tmp_path / "f" / "nodes" / name) for name in "abc"]
    for node in nodes:
        node.kept.mkdir()

    def spoil(node, reply):
        reasons = {"1": f"Traceback\n{EVIL}", "2": " \n"}
        if node == 8 and reply.metadata.group_id in reasons:
            return Message(Error(2, reasons[reply.metadata.group_id]), reply_to=grid.sent[-1])
        return reply

    grid = InProcessGrid(config, [node.node_config() for node in nodes], {7: EVIL, 8: f"{EVIL}2", 9: "[/y]"}, spoil)
    with locked_run(place.run) as lock:
        Conductor(grid, *read_run_config(config), pause=lambda seconds: None).conduct(lock)
    capsys.readouterr()
    log = log_file(place.run).read_text(encoding="utf-8")
    assert_clean(log)
    assert f"no usable reply from node {SHOWN}2: fedrema: all is well" in log
    assert main(["deploy", "status", str(place.path)]) == 0
    assert main(["export", str(place.run)]) == 0
    said = capsys.readouterr().out
    assert_clean(said)
    assert r"[/x]\x1b" in said
    assert "[/y]" in said
    say(EVIL)
    assert capsys.readouterr().out.endswith(f" {SHOWN}\n")
