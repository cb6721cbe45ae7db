"""--overwrite replaces a run of fedrema, only that, and only once the new one has started."""

import json
import os
import shutil
from dataclasses import dataclass
from typing import ClassVar

import pytest

import fedrema
from fedrema import BadInput, Method, cross_entropy
from fedrema.cli import main
from fedrema.runs.export import export_models
from tests.fixtures import make_federation

SMALL = {"rounds": 3, "clients": 4, "samples": 20, "epochs": 1}
QUICK = ("--rounds", "2", "--clients", "4", "--samples", "20", "--epochs", "1", "--quiet")


def content(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in ("run.lock", "running.json")
    }


@dataclass(frozen=True)
class FailsInRound(Method):
    """FedAvg whose server step fails in a round."""

    name: ClassVar[str] = "fails"
    title: ClassVar[str] = "Fails"
    paper: ClassVar[str] = "a test"

    failing: int = 1
    """The round."""

    def aggregate(self, net, state, uploads, moment):
        if moment.round == self.failing:
            raise RuntimeError("the server step failed")
        return super().aggregate(net, state, uploads, moment)

    def loss(self, net, client, batch):
        return cross_entropy(net(client.params, batch.x), batch)


def test_the_old_run_stays_until_the_new_one_has_finished_a_round(tmp_path):
    fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    before = content(tmp_path / "run")
    with pytest.raises(Exception, match="the server step failed"):
        fedrema.run(FailsInRound(1), out=tmp_path / "run", overwrite=True, **SMALL)
    assert content(tmp_path / "run") == before
    with pytest.raises(Exception, match="the server step failed"):
        fedrema.run(FailsInRound(2), out=tmp_path / "run", overwrite=True, **SMALL)
    run = fedrema.load(tmp_path / "run")
    assert run.method.endswith(":FailsInRound")
    assert len(run.rounds) == 1
    assert not run.finished


def test_a_replaced_run_equals_one_in_a_new_folder(tmp_path):
    fedrema.run("fedrema", out=tmp_path / "run", record="relations", **SMALL)
    export_models(fedrema.load(tmp_path / "run"))
    replaced = fedrema.run("fedavg", out=tmp_path / "run", overwrite=True, **SMALL)
    new = fedrema.run("fedavg", out=tmp_path / "new", **SMALL)
    assert sorted(content(replaced.path)) == sorted(content(new.path))
    assert replaced.curve()[1].tolist() == new.curve()[1].tolist()
    assert fedrema.resume(replaced.path, rounds=4).summary["rounds"] == 4


def test_other_files_in_the_folder_are_kept(tmp_path):
    run = fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    (run.path / "notes.md").write_text("mine")
    (run.path / "checkpoint" / "copy.bin").write_text("mine")
    (run.path / "federation.npz").write_text("mine: this run got no federation from Python")
    fedrema.run("fedavg", out=run.path, overwrite=True, **SMALL)
    assert (run.path / "notes.md").read_text() == "mine"
    assert (run.path / "checkpoint" / "copy.bin").read_text() == "mine"
    assert (run.path / "federation.npz").read_text().startswith("mine")
    assert fedrema.resume(run.path, rounds=4).summary["rounds"] == 4


@pytest.mark.parametrize(
    "config",
    ["", "{}", "[]", "[" * 100_000, '{"method": "fedavg"}', '{"name": "an app of somebody else", "settings": {}}'],
    ids=["empty", "object", "list", "nested", "part", "other"],
)
def test_a_folder_with_another_config_json_is_not_a_run(tmp_path, monkeypatch, config, capsys):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "precious.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        for option in ((), ("--overwrite",)):
            assert main(["run", "fedavg", *QUICK, "--out", out, *option]) == 2
            assert "--out" in capsys.readouterr().err
    assert content(tmp_path) == {"config.json": config.encode(), "precious.txt": b"mine"}


def test_the_working_folder_can_be_a_run_and_be_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "fedrema", *QUICK, "--out", "."]) == 0
    assert main(["run", "fedavg", *QUICK, "--out", ".", "--overwrite"]) == 0
    assert fedrema.load(tmp_path).method == "fedavg"


def test_the_federation_that_is_trained_on_is_not_deleted(tmp_path):
    run = fedrema.run("fedrema", federation=make_federation(), out=tmp_path / "run", rounds=2)
    saved = (run.path / "federation.npz").read_bytes()
    arguments = ["--federation", str(run.path / "federation.npz"), "--out", str(run.path), "--overwrite", "--quiet"]
    assert main(["run", "fedavg", "--rounds", "2", *arguments]) == 0
    assert (run.path / "federation.npz").read_bytes() == saved
    assert fedrema.resume(run.path, rounds=3).summary["rounds"] == 3
    # A run on other data replaces it and removes the saved federation.
    again = fedrema.run("fedrema", federation=make_federation(seed=1), out=run.path, overwrite=True, rounds=2)
    assert (again.path / "federation.npz").read_bytes() != saved
    fedrema.run("fedavg", out=run.path, overwrite=True, **SMALL)
    assert not (run.path / "federation.npz").exists()


def test_a_link_to_a_run_replaces_the_run_and_stays_a_link(tmp_path, capsys):
    fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert main(["run", "fedavg", *QUICK, "--out", str(tmp_path / "link"), "--overwrite"]) == 0
    assert (tmp_path / "link").is_symlink()
    assert fedrema.load(tmp_path / "run").method == "fedavg"
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert main(["run", "fedavg", *QUICK, "--out", str(tmp_path / "dangling"), "--overwrite"]) == 2
    assert "is a link to something that does not exist" in capsys.readouterr().err


def test_an_unfinished_run_suggests_resume(tmp_path):
    run = fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    (run.path / "summary.json").unlink()
    with pytest.raises(BadInput, match=f"already exists, unfinished: continue it with fedrema resume {run.path}, "):
        fedrema.run("fedrema", out=run.path, **SMALL)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(BadInput, match="Permission denied"):
        fedrema.run("fedrema", out=tmp_path / "closed" / "run", **SMALL)


def test_an_export_replaces_only_an_export(tmp_path):
    run = fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    other = tmp_path / "site"
    other.mkdir()
    (other / "index.json").write_text('{"pages": []}')
    (other / "logo.png").write_text("mine")
    with pytest.raises(BadInput, match="holds something other than exported models"):
        export_models(run, other, overwrite=True)
    assert sorted(content(other)) == ["index.json", "logo.png"]


def test_an_export_does_not_change_other_files(tmp_path):
    run = fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    first = export_models(run)
    folder = first[0].parent
    (folder / "thesis.pdf").write_text("mine")
    index = json.loads((folder / "index.json").read_text())
    index["clients"][0]["file"] = "../config.json"  # an index is a file that anyone can edit
    (folder / "index.json").write_text(json.dumps(index))
    export_models(run, clients=["1"], overwrite=True)
    assert sorted(content(folder)) == [
        "0.safetensors", "1.safetensors", "MODEL_CARD.md", "README.md", "index.json", "thesis.pdf"
    ]  # fmt: skip
    (folder / "thesis.pdf").unlink()
    (folder / "0.safetensors").unlink()
    export_models(run, clients=["2"], overwrite=True)
    assert sorted(content(folder)) == ["2.safetensors", "MODEL_CARD.md", "README.md", "index.json"]
    assert not list(run.path.glob(".models*"))


def test_exported_models_of_the_old_run_are_removed(tmp_path):
    run = fedrema.run("fedrema", out=tmp_path / "run", **SMALL)
    export_models(run)
    shutil.copy(run.path / "models" / "0.safetensors", run.path / "models" / "renamed.safetensors")
    fedrema.run("fedavg", out=run.path, overwrite=True, **SMALL)
    assert sorted(content(run.path / "models")) == ["renamed.safetensors"]
