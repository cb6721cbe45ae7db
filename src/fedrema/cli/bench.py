"""fedrema bench."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from fedrema.base.terminal import Console
from fedrema.config.settings import Settings, as_arguments, fitting, given, parse_arguments, parse_settings, read_config
from fedrema.core import LocalTraining, Simulation
from fedrema.data import DataSettings, build_federation
from fedrema.errors import BadInput, at_least
from fedrema.methods import find_method, registry
from fedrema.models.networks import NETWORKS

NO_MEANING = ("--out", "--overwrite", "--seeds", "--quiet")


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured, and where the numbers go."""

    network: str = "cnn"
    """Networks, separated by commas: mlp, cnn, alexnet, or your own as module:function."""
    method: str = "fedrema"
    """Methods, separated by commas, or all of them: all."""
    json: Path | None = None
    """Also write everything to this file; an older one is replaced."""

    def __post_init__(self) -> None:
        """Refuse unknown names and a place that is not there, before anything is measured."""
        for name in self.networks():
            if name not in NETWORKS and ":" not in name:
                valid = ", ".join(NETWORKS)
                raise BadInput(f"--network {name!r} is unknown; valid are {valid}, or your own as module:function.")
        for name in self.methods():
            find_method(name)
        if self.json is not None and (self.json.is_dir() or not self.json.absolute().parent.is_dir()):
            raise BadInput(f"--json {self.json} cannot be written: a file in a folder that exists is valid.")

    def networks(self) -> tuple[str, ...]:
        """Return each network once."""
        return _apart(self.network)

    def methods(self) -> tuple[str, ...]:
        """Return each method once."""
        return tuple(registry()) if self.method == "all" else _apart(self.method)


def bench(arguments: list[str]) -> int:
    """Print how fast our backends are beside a textbook loop and the machine's ceilings."""
    if {"-h", "--help"} & set(arguments):
        return _help(arguments)
    own, options = _divided(arguments)
    asked: Bench = parse_arguments(Bench, own, "fedrema bench")
    settings = {network: _settings(network, asked.methods(), options) for network in asked.networks()}
    from fedrema.bench import Report, Workload, measure
    from fedrema.bench.work import generated, trimmed
    from fedrema.runs.execute import prepare

    workloads = []
    for network, methods in settings.items():
        data = next(iter(methods.values())).data
        federation = build_federation(data) if _has_data(options) else generated(network, data)
        fitted = {name: each.fitted(federation) for name, each in methods.items()}
        prepare(next(iter(fitted.values())), trimmed(federation, 1, 1))  # refused now, not after others were measured
        workloads.append(Workload(network, fitted, federation))
    console = Console()
    with console.status("Measuring") as status:
        found = measure(workloads, lambda what: status.update(Text(f"Measuring {what}")))
    report = Report.of(found, shlex.join(["fedrema", "bench", *arguments]))
    console.print(report.show(), highlight=False)
    if asked.json is not None:
        report.write(asked.json)
        console.print(f"Written: {asked.json}", highlight=False, soft_wrap=True)
    measured = {row.network for row in found.rows if row.backend != "textbook" and row.ms_per_step is not None}
    return 0 if measured == set(settings) else 2


def _apart(named: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in named.split(",")))


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the bench's own arguments, and those of a run."""
    mine = {f"--{field.name}" for field in dataclasses.fields(Bench)}
    own: list[str] = []
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option = argument.partition("=")[0]
        if option == "--net":
            raise BadInput(
                f"{argument} is not valid here: name networks with --network, such as --network cnn,alexnet."
            )
        if option in NO_MEANING:
            raise BadInput(f"{option} is not valid here: the bench keeps no runs; --json FILE keeps what it measured.")
        if option in mine:
            own.append(argument)
            if "=" not in argument:
                own += [value for value in [next(rest, None)] if value is not None]
        else:
            options.append(argument)
    return own, options


def _defaults(options: Sequence[str]) -> list[str]:
    on_a_gpu = torch.cuda.is_available() and given(options, "--device") != "cpu"
    # A round takes seconds on a CPU and a fraction of one on a GPU.
    return ["--rounds", "10" if on_a_gpu else "2", *([] if _has_data(options) else ["--samples", "600"])]


def _has_data(options: Sequence[str]) -> bool:
    """Tell whether data was asked for, rather than noise of the right shape."""
    config = given(options, "--config")
    everything = [*(as_arguments(read_config(Path(config))) if config else []), *options]
    return any(given(everything, option) for option in ("--dataset", "--federation", "--partition-file", "--paper"))


def _settings(network: str, methods: tuple[str, ...], options: Sequence[str]) -> dict[str, Settings]:
    plain = not _has_data(options)
    found = {}
    for method in methods:
        arguments = [*_defaults(options), *fitting(method, options, methods), "--net", network]
        settings = parse_settings(method, arguments, "fedrema bench", plain)
        at_least(1, settings.local, "epochs")
        for name, needed in (("participation", 1.0), ("dropout", 0.0), ("late", 0.0)):
            if (value := getattr(settings.simulation, name)) != needed:
                raise BadInput(f"--{name} {value} is not valid here: a step is one of all clients, so {needed:g} is.")
        found[method] = settings
    return found


def _help(arguments: Sequence[str]) -> int:
    """Show all that can be set, with the defaults that hold here."""
    groups: list[tuple[str, Any]] = [
        ("bench", Bench), ("data", DataSettings), ("local", LocalTraining), ("simulation", Simulation)
    ]  # fmt: skip
    made = dataclasses.make_dataclass("Settings", groups, frozen=True)
    description = (
        "Times our backends, a textbook loop over clients and the machine's ceilings side by side. --rounds of them"
        " are measured, after one (on a GPU: two) to warm up. Without --dataset, --federation or --paper the data is"
        " noise in the shape that the network is for. Settings of the methods are taken too, as in fedrema run METHOD."
    )
    parse_arguments(made, ["--help"], "fedrema bench", description, _defaults(()))
    return 0
