"""Files of a run with another number of rounds, and otherwise the same settings, are refused by every command."""

import shutil

import numpy as np
import pytest

import fedrema
from tests.runs.damaged import command, contents, watch

SETTINGS = {"clients": 4, "samples": 40, "epochs": 1, "hidden": 6, "device": "cpu", "record": "relations"}
FOREIGN = "belongs to another run, or to another round of this one"
PREDICTIONS, CHECKPOINT = "predictions.npz", "checkpoint/state.safetensors"
SUMMARY, RELATIONS = "summary.json", "relations.npz"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of 1 and of 4 rounds with equal settings and thus one identity, and the second run's first three rounds."""
    folder = tmp_path_factory.mktemp("runs")
    fedrema.run("local", out=folder / "local", rounds=1, **SETTINGS)
    for rounds in (1, 4):
        fedrema.run("fedrema", out=folder / str(rounds), rounds=rounds, record_every=2, **SETTINGS)
    fedrema.run("fedrema", out=folder / "continued", rounds=3, record_every=2, **SETTINGS)
    shutil.copytree(folder / "continued", folder / "third")
    fedrema.resume(folder / "continued", rounds=4)
    digits = fedrema.make_federation(clients=1, samples=20, partition="iid", data_seed=7)
    np.savez(folder / "new.npz", x=digits.x, y=digits.y)
    return folder


def commands(run, folder):
    """Return the commands that read a run, by name."""
    return {
        "verdict": ("verdict", run, folder / "local"),
        "compare": ("compare", run, "--no-plot"),
        "report": ("report", run, folder / "local", "--out", folder / "page.html"),
        "export": ("export", run, "--out", folder / "models"),
        "predict": ("predict", run, folder / "new.npz", "--client", "0", "--out", folder / "predictions.csv"),
        "personalize": ("personalize", run, "--data", folder / "new.npz", "--out", folder / "new.safetensors"),
        "resume": ("resume", run, "--quiet"),
    }


READERS = {
    PREDICTIONS: ("verdict", "report"),
    CHECKPOINT: ("export", "predict", "personalize", "resume"),
    SUMMARY: ("verdict", "compare", "report", "export", "predict", "personalize"),
    RELATIONS: ("report", "resume"),
}


@pytest.mark.parametrize(("longer", "other"), [("4", "1"), ("1", "4"), ("continued", "1")])
@pytest.mark.parametrize("file", READERS)
def test_a_file_of_a_run_with_another_number_of_rounds_is_refused(runs, tmp_path, file, longer, other):
    run = tmp_path / "run"
    shutil.copytree(runs / longer, run)
    shutil.copytree(runs / "local", tmp_path / "local")
    shutil.copy(runs / "new.npz", tmp_path)
    shutil.copyfile(runs / other / file, run / file)
    before = contents(run)
    for name in READERS[file]:
        if (name, file, longer) == ("resume", RELATIONS, "1"):
            continue  # matrices of rounds after the checkpoint are dropped, as after a crash
        code, _, complaint = command(*commands(run, tmp_path)[name])
        assert code == 2, (name, file)
        assert complaint.startswith("fedrema: ")
        assert complaint.count("\n") == 1
        assert file.rpartition("/")[2].partition(".")[0] in complaint or "the checkpoint is of round" in complaint
        assert contents(run) == before, name
    assert not (tmp_path / "models").exists()
    if file in (SUMMARY, RELATIONS):
        assert watch(run, tmp_path / "page")[0] == 2


@pytest.mark.parametrize("file", [PREDICTIONS, SUMMARY])
def test_resume_writes_the_files_of_the_last_round_again(runs, tmp_path, file):
    run = tmp_path / "run"
    shutil.copytree(runs / "4", run)
    code, expected, _ = command("verdict", run, runs / "local")
    assert code == 0
    shutil.copyfile(runs / "1" / file, run / file)
    assert FOREIGN in command("verdict", run, runs / "local")[2]
    assert command("resume", run, "--quiet")[0] == 0
    assert command("verdict", run, runs / "local")[:2] == (0, expected)


def test_an_earlier_checkpoint_of_the_same_records_is_continued_but_not_exported(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "continued", run)
    shutil.copyfile(runs / "third" / CHECKPOINT, run / CHECKPOINT)
    code, _, complaint = command("export", run)
    assert code == 2
    assert f"is of round 3, but the run has 4: fedrema resume {run} repeats the rounds after it." in complaint
    assert command("resume", run, "--quiet")[0] == 0
    assert command("export", run)[0] == 0
    state, expected = fedrema.load(run).state(), fedrema.load(runs / "4").state()
    assert state.round == 4
    for name, value in expected.params.common.items():
        assert state.params.common[name].equal(value)


def test_records_of_another_number_of_rounds_are_refused(runs, tmp_path):
    shutil.copytree(runs / "local", tmp_path / "local")
    shutil.copy(runs / "new.npz", tmp_path)
    for name in ("4", "1"):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(runs / name, run)
        shutil.copyfile(runs / ("1" if name == "4" else "4") / "rounds.jsonl", run / "rounds.jsonl")
        for arguments in commands(run, tmp_path).values():
            assert command(*arguments)[0] == 2, arguments


def test_models_of_another_round_in_an_export_are_refused(runs, tmp_path):
    shutil.copy(runs / "new.npz", tmp_path)
    for name in ("1", "4"):
        assert command("export", runs / name, "--out", tmp_path / name)[0] == 0
    arguments = ("predict", tmp_path / "4", tmp_path / "new.npz", "--client", "0")
    code, expected, _ = command(*arguments)
    assert code == 0
    shutil.copyfile(tmp_path / "1" / "0.safetensors", tmp_path / "4" / "0.safetensors")
    code, _, complaint = command(*arguments)
    assert code == 2
    assert "0.safetensors was altered or damaged since fedrema wrote it: export the models again." in complaint
    shutil.copyfile(tmp_path / "1" / "index.json", tmp_path / "4" / "index.json")
    code, printed, _ = command(*arguments)  # a complete export of round 1
    assert (code, printed) == (0, command("predict", tmp_path / "1", *arguments[2:])[1])
    assert printed != expected


def test_an_index_of_another_round_in_the_folder_of_a_run_is_refused(runs, tmp_path):
    shutil.copy(runs / "new.npz", tmp_path)
    run = tmp_path / "run"
    shutil.copytree(runs / "4", run)
    assert command("export", run)[0] == 0
    assert command("export", runs / "1", "--out", tmp_path / "1")[0] == 0
    arguments = ("predict", run / "models", tmp_path / "new.npz", "--client", "0")
    assert command(*arguments)[0] == 0
    shutil.rmtree(run / "models")
    shutil.copytree(tmp_path / "1", run / "models")
    code, _, complaint = command(*arguments)
    assert code == 2
    assert f"index.json {FOREIGN}: export the models again." in complaint


def test_an_edited_index_is_refused(runs, tmp_path):
    shutil.copy(runs / "new.npz", tmp_path)
    assert command("export", runs / "4", "--out", tmp_path / "models")[0] == 0
    index = tmp_path / "models" / "index.json"
    index.write_text(index.read_text().replace('"round": 4', '"round": 3'))
    code, _, complaint = command("predict", tmp_path / "models", tmp_path / "new.npz", "--client", "0")
    assert (code, "index.json was altered or damaged" in complaint) == (2, True)
