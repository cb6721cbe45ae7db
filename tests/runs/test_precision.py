"""The precision of a run belongs to its result: its identity, its group, and what continues it."""

import dataclasses

import pytest
import torch

import fedrema
from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.runs.directory import RunDirectory

QUICK = {"rounds": 3, "clients": 4, "samples": 20, "epochs": 1, "device": "cpu"}


def quick_run(folder, name, **settings):
    return fedrema.run("fedavg", out=folder / name, **QUICK, **settings)


def on_gpu(run, products="bf16"):
    """Let the manifest say what a GPU would have recorded."""
    directory, manifest = RunDirectory(run.path), run.manifest
    directory.write_manifest(
        dataclasses.replace(manifest, ran_on=dataclasses.replace(manifest.ran_on, device="GPU", products=products))
    )


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "run.lock"}


def test_auto_on_a_cpu_is_float32(tmp_path):
    auto, explicit, double = (quick_run(tmp_path, name, precision=name) for name in ("auto", "float32", "float64"))
    assert auto.settings["precision"] == "float32"
    assert auto.manifest.identity == explicit.manifest.identity != double.manifest.identity


def test_runs_of_two_precisions_are_not_seeds_of_one_group(tmp_path):
    quick_run(tmp_path, "a", seed=0)
    quick_run(tmp_path, "b", seed=1, precision="float32")
    quick_run(tmp_path, "c", seed=2, precision="float64")
    rows = fedrema.compare(tmp_path).rows()
    assert [(row["method"], row["seeds"]) for row in rows] == [
        ("FedAvg precision=float32", 2),
        ("FedAvg precision=float64", 1),
    ]


def test_methods_of_two_precisions_are_compared_with_their_precisions(tmp_path, capsys):
    for method, precision in (("fedavg", "float32"), ("local", "float64")):
        fedrema.run(method, out=tmp_path / method, precision=precision, **QUICK)
    titles = ["FedAvg precision=float32", "Local precision=float64"]
    assert [row["method"] for row in fedrema.compare(tmp_path).rows()] == titles
    assert main(["verdict", str(tmp_path)]) == 0
    assert "FedAvg precision=float32" in " ".join(capsys.readouterr().out.split())


def test_a_run_of_a_gpu_does_not_continue_on_a_cpu(tmp_path, capsys):
    run = quick_run(tmp_path, "run")
    on_gpu(run)
    before = contents(tmp_path)
    assert main(["resume", str(run.path), "--rounds", "5"]) == 2
    complaint = capsys.readouterr().err
    assert (
        f"{run.path} is computed in bf16, which needs a CUDA device: resume it on a GPU, or start a new run"
        in complaint
    )
    assert complaint.count("\n") == 1
    assert contents(tmp_path) == before


def test_a_run_does_not_continue_in_another_precision(tmp_path):
    run = quick_run(tmp_path, "run")
    with pytest.raises(BadInput, match="is computed in float32 and cannot continue in float64: start a new run"):
        fedrema.resume(run.path, rounds=5, precision="float64")
    assert len(fedrema.resume(run.path, rounds=5).rounds) == 5


def test_inspecting_a_run_keeps_its_precision(monkeypatch):
    from fedrema.core import Simulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kept = {name: Simulation(precision=name).for_inspection().precision for name in ("float32", "float64", "bf16")}
    assert kept == {"float32": "float32", "float64": "float64", "bf16": "auto"}
