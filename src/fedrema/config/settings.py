"""A run's settings: documented dataclass fields, and how they are built from defaults, presets, files and values.

The command line, its help, configuration files, presets, a run's config.json and the Python functions all use the
dataclasses here, in `core`, `data` and `models`, and in the method.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrema.base.files import regular_file
from fedrema.base.options import Purpose, option, purpose_of
from fedrema.config.presets import (
    OWN_DATA,
    PRESETS,
    PlainValue,
    Value,
    Values,
    data_defaults,
    training_defaults,
    training_for,
)
from fedrema.config.values import WrongValue, convert, field_types, listed
from fedrema.core import LocalTraining, Method, Simulation
from fedrema.core.options import kind_of_device
from fedrema.data import DataSettings, Federation
from fedrema.errors import BadInput, at_least, describe
from fedrema.methods import find_method
from fedrema.models.networks import Network

MOST_SEEDS = 10_000
TRACKERS = ("tensorboard", "mlflow", "wandb")


@dataclasses.dataclass(frozen=True)
class Output:
    """Where settings come from, and what is written and shown."""

    out: Path | None = option(None, Purpose.OUTPUT)
    """Folder of the run. Default: a new folder in runs/."""
    overwrite: bool = option(False, Purpose.OUTPUT)
    """Replace the run in --out, if there is one."""
    checkpoint_every: int = option(0, Purpose.OUTPUT)
    """Save a checkpoint every N rounds; 0 saves once a minute. The last round, Ctrl-C and SIGTERM always save one."""
    seeds: int = option(1, Purpose.OUTPUT)
    """Repeat the run with N training seeds, starting from --seed; each run gets its own subfolder."""
    config: Path | None = option(None, Purpose.OUTPUT)
    """TOML file with any of these settings, by their option names; options override it."""
    paper: str | None = option(None, Purpose.OUTPUT)
    """Settings of one of the paper's experiments, such as table1-cifar10; `fedrema methods --paper` lists them."""
    tuned: Path | None = option(None, Purpose.OUTPUT)
    """TOML file with settings by dataset and method, as a sweep writes it; --config and options override it."""
    quiet: bool = option(False, Purpose.OUTPUT)
    """Show no progress and no results, and write no report."""
    open: bool = option(False, Purpose.OUTPUT)
    """Open the report in the browser at the end."""
    track: str | None = option(None, Purpose.OUTPUT)
    """Log to experiment trackers as well: tensorboard, mlflow or wandb; separate several with commas."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "checkpoint_every")
        at_least(1, self, "seeds")
        if self.seeds > MOST_SEEDS:
            raise BadInput(f"--seeds must be at most {MOST_SEEDS}, got {self.seeds}.")
        unknown = [name for name in self.trackers if name not in TRACKERS]
        if unknown:
            raise BadInput(f"--track {unknown[0]!r} is unknown; valid are {', '.join(TRACKERS)}.")
        if self.open and self.quiet:
            raise BadInput("--open needs a report, and --quiet writes none: give one of them.")

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the experiment trackers."""
        return tuple(name.strip() for name in self.track.split(",")) if self.track else ()

    @property
    def folder(self) -> Path:
        """Folder of the run, once it has been chosen."""
        assert self.out is not None
        return self.out


RUN_OPTIONS: Mapping[str, type[Any]] = {
    "data": DataSettings, "network": Network, "local": LocalTraining, "simulation": Simulation, "output": Output
}  # fmt: skip
"""The settings classes of every run, except its method, by their names in `Settings`."""


def _run_fields() -> "list[dataclasses.Field[Any]]":
    return [field for group in RUN_OPTIONS.values() for field in dataclasses.fields(group)]


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    method: Method
    data: DataSettings
    network: Network
    local: LocalTraining
    simulation: Simulation
    output: Output

    def placed(self, folder: Path) -> "Settings":
        """Return the same settings for a run in this folder."""
        return dataclasses.replace(self, output=dataclasses.replace(self.output, out=folder))

    def seeded(self, seed: int) -> "Settings":
        """Return the same settings with another training seed."""
        return dataclasses.replace(self, simulation=dataclasses.replace(self.simulation, seed=seed))

    def flat(self) -> dict[str, PlainValue]:
        """Return all settings by name, as on the command line; paths as text."""
        return self.values_for(*Purpose)

    @staticmethod
    def names(*purposes: Purpose) -> frozenset[str]:
        """Return the names, as on the command line, of the settings that every run has for these purposes."""
        return frozenset(_dashed(field.name) for field in _run_fields() if purpose_of(field) in purposes)

    def values_for(self, *purposes: Purpose) -> dict[str, PlainValue]:
        """Return the settings that have these purposes, by name; those of the method define results."""
        groups = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return {
            _dashed(field.name): _plain(getattr(group, field.name))
            for group in groups
            for field in dataclasses.fields(group)
            if purpose_of(field) in purposes
        }

    def identifying(self, *purposes: Purpose) -> dict[str, PlainValue]:
        """Return the settings for identities and keys: without those that were added later and have their defaults."""
        left_out = self.added_defaults()
        return {name: value for name, value in self.values_for(*purposes).items() if name not in left_out}

    def added_defaults(self) -> frozenset[str]:
        """Return the names of the settings that were added later and have their defaults."""
        fields = (*_run_fields(), *dataclasses.fields(self.method))
        added = {_dashed(field.name): field.default for field in fields if field.metadata.get("added")}
        return frozenset(name for name, value in self.flat().items() if name in added and value == added[name])

    def described(self) -> dict[str, PlainValue]:
        """Return the settings that apply, by name: with own data, not those that partition a dataset."""
        if self.data.is_partitioned:
            return self.flat()
        unused = {_dashed(field.name) for field in dataclasses.fields(DataSettings) if field.metadata.get("partitions")}
        unused -= {"dataset"} if self.data.federation is None else set()
        return {name: value for name, value in self.flat().items() if name not in unused | {"partition-file"}}

    def for_columns(self, federation: Federation) -> "Settings":
        """Return the same settings with the embeddings that the columns of the federation's table need."""
        rules = federation.preprocessing
        if rules is None or not any(rules.cardinalities) or self.network.embed or ":" in self.network.net:
            return self
        embed = ",".join(map(str, rules.cardinalities))
        return dataclasses.replace(self, network=dataclasses.replace(self.network, embed=embed))

    def fitted(self, federation: Federation | None, integers: bool = False) -> "Settings":
        """Return the same settings with batch and learning rate chosen from the data, where they are 0.

        `integers`: the inputs are indices into an embedding, so that their scale does not affect the learning rate.
        Without the data, which the server of a deployment never sees, the batch is left for each node to choose.
        """
        if self.local.batch and self.local.lr:
            return self
        samples = None if federation is None else federation.median_train_count
        # Category codes are embedded, and the other columns are standardised.
        coded = integers or bool(self.network.embed)
        scale = 1.0 if federation is None or coded else federation.input_scale
        chosen = training_for(samples, scale)
        batch, lr = self.local.batch or int(chosen.get("batch", 0)), self.local.lr or chosen["lr"]
        return dataclasses.replace(self, local=dataclasses.replace(self.local, batch=batch, lr=lr))


def make_settings(
    method: str | Method,
    values: Values,
    where: str = "",
    plain: bool = False,
    among: Sequence[str] = (),
    deployed: bool = False,
) -> Settings:
    """Build the settings of a run, with the precision that `auto` means on its device.

    Parameters
    ----------
    method
        Its name, or an instance, which then holds the method's own settings.
    values
        Settings by name, with - or _; None means the default. `paper`, `tuned` and `config` name further
        sources. Sources in ascending priority: the defaults of the dataset or of own data, `paper`, `tuned`, `config`,
        `values`.
    where
        What the values are, for error messages: `fedrema.run`.
    plain
        Start from the defaults of the dataclasses instead of those of the dataset or of own data.
    among
        Names of several methods that the values are meant for: settings that only others of them have are ignored.
    deployed
        Whether several machines compute the run, perhaps on different devices: `auto` is then float32 on all of them.
    """
    kind = find_method(method) if isinstance(method, str) else type(method)
    name = method if isinstance(method, str) else kind.name
    groups = dict(settings_classes(kind))
    given = _named(values)
    layers = _layers_below(name, given, plain)
    own = {_dashed(field.name) for field in dataclasses.fields(kind)}
    if isinstance(method, Method):
        del groups["method"]
        layers = [(source, {key: layer[key] for key in layer if key not in own}) for source, layer in layers]
    known = {_dashed(field.name) for group in groups.values() for field in dataclasses.fields(group)}
    others = {_dashed(field.name) for each in among for field in dataclasses.fields(find_method(each))}
    merged: dict[str, tuple[Any, str]] = {}
    for source, layer in [*layers, (where, given)]:
        for key in layer:
            if key not in known | others:
                raise BadInput(_unknown(key, known | others, among or (name,), source))
        merged |= {key: (value, source) for key, value in layer.items() if key in known}
    made = {group: _filled(owner, merged) for group, owner in groups.items()}
    if isinstance(method, Method):
        made["method"] = method
    made["data"] = made["data"].without_unused()
    # Results depend on the precision, so identities and keys are made of the effective one.
    simulation: Simulation = made["simulation"]
    made["simulation"] = simulation.with_effective_precision("cpu" if deployed else kind_of_device(simulation.device))
    return Settings(**made)


def make_data_settings(values: Values, where: str = "") -> DataSettings:
    """Build the settings of the data alone, starting from the defaults of the dataset."""
    given = _named(values)
    defaults = {} if given.get("federation") else data_defaults(str(given.get("dataset") or "digits"))
    known = {_dashed(field.name) for field in dataclasses.fields(DataSettings)}
    for key in given:
        if key not in known:
            raise BadInput(_unknown(key, known, (), where))
    made: DataSettings = _filled(DataSettings, {key: (value, where) for key, value in {**defaults, **given}.items()})
    return made


def default_values(method: str, values: Values) -> dict[str, Value]:
    """Return the defaults of settings that `values` does not contain, if they differ from those of the dataclasses."""
    found: dict[str, Value] = {}
    for _, layer in _layers_below(method, _named(values), plain=False):
        found |= layer
    return found


def settings_classes(method: type[Method]) -> Mapping[str, type[Any]]:
    """Return the settings classes of a run with this method, by their names in `Settings`."""
    common = {field.name for field in _run_fields()}
    for field in dataclasses.fields(method):
        if field.name in common:
            raise BadInput(
                f"Method {method.name!r} has a setting {field.name!r}, but every run has one of that name: rename it."
            )
    return {"method": method, **RUN_OPTIONS}


def _layers_below(method: str, given: Values, plain: bool) -> list[tuple[str, Values]]:
    """Return the sources of settings that `given` overrides, in ascending priority, each with its name."""
    layers: list[tuple[str, Values]] = []
    if (paper := given.get("paper")) is not None:
        if paper not in PRESETS:
            raise BadInput(f"--paper {paper!r} is unknown; valid are {', '.join(PRESETS)}.")
        layers.append((f"--paper {paper}", PRESETS[paper].values(method)))
    from_config: dict[str, Value] = {}
    if (config := given.get("config")) is not None:
        from_config = {**_named(read_config(Path(str(config))))}
        from_config.pop("method", None)
    if (tuned := given.get("tuned")) is not None:
        data = _data_of([*(layer for _, layer in layers), from_config, given])
        layers.append((f"--tuned {tuned}", _named(read_tuned(Path(str(tuned)), data[1], method))))
    layers.append((f"--config {config}", from_config))
    if plain:
        return layers
    own_data, dataset = _data_of([*(layer for _, layer in layers), given])
    defaults = OWN_DATA if own_data else {**data_defaults(dataset), **training_defaults(dataset)}
    return [("defaults", defaults), *layers]


def _data_of(layers: Sequence[Values]) -> tuple[bool, str]:
    """Return whether settings name own data, and the name of the data."""
    merged: dict[str, Value] = {}
    for layer in layers:
        merged |= layer
    for name in ("federation", "dataset"):
        if not isinstance(value := merged.get(name), str | Path | None):
            raise BadInput(f"{name} must be text, got {describe(value)}.")
    if (federation := merged.get("federation")) is not None:
        return True, str(federation)
    return False, str(merged.get("dataset") or "digits")


def _unknown(key: str, known: set[str], methods: Sequence[str], where: str) -> str:
    # With underscores: valid in Python as well as in files.
    close = [name.replace("-", "_") for name in difflib.get_close_matches(key, known, n=2)]
    of = f" of {listed(methods)}" if methods else ""
    everything = f"fedrema run {methods[0]} --help-all lists" if methods else "fedrema partition --help lists"
    hint = f"perhaps you meant {listed(close)}" if close else f"{everything} what is valid"
    return f"{_prefix(where)}{key.replace('-', '_')!r} is not a setting{of}; {hint}."


def _filled(kind: type[Any], values: Mapping[str, tuple[Any, str]]) -> Any:
    """Return an instance of a settings class from those of the values, each with its source, that are its fields."""
    types = field_types(kind)
    found = {}
    for field in dataclasses.fields(kind):
        if (given := values.get(_dashed(field.name))) is None:
            continue
        value, where = given
        try:
            found[field.name] = convert(value, types[field.name])
        except WrongValue as valid:
            raise BadInput(f"{_prefix(where)}{field.name} must be {valid}, got {describe(value)}.") from None
    return kind(**found)


def read_config(file: Path) -> Values:
    """Read a TOML file of settings; `method` may be among them."""
    return read_toml(file, "--config")


def read_tuned(file: Path, dataset: str, method: str) -> Values:
    """Read the settings of one method on one dataset from the table [DATASET.METHOD] of a TOML file."""
    content = read_toml(file, "--tuned")
    found = content.get(dataset, {}).get(method) if isinstance(content.get(dataset, {}), dict) else None
    if not isinstance(found, dict):
        known = [f"{data}.{name}" for data, methods in content.items() if isinstance(methods, dict) for name in methods]
        raise BadInput(f"--tuned {file} has no settings for {dataset}.{method}; it has {', '.join(known) or 'none'}.")
    return found


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """Read a TOML file; an error message begins with what it was read as."""
    try:
        return tomllib.loads(regular_file(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{what} {file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise BadInput(f"{what} {file} is not valid TOML: {error}.") from error


def _named(values: Values) -> dict[str, Value]:
    """Return values by their names on the command line; None means not given."""
    return {_dashed(name): value for name, value in values.items() if value is not None}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
