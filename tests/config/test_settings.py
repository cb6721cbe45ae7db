"""Settings from values, files and presets."""

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest

from fedrema.base.options import field_documentation
from fedrema.config.presets import PRESETS
from fedrema.config.settings import Output, make_settings, read_config
from fedrema.core import LocalTraining, Method, Simulation
from fedrema.data import DataSettings, Federation
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.methods.fedprox import FedProx
from fedrema.models.networks import Network


def test_values_override_a_file_which_overrides_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.5\nbatch = 7\nkeep_momentum = false\nout = "somewhere"\n')
    settings = make_settings("fedavg", {"paper": "table2-s0.4", "config": str(file), "batch": 9})
    assert settings.local.batch == 9
    assert settings.local.lr == 0.5
    assert settings.local.keep_momentum is False
    assert settings.data.samples == 100
    assert settings.data.s == 0.4
    assert settings.simulation.rounds == 500


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_papers_settings(name):
    settings = make_settings("fedrema", {"paper": name})
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
    assert make_settings("local", {}).data.samples == 60
    assert make_settings("local", {"dataset": "mnist"}).data.samples == 600
    assert make_settings("local", {"dataset": "cifar10"}).local.batch == 100


@pytest.mark.parametrize("name", registry())
def test_settings_are_read_back_from_config_json_unchanged(name):
    values = {"lr": 0.3, "keep_momentum": False, "head": "fc", "data_dir": "a b", "late": 0.1}
    settings = make_settings(name, values)
    written = json.loads(json.dumps(settings.flat()))
    assert make_settings(name, written) == settings


def test_no_two_settings_share_a_name():
    groups = [DataSettings, Network, LocalTraining, Simulation, Output]
    for kind in registry().values():
        names = [field.name for group in (kind, *groups) for field in dataclasses.fields(group)]
        assert len(names) == len(set(names)), kind


@pytest.mark.parametrize("kind", [DataSettings, Network, LocalTraining, Simulation, Output])
def test_every_setting_is_documented(kind):
    for name, (_, meaning) in field_documentation(kind).items():
        assert len(meaning) > 10, name


def test_an_invalid_file_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    for content, words in (
        ("lr = = 1", "mine.toml is not valid TOML"),
        ("lr = [1, 2]", r"--config .*mine.toml: lr must be a number, got a value of type list of length 2\.$"),
        ("rounds = 2.5", "mine.toml: rounds must be a whole number, got 2.5"),
        ("quiet = 1", "mine.toml: quiet must be true or false, got 1"),
        ('device = "gpu"', "mine.toml: device must be auto, cpu or cuda, got 'gpu'"),
        ("delta = 0.5", "mine.toml: 'delta' is not a setting of fedavg"),
    ):
        file.write_text(content)
        with pytest.raises(BadInput, match=words):
            make_settings("fedavg", {"config": file})


def test_a_file_may_set_every_option(tmp_path):
    settings = make_settings("fedrema", {"lr": 0.3, "quiet": True, "head": "1", "seeds": 2, "delta": 0.1})
    file = tmp_path / "all.toml"
    given = {name: value for name, value in settings.flat().items() if value is not None}
    file.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items()))
    assert make_settings("fedrema", read_config(file)) == settings
    read = make_settings("fedrema", {"config": str(file)})
    assert dataclasses.replace(read, output=dataclasses.replace(read.output, config=None)) == settings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device": "gpu"}, "^device must be auto, cpu or cuda, got 'gpu'.$"),
        ({"rounds": "many"}, "^rounds must be a whole number, got 'many'.$"),
        ({"rounds": True}, "^rounds must be a whole number, got True.$"),
        ({"test_share": "half"}, "^test_share must be a number, got 'half'.$"),
        ({"keep-momentum": "no"}, "^keep_momentum must be true or false, got 'no'.$"),
        ({"out": 3}, "^out must be a path, got 3.$"),
        ({"track": ["wandb"]}, r"^track must be text, got a value of type list of length 1.$"),
        ({"round": 3}, "^'round' is not a setting of fedavg; perhaps you meant rounds or late_round.$"),
        ({"learning_rate": 3}, "^'learning_rate' is not a setting of fedavg; fedrema run fedavg --help-all lists"),
    ],
)
def test_an_invalid_value_is_refused_with_setting_value_and_valid_values(values, words):
    with pytest.raises(BadInput, match=words):
        make_settings("fedavg", values)


def test_numbers_and_booleans_may_be_text_or_numpy_scalars():
    text = {"rounds": "7", "lr": "1e-3", "keep-momentum": "false", "memory": "2"}
    settings = make_settings("fedavg", text)
    assert (settings.simulation.rounds, settings.local.lr, settings.local.keep_momentum) == (7, 0.001, False)
    assert settings.simulation.memory == 2.0
    numpy = make_settings("fedavg", {"rounds": np.int64(7), "lr": np.float32(0.5), "hidden": 10**14})
    assert (numpy.simulation.rounds, numpy.local.lr, numpy.network.hidden) == (7, 0.5, 10**14)
    assert type(numpy.simulation.rounds) is int
    assert type(make_settings("fedavg", {"lr": 1}).local.lr) is float


def test_values_are_given_to_the_methods_that_have_the_setting(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("delta = 0.3")
    methods = ("fedavg", "fedprox", "fedrema")
    values = {"mu": 0.25, "config": file}
    made = {name: make_settings(name, values, among=methods).flat() for name in methods}
    assert (made["fedprox"]["mu"], made["fedrema"]["delta"]) == (0.25, 0.3)
    assert not {"mu", "delta"} & made["fedavg"].keys()
    with pytest.raises(BadInput, match="'gamma' is not a setting of fedavg, fedprox or fedrema"):
        make_settings("fedavg", {"gamma": 1}, among=methods)


def test_an_instance_has_the_methods_settings(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("mu = 3.0\nlr = 0.25")
    settings = make_settings(FedProx(mu=0.5), {"paper": "table1-mnist", "config": file})
    assert (settings.method, settings.local.lr, settings.data.dataset) == (FedProx(mu=0.5), 0.25, "mnist")
    with pytest.raises(BadInput, match="'mu' is not a setting"):
        make_settings(FedProx(mu=0.5), {"mu": 1})


def test_an_unknown_method_is_refused_with_a_list_of_methods():
    with pytest.raises(BadInput, match="Method 'fedmagic' is unknown; valid are apfl, creff, cwfedavg, ditto, fedala"):
        make_settings("fedmagic", {})


def test_an_own_method_is_found_by_module_and_class(tmp_path, monkeypatch):
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
    assert make_settings("own_method:Mine", {"strength": 3}).method.strength == 3.0
    with pytest.raises(BadInput, match="must be a class derived from fedrema"):
        make_settings("own_method:NotAMethod", {})
    with pytest.raises(BadInput, match="has no 'Missing'"):
        make_settings("own_method:Missing", {})
    with pytest.raises(BadInput, match="No module named 'nowhere'"):
        make_settings("nowhere:Mine", {})
    with pytest.raises(BadInput, match="must have the form module:name"):
        make_settings(":Mine", {})


def test_a_method_with_the_name_of_a_common_setting_is_refused(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Clashing(Method):
        name: ClassVar[str] = "clashing"
        title: ClassVar[str] = "Clashing"
        paper: ClassVar[str] = "none"
        rounds: int = 3

    monkeypatch.setattr("fedrema.config.settings.find_method", lambda name: Clashing)
    with pytest.raises(BadInput, match="Method 'clashing' has a setting 'rounds', but every run has one"):
        make_settings("clashing", {})


def test_own_data_has_the_same_defaults_in_every_command():
    settings = make_settings("fedavg", {"federation": "mine.npz"})
    assert (settings.local.batch, settings.local.lr, settings.data.test_share) == (0, 0.0, 0.2)
    assert settings.local.drop_incomplete is False


@pytest.mark.parametrize(
    ("samples", "batch"), [(3, 10), (138, 10), (480, 24), (1999, 99), (4000, 100), (1_000_000, 100)]
)
def test_batch_and_learning_rate_depend_on_the_number_of_samples(samples, batch):
    client = np.repeat(["a", "b", "c"], [1, samples + 1, 2 * samples])  # the median client has one test sample
    split = np.arange(len(client)) == 1
    federation = Federation.from_arrays(np.zeros((len(client), 1)), np.arange(len(client)) % 2, client, split)
    local = make_settings("fedavg", {"federation": "mine.npz"}).fitted(federation).local
    assert (local.batch, local.lr) == (batch, 0.02)
    large = dataclasses.replace(federation, x=federation.x + np.float32(16))
    assert make_settings("fedavg", {"federation": "mine.npz"}).fitted(large).local.lr == 0.0013
    given = make_settings("fedavg", {"federation": "mine.npz", "batch": 7, "lr": 0.3})
    assert given.fitted(federation) is given


@pytest.mark.parametrize("values", [{}, {"dataset": "cifar10"}, {"paper": "table1-mnist"}])
def test_datasets_and_presets_keep_their_values(values):
    settings = make_settings("fedavg", values)
    digits = not values
    assert (settings.local.batch, settings.local.lr) == ((10, 0.05) if digits else (100, 0.01))
    assert settings.data.test_share == (0.5 if digits else 0.2)
    assert settings.local.drop_incomplete is True
    assert settings.fitted(None) is settings


def test_settings_that_own_data_does_not_use_are_neither_recorded_nor_part_of_the_identity():
    plain = make_settings("fedavg", {"federation": "mine.npz"})
    superfluous = {"clients": 5, "samples": 9, "partition": "iid", "dataset": "mnist", "s": 0.7}
    assert make_settings("fedavg", {"federation": "mine.npz", **superfluous}) == plain
    assert not {"dataset", "partition", "partition-file", "clients", "samples", "s"} & plain.described().keys()
    assert plain.described()["federation"] == "mine.npz"
    assert make_settings("fedavg", plain.described()) == plain
