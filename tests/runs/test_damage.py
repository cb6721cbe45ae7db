"""Damaged runs: every file × every kind of damage × every command that reads runs."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import fedrema
from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.page.live_runs import LiveRuns
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.checksums import with_checksum
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import resume
from fedrema.runs.tensors import read_metadata
from tests.fixtures import make_federation
from tests.runs.damaged import COMMANDS, NOT_READ, SETTINGS, Killed, command, contents, damages, killed_in, timeless

KINDS = ("finished", "stopped", "given")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run with matrices and models; a run that was killed after a checkpoint; a run on data from Python."""
    folder = tmp_path_factory.mktemp("runs")
    fedrema.run("fedrema", out=folder / "finished", rounds=5, record="relations", **SETTINGS)
    assert command("export", folder / "finished")[0] == 0
    with pytest.raises(Killed):
        fedrema.run("fedrema", out=folder / "stopped", rounds=5, record="relations", on_round=killed_in(3), **SETTINGS)
    settings = {name: value for name, value in SETTINGS.items() if name not in ("clients", "samples")}
    with pytest.raises(Killed):
        fedrema.run(
            "fedavg", federation=make_federation(), out=folder / "given", rounds=4, on_round=killed_in(3), **settings
        )
    digits = fedrema.make_federation(clients=1, samples=20, partition="iid", data_seed=7)
    np.savez(folder / "new.npz", x=digits.x, y=digits.y)
    np.savez(folder / "blobs.npz", x=make_federation().x[:20], y=make_federation().y[:20])
    return folder


class Bench:
    """Runs commands on damaged copies of a run and compares the results with those of the undamaged run."""

    def __init__(self, runs, kind, tmp_path):
        self.original, self.folder, self.out = runs / kind, tmp_path / "run", tmp_path / "out"
        shutil.copy(runs / ("blobs.npz" if kind == "given" else "new.npz"), tmp_path / "new.npz")
        self.files = [name for name, content in contents(self.original).items() if content is not None]
        self.expected = {}
        for name, act in COMMANDS.items():
            self.restore()
            code, result, complaint = act(self.folder, self.out)
            assert (code, complaint) == (0, ""), name
            self.expected[name] = result

    def restore(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.original, self.folder)

    def failures(self, many):
        """Yield every combination with a wrong outcome, with the reason."""
        for place, file in enumerate(self.files):
            if file.startswith("models/") and not many and file != "models/index.json":
                continue
            # No command reads exported models.
            ways = list(damages((self.original / file).read_bytes(), many and not file.startswith("models/")))
            for turn, name in enumerate(COMMANDS):
                # The short test covers every file, damage and command, but not every combination.
                chosen = ways if many else [ways[(place + 3 * turn) % len(ways)]]
                for damage, do in chosen:
                    self.restore()
                    do(self.folder / file)
                    reason = self.fault(name, file, damage)
                    if reason:
                        yield f"{file} {damage} × {name}: {reason}"

    def is_an_earlier_state(self, file, damage):
        """Return whether the damaged run is a valid earlier state of the run."""
        if file == "summary.json":
            return damage == "removed"
        records = self.folder / "rounds.jsonl"
        if file != "rounds.jsonl" or not damage.startswith("cut") or (self.original / "summary.json").exists():
            return False
        facts, _ = read_checkpoint(self.original / "checkpoint" / "state.safetensors")
        return records.read_bytes().count(b"\n") >= facts["round"]

    def fault(self, name, file, damage):
        before = contents(self.folder)
        code, result, complaint = COMMANDS[name](self.folder, self.out)
        if code == 0:
            if complaint:
                return f"succeeds with a complaint: {complaint}"
            same = result == self.expected[name] or self.is_an_earlier_state(file, damage)
            return "" if same else "succeeds with another result"
        if code != 2:
            return f"exit code {code}: {complaint.splitlines()[-1:]}"
        lines = complaint.splitlines()
        if len(lines) != 1 or not lines[0].startswith("fedrema: ") or "Traceback" in complaint:
            return f"not one sentence: {complaint!r}"
        if file in NOT_READ:
            return f"refused for a file that is not read: {complaint!r}"
        if file.rpartition("/")[2] not in complaint and "models" not in file:
            return f"does not name the file: {complaint!r}"
        if name != "export_again" and contents(self.folder) != before:
            return "refuses, but has changed the folder"
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_reported_in_one_sentence_or_changes_no_result(runs, kind, tmp_path):
    failures = list(Bench(runs, kind, tmp_path).failures(many=False))
    assert not failures, "\n".join(failures)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_damage_is_reported_in_one_sentence_or_changes_no_result(runs, kind, tmp_path):
    failures = list(Bench(runs, kind, tmp_path).failures(many=True))
    assert not failures, "\n".join(failures)


def refused(capsys, *arguments):
    """Run a command that must fail; return its error message of one line."""
    assert main([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return shown


@pytest.fixture
def stopped(runs, tmp_path):
    shutil.copytree(runs / "stopped", tmp_path / "run")
    return RunDirectory(tmp_path / "run")


REMEDY = "restore it from a backup, or run again in another folder."


@pytest.mark.parametrize("command_name", ["resume", "compare", "report"])
def test_an_invalid_character_in_a_record_is_reported_with_file_and_line(stopped, capsys, command_name):
    text = stopped.rounds_file.read_text()
    second = text.splitlines()[1]
    stopped.rounds_file.write_text(text.replace(second, second.replace('"loss":2', '"loss":3')))
    before = contents(stopped.path)
    sentence = f"{stopped.rounds_file} line 2 was altered or damaged since fedrema wrote it: {REMEDY}\n"
    assert refused(capsys, command_name, stopped.path) == f"fedrema: {sentence}"
    assert contents(stopped.path) == before


def test_missing_records_are_refused_and_no_record_is_dropped(stopped, capsys):
    whole = stopped.rounds_file.read_bytes()
    stopped.rounds_file.unlink()
    before = contents(stopped.path)
    assert f"{stopped.rounds_file} is missing: {REMEDY}" in refused(capsys, "resume", stopped.path)
    assert contents(stopped.path) == before
    stopped.rounds_file.write_bytes(whole[: whole.index(b"\n") + 1])
    shown = refused(capsys, "resume", stopped.path)
    assert f"rounds.jsonl ends after line 1, but the checkpoint is of round 2: {REMEDY}" in shown
    assert stopped.rounds_file.read_bytes() == whole[: whole.index(b"\n") + 1]


def test_records_of_another_run_are_refused(runs, stopped):
    other = RunDirectory(runs / "given").rounds_file.read_bytes()
    stopped.rounds_file.write_bytes(other)
    with pytest.raises(BadInput, match=r"rounds\.jsonl line 1 was altered"):
        resume(stopped.path)


def test_damaged_records_after_the_checkpoint_are_dropped(runs, stopped):
    whole = stopped.rounds_file.read_bytes().splitlines(keepends=True)
    stopped.rounds_file.write_bytes(b"".join(whole[:2]) + bytes(300) + b"\n" + b"{]\n")
    resume(stopped.path)
    assert timeless(stopped.path) == timeless(runs / "finished")


@pytest.mark.parametrize("fact", ["round", "clients", "server", "order", "more"])
def test_edited_metadata_of_a_checkpoint_is_refused(stopped, fact):
    file = stopped.checkpoint_file
    metadata = read_metadata(file)
    facts = json.loads(metadata["fedrema"])
    facts[fact] = {"round": 1, "clients": 3, "server": {}, "order": [], "more": {}}[fact]
    tensors = load_file(file)
    save_file(tensors, file, {**metadata, "fedrema": json.dumps(facts)})
    with pytest.raises(BadInput, match=r"state\.safetensors was altered or damaged since fedrema wrote it: restore it"):
        resume(stopped.path)
    with pytest.raises(BadInput, match="was altered or damaged"):
        fedrema.load(stopped.path).state()


def test_the_digest_of_a_tensor_covers_shape_and_type(stopped):
    file = stopped.checkpoint_file
    metadata, tensors = read_metadata(file), load_file(file)
    name = next(name for name, value in tensors.items() if value.dim() > 1)
    save_file({**tensors, name: tensors[name].flatten()}, file, metadata)
    with pytest.raises(BadInput, match="was altered or damaged"):
        resume(stopped.path)


def test_a_checkpoint_of_an_older_format_is_refused_by_name(stopped):
    file = stopped.checkpoint_file
    facts = json.loads(read_metadata(file)["fedrema"]) | {"format": 1}
    save_file(load_file(file), file, {"fedrema": json.dumps(facts), "digest": "0" * 32})
    with pytest.raises(BadInput, match="has format 1; this version reads 3"):
        resume(stopped.path)


def test_an_edit_of_config_json_by_hand_is_refused(stopped, capsys):
    text = stopped.config_file.read_text()
    stopped.config_file.write_text(text.replace('"epochs": 1', '"epochs": 2'))
    for name in ("resume", "compare", "export"):
        shown = refused(capsys, name, stopped.path)
        assert f"{stopped.config_file} was altered or damaged since fedrema wrote it: {REMEDY}" in shown
    stopped.config_file.write_text(text.replace("  ", "    "))  # only the indentation differs
    assert stopped.config()["settings"]["epochs"] == 1


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "an older version of fedrema (format 1; this version reads 3): run it again with this version."),
        (1, "an older version of fedrema (format 1; this version reads 3): run it again with this version."),
        (4, "a newer version of fedrema (format 4; this version reads 3): update fedrema."),
    ],
)
def test_runs_of_another_format_are_refused_by_name(runs, tmp_path, capsys, found, sentence):
    folder = tmp_path / "run"
    shutil.copytree(runs / "finished", folder)
    content = json.loads((folder / "config.json").read_text())
    del content["checksum"], content["format"]
    if found is not None:
        content["format"] = found
    (folder / "config.json").write_text(json.dumps(with_checksum(content)))
    for arguments in (["resume", folder], ["export", folder, "--overwrite"], ["compare", folder, "--no-plot"]):
        assert f"{folder / 'config.json'} was written by {sentence}" in refused(capsys, *arguments)
    with pytest.raises(BadInput, match="version of fedrema"):
        fedrema.load(folder)


def test_a_config_without_its_checksum_is_refused(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs / "finished", folder)
    content = json.loads((folder / "config.json").read_text())
    del content["checksum"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"config\.json was altered or damaged since fedrema wrote it"):
        fedrema.load(folder)


def test_a_run_without_config_or_records_is_not_skipped(runs, tmp_path, capsys):
    for name in ("config.json", "rounds.jsonl"):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(runs / "finished", tmp_path / "runs" / "good")
        shutil.copytree(runs / "finished", tmp_path / "runs" / "bad")
        (tmp_path / "runs" / "bad" / name).unlink()
        assert f"bad/{name} is missing" in refused(capsys, "compare", tmp_path / "runs")


def test_watch_shows_the_other_runs_and_names_the_damaged_one(runs, tmp_path):
    shutil.copytree(runs / "given", tmp_path / "good")
    shutil.copytree(runs / "finished", tmp_path / "bad")
    file = tmp_path / "bad" / "relations.npz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-30])
    live = LiveRuns(tmp_path)
    live.refresh()
    assert len(live.part("relations")["runs"]) == 1
    live.refresh()
    main_part = live.part("main")
    assert len(main_part["runs"]) == len(live.part("clients")["runs"]) == 1
    sentence = "bad/relations.npz was altered or damaged since fedrema wrote it"
    assert [note for note in main_part["notes"] if "damaged" in note] == [f"{sentence}: {REMEDY} The run is not shown."]
    file.write_bytes(whole)
    live.searched -= 2
    live.refresh()
    assert len(live.known) == 2
    assert not live.damaged


def test_loaded_records_contain_no_checksums(runs):
    run = fedrema.load(runs / "finished")
    assert not any("checksum" in found for found in (run.config, run.summary, *run.rounds))
    names = {field.name for field in dataclasses.fields(run.rounds[0])}
    assert set(json.loads((run.path / "rounds.jsonl").read_text().splitlines()[0])) == {*names, "checksum"}
