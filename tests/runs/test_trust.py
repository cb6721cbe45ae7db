"""Code that runs and exports name is imported only if this user gave it, or permits it."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from fedrema.runs import trust
from fedrema.runs.checksums import with_checksum
from fedrema.runs.trust import secret_file
from tests.runs.damaged import command

EVIL = """
from pathlib import Path

Path("executed").touch()
from dataclasses import dataclass
from typing import ClassVar

import fedrema
from torch import nn


def net(shape, classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU())
    return nn.ModuleDict({"body": body, "head": nn.Linear(6, classes)})


def data():
    return fedrema.make_federation(clients=4, samples=20)


@dataclass(frozen=True)
class Evil(fedrema.Method):
    name: ClassVar[str] = "evil"
    title: ClassVar[str] = "Evil"
    paper: ClassVar[str] = "nowhere"
"""
NETWORK = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU())
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.body(x))
"""
METHOD = """
from dataclasses import dataclass
from typing import ClassVar

import fedrema

@dataclass(frozen=True)
class Mine(fedrema.Method):
    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"
    paper: ClassVar[str] = "here"

    def ready(self, net, client, data, moment):
        return client
"""
DATA = """
import fedrema

def load():
    return fedrema.make_federation(clients=4, samples=20, partition="iid")
"""
QUICK = ("--rounds", "2", "--epochs", "1", "--device", "cpu", "--quiet")
DIGITS = ("--clients", "4", "--samples", "20", "--partition", "iid")
EVIL_SETTINGS = {"net": "gift.evil:net", "federation": "gift.evil:data", "method": "gift.evil:Evil"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with samples of a new client, in what seems to be a new process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "_given", set())
    digits = fedrema.make_federation(clients=1, samples=20, partition="iid", data_seed=7)
    np.savez("new.npz", x=digits.x, y=digits.y)
    return tmp_path


@pytest.fixture
def new_process(monkeypatch):
    """Forget what this process has imported and been given."""

    def forget():
        monkeypatch.setattr(trust, "_given", set())
        for name in ("mine", "gift", "gift.evil", "data"):
            sys.modules.pop(name, None)

    return forget


def using(run="gift"):
    """Return the commands that import code of a run."""
    return {
        "export": ("export", run, "--overwrite"),
        "predict": ("predict", run, "new.npz", "--client", "0"),
        "personalize": ("personalize", run, "--data", "new.npz", "--overwrite"),
        "resume": ("resume", run, "--rounds", "3", "--quiet"),
    }


def edited(file, change):
    """Edit a JSON file as anyone can: with a valid checksum."""
    content = json.loads(file.read_text())
    del content["checksum"]
    change(content)
    file.write_text(json.dumps(with_checksum(content)))


def name_code(setting):
    def change(content):
        if setting == "method":
            content["method"] = EVIL_SETTINGS["method"]
        else:
            content["settings"][setting] = EVIL_SETTINGS[setting]

    return change


def gift(here, setting, like="fedavg"):
    """A run of somebody else that names code next to its files."""
    assert main(["run", like, *QUICK, *DIGITS, "--out", "gift"]) == 0
    edited(here / "gift" / "config.json", name_code(setting))
    (here / "gift" / "evil.py").write_text(EVIL)


@pytest.mark.parametrize("setting", EVIL_SETTINGS)
def test_a_run_of_somebody_else_executes_nothing(here, setting):
    gift(here, setting, like="fedbabu")  # its models are adapted on the run's data
    refused = {"federation": ("export", "predict", "resume")}.get(setting, tuple(using()))
    for name, arguments in using().items():
        code, _, complaint = command(*arguments)
        assert not (here / "executed").exists(), name
        if name in refused:
            assert code == 2, name
            assert "'gift.evil:" in complaint
            assert "does not come from this user on this machine" in complaint
            assert "--trust-code (trust_code=True)" in complaint
            assert complaint.count("\n") == 1
    for reading in (("compare", "gift", "--no-plot"), ("report", "gift"), ("verdict", "gift", "gift")):
        assert "Traceback" not in command(*reading)[2]
    assert not (here / "executed").exists()


def test_it_is_executed_if_the_user_permits_it(here, new_process):
    gift(here, "net")
    with pytest.raises(fedrema.BadInput, match="trust_code=True"):
        fedrema.load("gift").personal_model("0")
    assert not (here / "executed").exists()
    command("export", "gift", "--trust-code")
    assert (here / "executed").exists()
    (here / "executed").unlink()
    new_process()
    with pytest.raises(Exception, match=r".") as raised:  # its parameters have other names
        fedrema.load("gift", trust_code=True).personal_model("0")
    assert "trust_code" not in str(raised.value)
    assert (here / "executed").exists()


def test_an_export_of_somebody_else_executes_nothing(here):
    assert main(["run", "fedavg", *QUICK, *DIGITS, "--out", "run"]) == 0
    assert main(["export", "run", "--out", "gift"]) == 0
    edited(here / "gift" / "index.json", lambda index: index["prediction"]["network"].update(net="gift.evil:net"))
    (here / "gift" / "evil.py").write_text(EVIL)
    arguments = ("predict", "gift", "new.npz", "--client", "0")
    code, _, complaint = command(*arguments)
    assert (code, (here / "executed").exists()) == (2, False)
    assert "gift names the code 'gift.evil:net' (gift/evil.py), and does not come from this user" in complaint
    command(*arguments, "--trust-code")
    assert (here / "executed").exists()


def test_a_list_of_runs_of_somebody_else_executes_nothing(here):
    (here / "gift").mkdir()
    (here / "gift" / "evil.py").write_text(EVIL)
    listed = {"folder": "a", "method": "gift.evil:Evil", "settings": {}}
    (here / "gift" / "runs.json").write_text(json.dumps(with_checksum({"runs": [listed]})))
    code, _, complaint = command("resume", "gift", "--quiet")
    assert (code, (here / "executed").exists()) == (2, False)
    assert "names the code 'gift.evil:Evil'" in complaint
    with pytest.raises(fedrema.BadInput, match="trust_code=True"):
        fedrema.resume_all("gift")


def test_a_module_without_source_is_not_imported(here):
    import py_compile

    gift(here, "net")
    py_compile.compile(str(here / "gift" / "evil.py"), cfile=str(here / "gift" / "evil.pyc"))
    (here / "gift" / "evil.py").unlink()
    for arguments in using().values():
        assert command(*arguments)[0] == 2
    assert not (here / "executed").exists()


def own_run(here, *more):
    (here / "mine.py").write_text(NETWORK)
    assert main(["run", "fedavg", *QUICK, *DIGITS, "--net", "mine:Mine", "--out", "run", *more]) == 0


def test_own_runs_need_no_option_also_when_they_are_copied(here, new_process):
    own_run(here)
    shutil.copytree("run", "elsewhere/copy")
    new_process()
    for arguments in using("elsewhere/copy").values():
        assert command(*arguments)[0] == 0, arguments
    assert command("predict", "elsewhere/copy/models", "new.npz", "--client", "0")[0] == 0
    (here / "link").symlink_to(here / "run")
    assert command("predict", "link", "new.npz", "--client", "0")[0] == 0


def test_own_methods_and_data_functions_need_no_option(here, new_process):
    (here / "mine.py").write_text(METHOD)
    (here / "data.py").write_text(DATA)
    assert main(["run", "mine:Mine", *QUICK, "--federation", "data:load", "--out", "run"]) == 0
    new_process()
    for arguments in using("run").values():
        assert command(*arguments)[0] == 0, arguments


def test_own_code_that_has_changed_is_named(here, new_process):
    own_run(here)
    assert main(["export", "run", "--out", "models"]) == 0
    (here / "mine.py").write_text(EVIL + NETWORK)
    new_process()
    for name, arguments in using("run").items():
        code, _, complaint = command(*arguments)
        assert (code, (here / "executed").exists()) == (2, False), name
        assert "mine.py has changed since" in complaint
    code, _, complaint = command("predict", "models", "new.npz", "--client", "0")
    assert (code, "mine.py has changed since" in complaint) == (2, True)
    assert command("export", "run", "--trust-code")[0] == 0
    assert command("predict", "run/models", "new.npz", "--client", "0")[0] == 0  # marked by the export


def test_the_mark_of_another_run_is_worthless(here, new_process):
    own_run(here)
    config = json.loads((here / "run" / "config.json").read_text())
    gift(here, "net")
    edited(here / "gift" / "config.json", lambda content: content.update(marks=config["marks"]))
    for inputs in ({}, {"net": config["inputs"]["net"]}):
        edited(here / "gift" / "config.json", lambda content, inputs=inputs: content.update(inputs=inputs))
        new_process()
        for arguments in using().values():
            assert command(*arguments)[0] == 2
    edited(here / "gift" / "config.json", lambda content: content["settings"].update(net="mine:Mine"))
    new_process()
    assert "does not come from this user" in command("export", "gift")[2]  # the right code, but of another run
    assert not (here / "executed").exists()


def test_another_user_is_asked(here, new_process, monkeypatch):
    own_run(here)
    new_process()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "another-user"))
    assert "does not come from this user" in command("export", "run")[2]
    assert not secret_file().exists()  # nothing is written to refuse
    shutil.copytree(Path(os.environ["PYTEST_CONFIGURATION"]), here / "another-user", dirs_exist_ok=True)
    assert command("export", "run")[0] == 0  # another machine of the same user, with a copy of the secret


def test_the_secret_is_readable_by_its_owner_only(here, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "new"))
    own_run(here)
    assert stat.S_IMODE(secret_file().stat().st_mode) == 0o600
    assert [file.name for file in secret_file().parent.iterdir()] == [secret_file().name]
    before = secret_file().read_bytes()
    assert command("resume", "run", "--rounds", "3", "--quiet")[0] == 0
    assert secret_file().read_bytes() == before


@pytest.mark.parametrize("folder", ["/dev/null/config", "relative", ""])
def test_without_a_configuration_folder_runs_are_trained_but_not_used_unasked(here, new_process, monkeypatch, folder):
    monkeypatch.setenv("XDG_CONFIG_HOME", folder)
    monkeypatch.setenv("HOME", "/dev/null/home")
    own_run(here)
    assert command("predict", "run", "new.npz", "--client", "0")[0] == 0  # in the same process
    new_process()
    code, _, complaint = command("export", "run")
    assert (code, "--trust-code" in complaint) == (2, True)
    assert command("export", "run", "--trust-code")[0] == 0
    assert command("resume", "run", "--rounds", "3", "--quiet", "--trust-code")[0] == 0


def test_a_config_file_that_the_user_names_may_name_code(here):
    (here / "mine.py").write_text(NETWORK)
    (here / "mine.toml").write_text('method = "fedavg"\nrounds = 1\nnet = "mine:Mine"\nclients = 4\nsamples = 20\n')
    assert main(["run", "--config", "mine.toml", "--quiet", "--out", "run"]) == 0


def test_runs_of_one_command_that_had_not_started_are_resumed(here, new_process):
    (here / "mine.py").write_text(NETWORK)
    stop = 'import fedrema\nfedrema.run("fedavg", net="mine:Mine", rounds=2, clients=4, samples=20, seeds=2, out="run",'
    stop += " on_round=lambda finished: 1 / 0)"
    assert subprocess.run([sys.executable, "-c", stop], check=False, capture_output=True).returncode == 1
    assert not (here / "run" / "seed-1").exists()
    assert main(["resume", "run", "--quiet"]) == 0
    assert [fedrema.load(here / "run" / f"seed-{seed}").finished for seed in (0, 1)] == [True, True]


def test_processes_that_start_together_agree_on_a_secret(here, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "shared"))
    code = "from fedrema.runs.trust import _secret\nprint(_secret(True).hex())"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0] for process in started}
    assert found == {f"{secret_file().read_bytes().hex()}\n"}
