"""fedrema methods."""

import re
import sys

import pytest

import fedrema
from fedrema.cli import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_methods_are_listed_and_explained(capsys):
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    for kind in fedrema.registry().values():
        assert kind.title in shown
    assert "--delta" in shown
    assert set(re.findall(r"^Tasks: (.*)$", shown, re.M)) == {"all", "classes"}
    assert shown.count("Tasks: ") == len(fedrema.registry())
    assert main(["methods", "fedrema"]) == 0
    described = capsys.readouterr().out
    assert "Eq. 6" in described
    assert "Tasks: all" in described
    assert main(["methods", "fedproto"]) == 0
    assert "Tasks: classes" in capsys.readouterr().out
    assert main(["methods", "--paper"]) == 0
    assert "table1-cifar10" in capsys.readouterr().out


OWN_METHOD = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from fedrema import Method

@dataclass(frozen=True)
class Own(Method):
    '''One of my own [/b].'''
    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "Own [/bold]"
    paper: ClassVar[str] = "none [red]"
    way: Literal["here", "there"] = "here"
    '''Which way [1].'''
    bare: float = 0.5

    def supports(self, task):
        return task.name in ("ordinal", "count")

@dataclass(frozen=True)
class Demanding(Own):
    '''Has a setting without a default.'''
    needed: float = field(kw_only=True)
    '''Needed.'''
"""


def test_an_own_method_is_explained(capsys, in_an_empty_folder):
    (in_an_empty_folder / "a_method_of_mine.py").write_text(OWN_METHOD)
    try:
        assert main(["methods", "a_method_of_mine:Own"]) == 0
        assert main(["methods", "a_method_of_mine:Demanding"]) == 0
    finally:
        sys.modules.pop("a_method_of_mine", None)
    shown = capsys.readouterr().out
    assert "Own [/bold]  (fedrema run a_method_of_mine:Own)" in shown
    assert "One of my own [/b]." in shown
    assert "none [red]" in shown
    assert "Which way [1]. One of here, there." in shown
    assert "--bare" in shown
    assert "Tasks: ordinal, count" in shown
    assert "Tasks: depends on the settings" in shown
