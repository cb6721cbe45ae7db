"""`fedrema doctor`: what it checks, and its exit code."""

import importlib.metadata

import pytest

import fedrema
from fedrema.cli import main
from fedrema.cli.doctor import Requirement, requirements

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_a_working_installation_passes(capsys, tmp_path):
    assert main(["doctor", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("Versions", "Devices", "Datasets", "Extras", "Space", "Training", "works (", fedrema.__version__):
        assert word in shown
    assert "mnist" in shown
    assert "not downloaded" in shown


def test_requirements_are_those_of_the_package():
    found = {(one.extra, one.name): one for one in requirements()}
    assert found["", "torch"].found == importlib.metadata.version("torch")
    assert found["", "torch"].is_valid
    assert ("deploy", "flwr") in found
    assert ("watch", "starlette") in found
    assert not any(name in ("pytest", "ruff") for _, name in found)


def test_a_missing_package_and_a_wrong_version_fail_and_are_named(capsys, monkeypatch):
    broken = [
        Requirement("numpy", ">=2.0", "", "1.26.0", is_valid=False),
        Requirement("torch", ">=2.11", "", None, is_valid=False),
        Requirement("ray", ">=2.40", "ray", None, is_valid=False),
    ]
    monkeypatch.setattr("fedrema.cli.doctor.requirements", lambda: broken)
    assert main(["doctor"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "numpy 1.26.0 is installed, numpy>=2.0 is needed; torch is missing" in shown
    assert "ray is missing: pip install 'fedrema[ray]'" in shown


def test_failed_training_and_little_space_are_reported(capsys, monkeypatch):
    def fail(*given, **settings):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(fedrema, "run", fail)
    monkeypatch.setattr("fedrema.cli.doctor.LOW_DISK", 10**18)
    monkeypatch.setattr("fedrema.cli.doctor.LOW_MEMORY", 10**18)
    assert main(["doctor"]) == 2
    shown = capsys.readouterr().out
    assert "RuntimeError: no kernel" in shown
    assert "free on the disk" in shown
    assert "--chunk" in shown
