"""Settings are declared once, as documented dataclass fields.

The command line, its help, config files, presets and a run's config.json all come from here: a config file or a
preset is nothing but arguments that stand before the user's own.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import tyro

from fedrema.base.options import Purpose, option, purpose_of
from fedrema.config.option_help import help_groups, print_help
from fedrema.config.presets import OWN_DATA, PRESETS, Values, data_defaults, training_defaults, training_for
from fedrema.core import LocalTraining, Method, Simulation
from fedrema.data import DataSettings, Federation
from fedrema.data.options import UNUSED
from fedrema.errors import BadInput, at_least
from fedrema.methods import find_method
from fedrema.models.networks import Network

CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff, tyro.conf.DisallowNone)
"""How the parser reads our dataclasses. Help stands in docstrings; to look for it in comments takes half its time."""

TRACKERS = ("tensorboard", "mlflow", "wandb")


@dataclasses.dataclass(frozen=True)
class Output:
    """What is kept, and where settings come from."""

    out: Path | None = option(None, Purpose.OUTPUT)
    """Folder of the run; default: a new one under runs/."""
    overwrite: bool = option(False, Purpose.OUTPUT)
    """Replace a run that lies in --out."""
    checkpoint_every: int = option(0, Purpose.OUTPUT)
    """Save the state every this many rounds; 0 saves once a minute. The end, Ctrl-C and SIGTERM always save."""
    seeds: int = option(1, Purpose.OUTPUT)
    """Repeat with this many training seeds: --seed, --seed + 1, …; each in a folder of its own."""
    config: Path | None = option(None, Purpose.OUTPUT)
    """TOML file with any of these settings, by their names on the command line; arguments override it."""
    paper: str | None = option(None, Purpose.OUTPUT)
    """Settings of one of the paper's experiments, such as table1-cifar10; `fedrema methods --paper` lists them."""
    tuned: Path | None = option(None, Purpose.OUTPUT)
    """TOML file with settings by dataset and method, as a sweep writes it; --config and arguments override it."""
    quiet: bool = option(False, Purpose.OUTPUT)
    """No progress bar, no table, no report."""
    open: bool = option(False, Purpose.OUTPUT)
    """Open the report in the browser at the end."""
    track: str | None = option(None, Purpose.OUTPUT)
    """Send numbers and pictures to tensorboard, mlflow or wandb as well; several with a comma between them."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        at_least(0, self, "checkpoint_every")
        at_least(1, self, "seeds")
        unknown = [name for name in self.trackers if name not in TRACKERS]
        if unknown:
            raise BadInput(f"--track {unknown[0]!r} is unknown; valid are {', '.join(TRACKERS)}.")
        if self.open and self.quiet:
            raise BadInput("--open needs a report, and --quiet writes none: give one of them.")

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of what is sent numbers."""
        return tuple(name.strip() for name in self.track.split(",")) if self.track else ()

    @property
    def folder(self) -> Path:
        """Folder of a run whose place has been decided."""
        assert self.out is not None
        return self.out


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that makes a run."""

    method: Method
    data: DataSettings
    network: Network
    local: LocalTraining
    simulation: Simulation
    output: Output

    def placed(self, folder: Path) -> "Settings":
        """Return the same for a run in this folder."""
        return dataclasses.replace(self, output=dataclasses.replace(self.output, out=folder))

    def seeded(self, seed: int) -> "Settings":
        """Return the same with another training seed."""
        return dataclasses.replace(self, simulation=dataclasses.replace(self.simulation, seed=seed))

    def flat(self) -> dict[str, Any]:
        """Return all settings under their names on the command line; paths as text."""
        groups = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return {
            field.name.replace("_", "-"): _plain(getattr(group, field.name))
            for group in groups
            for field in dataclasses.fields(group)
        }

    @staticmethod
    def names(*purposes: Purpose) -> frozenset[str]:
        """Return the names, as on the command line, of the settings that every run has for these purposes."""
        every = [field for group in COMMON.values() for field in dataclasses.fields(group)]
        return frozenset(_dashed(field.name) for field in every if purpose_of(field) in purposes)

    def values_for(self, *purposes: Purpose) -> dict[str, Any]:
        """Return the settings that have these purposes, by name; those of the method define results."""
        groups = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return {
            _dashed(field.name): _plain(getattr(group, field.name))
            for group in groups
            for field in dataclasses.fields(group)
            if purpose_of(field) in purposes
        }

    def described(self) -> dict[str, Any]:
        """Return the settings that apply, as records hold them: own data is not divided by --dataset and --clients."""
        unused = () if self.data.federation is None else (*UNUSED, "partition_file")
        names = {name.replace("_", "-") for name in unused}
        return {name: value for name, value in self.flat().items() if name not in names}

    def fitted(self, federation: Federation | None, integers: bool = False) -> "Settings":
        """Return the same with numbers for what is to be chosen from the data: --batch 0 and --lr 0.

        `integers`: the network looks the inputs up, so that their size says nothing about the learning rate.
        Without the data, which the server of a deployment never sees, each node chooses its batch.
        """
        if self.local.batch and self.local.lr:
            return self
        samples = None if federation is None else federation.median_train_count
        scale = 1.0 if federation is None or integers else federation.input_scale
        chosen = {name: value for name, value in training_for(samples, scale).items() if not getattr(self.local, name)}
        return dataclasses.replace(self, local=dataclasses.replace(self.local, **chosen))


def make_settings(method: str | Method, values: Values, where: str = "settings", plain: bool = False) -> Settings:
    """Build settings from a method, or its name, and values by name (with - or _).

    Lowest to highest: the defaults of the dataset or of own data (`plain`: those of the dataclasses), `paper`, `tuned`,
    `config`, the values themselves. A method given as an instance has its own settings, and values hold none of them.
    `where` begins the sentence about a name or value that is not valid.
    """
    kind = find_method(method) if isinstance(method, str) else type(method)
    name = method if isinstance(method, str) else kind.name
    values = _named(values)
    before: dict[str, Any] = {}
    if (paper := values.get("paper")) is not None:
        if paper not in PRESETS:
            raise BadInput(f"--paper {paper!r} is unknown; valid are {', '.join(PRESETS)}.")
        before |= PRESETS[paper].values(name)
    config, tuned = values.get("config"), values.get("tuned")
    from_config = {} if config is None else _named(read_config(Path(config)))
    from_config.pop("method", None)
    if tuned is not None:
        given_so_far = {**before, **from_config, **values}
        data = given_so_far.get("federation") or given_so_far.get("dataset") or "digits"
        before |= _named(read_tuned(Path(tuned), str(data), name))
    before |= from_config
    layered = {**before, **values}
    if not plain and layered.get("federation") is None:
        data = str(layered.get("dataset") or "digits")
        layered = {**data_defaults(data), **training_defaults(data), **layered}
    elif not plain:
        layered = {**OWN_DATA, **layered}
    groups: dict[str, type[Any]] = dict(COMMON) if isinstance(method, Method) else {"method": kind, **COMMON}
    known = {_dashed(field.name) for group in groups.values() for field in dataclasses.fields(group)}
    for unknown in (each for each in layered if each not in known):
        close = difflib.get_close_matches(unknown, known, n=2)
        hint = f"perhaps you meant {' or '.join(close)}" if close else f"valid are {', '.join(sorted(known))}"
        raise BadInput(f"{where}: {unknown!r} is not a setting of {name}; {hint}.")
    made = {group: _filled(owner, layered, where) for group, owner in groups.items()}
    if isinstance(method, Method):
        made["method"] = method
    made["data"] = made["data"].without_unused()
    return Settings(**made)


def _named(values: Values) -> dict[str, Any]:
    """Return values under their names on the command line; None means not given."""
    return {_dashed(name): value for name, value in values.items() if value is not None}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _filled(kind: type[Any], values: Values, where: str) -> Any:
    """Return an instance of a settings class, with the values that are fields of it."""
    hints = get_type_hints(kind)
    given = {
        field.name: values[_dashed(field.name)] for field in dataclasses.fields(kind) if _dashed(field.name) in values
    }
    return kind(**{name: _converted(value, hints[name], name, where) for name, value in given.items()})


def _converted(value: Any, hint: Any, name: str, where: str) -> Any:
    """Return a value as the type of its field: TOML and JSON have no paths, and whole numbers may stand for others."""
    if isinstance(value, Path):
        value = str(value)
    try:
        return msgspec.convert(value, hint, strict=not isinstance(value, str), dec_hook=_decode)
    except msgspec.ValidationError as error:
        wanted = str(error).removeprefix("Expected ").partition(", got")[0]
        raise BadInput(f"{where}: {_dashed(name)} must be {wanted}, got {value!r}.") from None


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError


def parse_settings(method: str, arguments: Sequence[str], prog: str = "fedrema run", plain: bool = False) -> Settings:
    """Build settings from a method's name and arguments.

    Lowest to highest: the defaults of the dataset or of own data (`plain`: those of the dataclasses), --paper, --tuned,
    --config, the arguments themselves.
    """
    arguments = list(arguments)
    paper, config, tuned = (given(arguments, option) for option in ("--paper", "--config", "--tuned"))
    before: list[str] = []
    if paper is not None:
        if paper not in PRESETS:
            raise BadInput(f"--paper {paper!r} is unknown; valid are {', '.join(PRESETS)}.")
        before += as_arguments(PRESETS[paper].values(method))
    from_config = [] if config is None else as_arguments(read_config(Path(config)))
    if tuned is not None:
        data = [*before, *from_config, *arguments]
        dataset = given(data, "--federation") or given(data, "--dataset") or "digits"
        before += as_arguments(read_tuned(Path(tuned), dataset, method))
    before += from_config
    defaults: list[str] = []
    if not plain and given([*before, *arguments], "--federation") is None:
        dataset = given([*before, *arguments], "--dataset") or "digits"
        defaults = as_arguments({**data_defaults(dataset), **training_defaults(dataset)})
    elif not plain:
        defaults = as_arguments(OWN_DATA)
    return _parse(find_method(method), [*defaults, *before], arguments, f"{prog} {method}")


def fitting(method: str, arguments: Sequence[str], among: Sequence[str]) -> list[str]:
    """Leave out of arguments for several methods what is a setting of others `among` them, but not of this one."""
    own = _options(find_method(method))
    foreign = {option: flag for name in among for option, flag in _options(find_method(name)).items()}
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
            continue
        option = argument.partition("=")[0]
        if option in foreign and option not in own:
            skip = not foreign[option] and "=" not in argument
        else:
            kept.append(argument)
    return kept


def _options(method: type[Method]) -> dict[str, bool]:
    """Return how a method's settings are written, and whether each stands without a value."""
    options: dict[str, bool] = {}
    for field in dataclasses.fields(method):
        name, flag = field.name.replace("_", "-"), isinstance(field.default, bool)
        options |= {f"--{name}": flag, **({f"--no-{name}": True} if flag else {})}
    return options


def parse_data(kind: type[Any], arguments: Sequence[str], prog: str) -> Any:
    """Fill a dataclass that holds `DataSettings` (or is it), starting from the dataset's defaults."""
    own = given(arguments, "--federation")
    defaults = [] if own else as_arguments(data_defaults(given(arguments, "--dataset") or "digits"))
    return parse_arguments(kind, arguments, prog, before=defaults)


def read_config(file: Path) -> dict[str, Any]:
    """Read a TOML file of settings; `method` may be among them."""
    return read_toml(file, "--config")


def read_tuned(file: Path, dataset: str, method: str) -> dict[str, Any]:
    """Read the settings of one method on one dataset from a file with [DATASET.METHOD] in it."""
    content = read_toml(file, "--tuned")
    found = content.get(dataset, {}).get(method) if isinstance(content.get(dataset, {}), dict) else None
    if not isinstance(found, dict):
        known = [f"{data}.{name}" for data, methods in content.items() if isinstance(methods, dict) for name in methods]
        raise BadInput(f"--tuned {file} has nothing for {dataset}.{method}; it has {', '.join(known) or 'nothing'}.")
    return found


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """Read a TOML file; where that fails, the sentence begins with what it was to be."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{what} {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{what} {file} is not valid TOML: {error}.") from error


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as they would stand on the command line; None is left out."""
    arguments: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if option == "method" or value is None:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, (str, int, float, Path)):
            arguments += [f"--{option}", str(value)]
        else:
            raise BadInput(f"Setting {name!r} must be a number, a text or true/false, got {value!r}.")
    return arguments


def _parse(method: type[Method], before: list[str], arguments: list[str], prog: str) -> Settings:
    description = f"Train clients with {method.title}: {method.paper}."
    kind = _kind(method)  # type: ignore[arg-type]  # mypy: a class would have no hash
    if asks_for_help(arguments):
        _print_help(method, kind, before, prog, description, everything="--help-all" in arguments)
    parsed = parse_arguments(kind, arguments, prog, description, before, all_options="--help-all")
    data = parsed.data.without_unused()
    return Settings(parsed.method, data, parsed.network, parsed.local, parsed.simulation, parsed.output)


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Tell whether options are to be explained rather than used."""
    return not {"-h", "--help", "--help-all"}.isdisjoint(arguments)


def _print_help(
    method: type[Method], kind: type[Any], before: list[str], prog: str, description: str, everything: bool
) -> None:
    begun = _starting_from(kind, tuple(before), prog)["default"] if before else None  # type: ignore[arg-type]  # as above
    groups = help_groups({"method": method, **COMMON}, begun, everything)
    if not everything:
        number = sum(len(dataclasses.fields(group)) for group in (method, *COMMON.values()))
        description += f"\n\n{prog} --help-all lists all {number} options."
    print_help(groups, prog, description, CONFIG)


COMMON: dict[str, type[Any]] = {
    "data": DataSettings, "network": Network, "local": LocalTraining, "simulation": Simulation, "output": Output
}  # fmt: skip
"""What every run has beside its method."""


@functools.cache
def _kind(method: type[Method]) -> type[Any]:
    """Return a dataclass of all that can be set for a method."""
    taken = {field.name for group in COMMON.values() for field in dataclasses.fields(group)}
    for field in dataclasses.fields(method):
        if field.name in taken:
            raise BadInput(
                f"Method {method.name!r} has a setting {field.name!r}, but every run has one of that name: rename it."
            )
    return dataclasses.make_dataclass("Run", [("method", method), *COMMON.items()], frozen=True)


def parse_arguments(
    kind: type[Any],
    arguments: Sequence[str],
    prog: str,
    description: str | None = None,
    before: Sequence[str] = (),
    all_options: str = "--help",
) -> Any:
    """Fill a dataclass from arguments; what does not fit becomes one sentence.

    Arguments that stand `before` are what the help then shows as defaults; `all_options` is the argument that lists
    every option.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            begun = _starting_from(kind, tuple(before), prog) if before else {}  # type: ignore[arg-type]  # as above
            return tyro.cli(kind, prog=prog, description=description, config=CONFIG, args=list(arguments), **begun)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise BadInput(_sentence(complaint.getvalue(), f"{prog} {all_options}")) from None


@functools.lru_cache
def _starting_from(kind: type[Any], before: tuple[str, ...], prog: str) -> dict[str, Any]:
    """Return what arguments change, as it stands before them; parsing takes a moment, and many cells begin alike."""
    return {"default": tyro.cli(kind, prog=prog, config=CONFIG, args=list(before))}


def _sentence(box: str, lists_options: str) -> str:
    """Take the one sentence out of the box that the parser draws: of lines, or of dashes where there are none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ") for line in plain.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [" ".join(part.split()) for part in re.split(r"[─-]{5,}", " ".join(lines))]
    text, *rest = sections if "╭" in plain else sections[1:]  # a box of dashes has its title inside
    close = re.findall(r"--[a-z][\w-]*", rest[0]) if rest and rest[0].startswith("Perhaps you meant") else []
    hint = f"perhaps you meant {' or '.join(dict.fromkeys(close))}" if close else f"{lists_options} lists what is valid"
    return f"{text.rstrip('.')}; {hint}."


def given(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value given to an option, if any."""
    value = None
    for place, argument in enumerate(arguments):
        if argument == option and place + 1 < len(arguments):
            value = arguments[place + 1]
        elif argument.startswith(option + "="):
            value = argument.partition("=")[2]
    return value


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
