"""Tables in narrow terminals: the names of methods stay whole, and columns that are left out are named."""

import re
import unicodedata

import pytest

from fedrema.cli import main

QUICK = ("--rounds", "1", "--clients", "3", "--samples", "20", "--epochs", "1", "--quiet")
WIDTHS = (60, 70, 80, 90, 100)
METRICS = {
    "one": "accuracy",
    "three": "accuracy,log_loss,balanced_accuracy",
    "many": "accuracy,balanced_accuracy,f1,auc,log_loss,brier",
}
LONG = "Averaging of the Client Models"
OWN_METHOD = f'''
from dataclasses import dataclass
from typing import ClassVar
import fedrema

@dataclass(frozen=True)
class Long(fedrema.registry()["fedavg"]):
    name: ClassVar[str] = "long"
    title: ClassVar[str] = "{LONG}"
    paper: ClassVar[str] = "a test"
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("narrow")
    (place / "longnames.py").write_text(OWN_METHOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, metrics in METRICS.items():
            asked = ["run", "local,fedrema,longnames:Long", "--metrics", metrics, "--seeds", "2", *QUICK]
            assert main([*asked, "--out", name]) == 0
    return place


def shown(capsys, monkeypatch, folder, width, *arguments):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(list(arguments)) == 0
    text = capsys.readouterr().out
    lines = [line.rstrip() for line in text.splitlines() if "Report: " not in line]
    assert all(len(line) - sum(map(bool, map(unicodedata.combining, line))) <= width for line in lines)
    return text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("metrics", METRICS)
def test_a_comparison_keeps_names_and_says_what_is_left_out(metrics, width, folder, capsys, monkeypatch):
    text = shown(capsys, monkeypatch, folder, width, "compare", metrics, "--no-plot")
    table, _, differences = text.partition("Difference to")
    for title in ("Local", "FedReMa", LONG):
        row = next(line for line in table.splitlines() if line.startswith(title))
        assert re.search(r"\d\d\.\d|±", row.removeprefix(title))
        assert title in differences
    left_out = re.search(rf"Not shown in {width} columns: (.+?)\. Set COLUMNS=(\d+) to see\s+them\.", table, re.DOTALL)
    if left_out is None:
        assert all(heading in table for heading in ("honest", "tenth", "seconds"))
        return
    assert " ".join(left_out[1].split()).split(", ")[0] == "seconds"
    wide = shown(capsys, monkeypatch, folder, int(left_out[2]), "compare", metrics, "--no-plot")
    assert "Not shown" not in wide


@pytest.mark.parametrize("width", WIDTHS)
def test_run_verdict_and_methods_keep_names(width, folder, capsys, monkeypatch):
    text = shown(capsys, monkeypatch, folder, width, "verdict", "many")
    for client in ("0", "1", "2"):
        assert re.search(rf"^{client} .*[+-]?\d", text, re.MULTILINE)
    words = [word for title in ("FedReMa", LONG) for word in title.split()]
    headings = " ".join(line for line in text.splitlines() if not line[:1].isdigit())
    assert all(word in headings.split() for word in words)
    assert re.search(r"^--[a-z-]+ ", shown(capsys, monkeypatch, folder, width, "methods", "fedrema"), re.MULTILINE)


def test_the_table_after_a_run_is_the_same(folder, capsys, monkeypatch):
    asked = [option for option in QUICK if option != "--quiet"]
    run = ["run", "local,longnames:Long", *asked, "--metrics", METRICS["three"], "--out", "after"]
    text = shown(capsys, monkeypatch, folder, 80, *run)
    assert any(line.startswith(LONG) for line in text.splitlines())
