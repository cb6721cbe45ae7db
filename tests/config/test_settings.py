"""Settings from arguments, files and presets: one way, and one sentence where it does not fit."""

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest

from fedrema.base.options import field_documentation
from fedrema.config.presets import PRESETS
from fedrema.config.settings import Output, as_arguments, parse_settings
from fedrema.core import LocalTraining, Method, Simulation
from fedrema.data import DataSettings, Federation
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.models.networks import Network


def test_arguments_override_a_file_which_overrides_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.5\nbatch = 7\nkeep_momentum = false\nout = "somewhere"\n')
    settings = parse_settings("fedavg", ["--paper", "table2-s0.4", "--config", str(file), "--batch", "9"])
    assert settings.local.batch == 9
    assert settings.local.lr == 0.5
    assert settings.local.keep_momentum is False
    assert settings.data.samples == 100
    assert settings.data.s == 0.4
    assert settings.simulation.rounds == 500


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_papers_settings(name):
    settings = parse_settings("fedrema", ["--paper", name])
    assert (settings.data.clients, settings.data.groups, settings.data.test_share) == (20, 5, 0.2)
    assert (settings.local.lr, settings.local.momentum, settings.local.clip) == (0.01, 0.9, 10)
    assert (settings.local.epochs, settings.local.batch, settings.local.weight_decay) == (5, 100, 0)
    assert settings.local.keep_momentum
    assert settings.simulation.rounds == 500
    assert settings.data.samples == (100 if name.startswith("table2") else 600)
    if name.startswith("table1"):
        assert settings.data.dataset == name.removeprefix("table1-")
    if name.startswith("table3"):
        assert str(settings.method.delta) == name.removeprefix("table3-delta")


def test_each_dataset_has_defaults_of_its_own():
    assert parse_settings("local", []).data.samples == 60
    assert parse_settings("local", ["--dataset", "mnist"]).data.samples == 600
    assert parse_settings("local", ["--dataset=cifar10"]).local.batch == 100


@pytest.mark.parametrize("name", registry())
def test_what_is_written_to_config_json_reads_back_as_the_same_settings(name):
    arguments = ["--lr", "0.3", "--no-keep-momentum", "--head", "fc", "--data-dir", "a b", "--late", "0.1"]
    settings = parse_settings(name, arguments)
    written = json.loads(json.dumps(settings.flat()))
    assert parse_settings(name, as_arguments(written)) == settings


def test_no_two_settings_share_a_name():
    groups = [DataSettings, Network, LocalTraining, Simulation, Output]
    for kind in registry().values():
        names = [field.name for group in (kind, *groups) for field in dataclasses.fields(group)]
        assert len(names) == len(set(names)), kind


@pytest.mark.parametrize("kind", [DataSettings, Network, LocalTraining, Simulation, Output])
def test_every_setting_is_documented(kind):
    for name, (_, meaning) in field_documentation(kind).items():
        assert len(meaning) > 10, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learning-rate", "1"], "Unrecognized options: --learning-rate, 1"),
        (["--lrr", "1"], "perhaps you meant --lr"),
        (["--lr", "fast"], "--lr: could not convert string to float: 'fast'"),
        (["--backend", "warp"], "invalid choice 'warp'"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--participation", "0"], "--participation must lie in (0, 1], got 0.0"),
        (["--participation", "1.5"], "--participation must lie in (0, 1], got 1.5"),
        (["--dropout", "1"], "--dropout must lie in [0, 1), got 1.0"),
        (["--late", "-0.1"], "--late must lie in [0, 1), got -0.1"),
        (["--momentum", "1"], "--momentum must lie in [0, 1), got 1.0"),
        (["--lr", "nan"], "--lr must be 0 or more, got nan"),
        (["--clip", "-1"], "--clip must be 0 or more, got -1.0"),
        (["--batch", "-1"], "--batch must be 0 or more, got -1"),
        (["--lr-decay", "2"], "--lr-decay must lie in (0, 1], got 2.0"),
        (["--hidden", "0"], "--hidden must be at least 1, got 0"),
        (["--checkpoint-every", "-1"], "--checkpoint-every must be 0 or more, got -1"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--s", "1.5"], "--s 1.5 is outside 0 to 1"),
        (["--paper", "table9"], "--paper 'table9' is unknown; valid are table1-mnist"),
        (["--config", "missing.toml"], "--config missing.toml cannot be read: No such file"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments, words):
    with pytest.raises(BadInput) as caught:
        parse_settings("fedavg", arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_mistakes(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("lr = = 1")
    with pytest.raises(BadInput, match="is not valid TOML"):
        parse_settings("fedavg", ["--config", str(file)])
    file.write_text("lr = [1, 2]")
    with pytest.raises(BadInput, match=r"'lr' must be a number, a text or true/false, got \[1, 2\]"):
        parse_settings("fedavg", ["--config", str(file)])
    file.write_text("delta = 0.5")
    with pytest.raises(BadInput, match="Unrecognized options: --delta"):
        parse_settings("fedavg", ["--config", str(file)])


def test_an_unknown_method_names_the_known():
    with pytest.raises(BadInput, match="Method 'fedmagic' is unknown; valid are apfl, creff, ditto, fedala"):
        parse_settings("fedmagic", [])


def test_ones_own_method_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "own_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "import fedrema\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(fedrema.Method):\n"
        '    """Mine."""\n'
        '    name: ClassVar[str] = "mine"\n'
        '    title: ClassVar[str] = "Mine"\n'
        '    paper: ClassVar[str] = "none yet"\n'
        "    strength: float = 2.0\n"
        '    """How strong."""\n\n'
        "NotAMethod = int\n"
    )
    monkeypatch.chdir(tmp_path)
    assert parse_settings("own_method:Mine", ["--strength", "3"]).method.strength == 3.0
    with pytest.raises(BadInput, match="must be a class derived from fedrema"):
        parse_settings("own_method:NotAMethod", [])
    with pytest.raises(BadInput, match="has no 'Missing'"):
        parse_settings("own_method:Missing", [])
    with pytest.raises(BadInput, match="No module named 'nowhere'"):
        parse_settings("nowhere:Mine", [])
    with pytest.raises(BadInput, match="must have the form module:name"):
        parse_settings(":Mine", [])


def test_a_method_whose_setting_every_run_has_already_is_refused(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Clashing(Method):
        name: ClassVar[str] = "clashing"
        title: ClassVar[str] = "Clashing"
        paper: ClassVar[str] = "none"
        rounds: int = 3

    monkeypatch.setattr("fedrema.config.settings.find_method", lambda name: Clashing)
    with pytest.raises(BadInput, match="Method 'clashing' has a setting 'rounds', but every run has one"):
        parse_settings("clashing", [])


def test_own_data_has_one_set_of_defaults_whatever_command_names_it():
    settings = parse_settings("fedavg", ["--federation", "mine.npz"])
    assert (settings.local.batch, settings.local.lr, settings.data.test_share) == (0, 0.0, 0.2)
    assert settings.local.drop_incomplete is False


@pytest.mark.parametrize(
    ("samples", "batch"), [(3, 10), (138, 10), (480, 24), (1999, 99), (4000, 100), (1_000_000, 100)]
)
def test_batch_and_learning_rate_follow_from_the_number_of_samples(samples, batch):
    client = np.repeat(["a", "b", "c"], [1, samples + 1, 2 * samples])  # the median client has one test sample
    split = np.arange(len(client)) == 1
    federation = Federation.from_arrays(np.zeros((len(client), 1)), np.arange(len(client)) % 2, client, split)
    local = parse_settings("fedavg", ["--federation", "mine.npz"]).fitted(federation).local
    assert (local.batch, local.lr) == (batch, 0.02)
    large = dataclasses.replace(federation, x=federation.x + np.float32(16))
    assert parse_settings("fedavg", ["--federation", "mine.npz"]).fitted(large).local.lr == 0.0013
    given = parse_settings("fedavg", ["--federation", "mine.npz", "--batch", "7", "--lr", "0.3"])
    assert given.fitted(federation) is given


@pytest.mark.parametrize("arguments", [[], ["--dataset", "cifar10"], ["--paper", "table1-mnist"]])
def test_datasets_and_presets_keep_their_values(arguments):
    settings = parse_settings("fedavg", arguments)
    digits = not arguments
    assert (settings.local.batch, settings.local.lr) == ((10, 0.05) if digits else (100, 0.01))
    assert settings.data.test_share == (0.5 if digits else 0.2)
    assert settings.local.drop_incomplete is True
    assert settings.fitted(None) is settings


def test_what_own_data_leaves_unused_is_neither_recorded_nor_part_of_what_a_run_is():
    plain = parse_settings("fedavg", ["--federation", "mine.npz"])
    superfluous = ["--clients", "5", "--samples", "9", "--partition", "iid", "--dataset", "mnist", "--s", "0.7"]
    assert parse_settings("fedavg", ["--federation", "mine.npz", *superfluous]) == plain
    assert not {"dataset", "partition", "partition-file", "clients", "samples", "s"} & plain.described().keys()
    assert plain.described()["federation"] == "mine.npz"
    assert parse_settings("fedavg", as_arguments(plain.described())) == plain
