"""fedrema bench."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.cli.arguments import asks_for_help, fill, parse_options, peek, print_help, run_options
from fedrema.cli.option_help import TITLES, Section, options_of
from fedrema.config.presets import Values
from fedrema.config.settings import Settings, make_settings, read_config
from fedrema.core import LocalTraining, Simulation
from fedrema.data import DataSettings, build_federation
from fedrema.errors import BadInput, at_least
from fedrema.methods import find_method, registry
from fedrema.models.networks import NETWORKS

if TYPE_CHECKING:
    from fedrema.data import Federation

NOT_KEPT = ("out", "overwrite", "seeds", "quiet")
"""Settings without effect here, because the runs are not kept."""
DATA = ("dataset", "federation", "partition-file", "paper")
"""Settings that name data; without any of them clients get random inputs."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured, and where the results are written."""

    network: str = "cnn"
    """Networks, separated by commas: any that --net of fedrema run takes."""
    method: str = "fedrema"
    """Methods, separated by commas; or all."""
    json: Path | None = None
    """Also write the results to this JSON file, replacing it."""

    def __post_init__(self) -> None:
        """Check names and the path before anything is measured."""
        for name in self.networks():
            if name not in NETWORKS and ":" not in name:
                valid = ", ".join(NETWORKS)
                raise BadInput(f"--network {name!r} is unknown; valid are {valid}, or your own as module:function.")
        for name in self.methods():
            find_method(name)
        if self.json is not None and (self.json.is_dir() or not self.json.absolute().parent.is_dir()):
            raise BadInput(f"--json {self.json} cannot be written: a file in a folder that exists is valid.")

    def networks(self) -> tuple[str, ...]:
        """Return the networks, each once."""
        return _separated(self.network)

    def methods(self) -> tuple[str, ...]:
        """Return the methods, each once."""
        return tuple(registry()) if self.method == "all" else _separated(self.method)


def bench(arguments: list[str]) -> int:
    """Print how fast our backends are compared with a textbook loop and the machine's peak rates."""
    if asks_for_help(arguments):
        _help()
    args, values = _parse(arguments)
    settings = {network: _settings(network, args.methods(), values) for network in args.networks()}
    from rich.text import Text

    from fedrema.base.terminal import Console
    from fedrema.bench import Report, Workload, measure

    workloads = []
    for network, methods in settings.items():
        federation = _federation(network, next(iter(methods.values())), values)
        fitted = {name: each.fitted(federation) for name, each in methods.items()}
        workloads.append(Workload(network, fitted, federation))
        workloads[-1].check()  # before any other is measured
    console = Console()
    with console.status("Measuring") as status:
        found = measure(workloads, lambda what: status.update(Text(f"Measuring {what}")))
    report = Report.of(found, shlex.join(["fedrema", "bench", *arguments]))
    console.print(report.show(), highlight=False)
    if args.json is not None:
        report.write(args.json)
        console.print(f"Written: {args.json}", highlight=False, soft_wrap=True)
    measured = {row.network for row in found.rows if row.backend != "textbook" and row.ms_per_step is not None}
    return 0 if measured == set(settings) else 2


def _separated(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in names.split(",")))


def _parse(arguments: Sequence[str]) -> tuple[Bench, Values]:
    """Return what is measured, and the settings of the runs."""
    args = Bench(method=peek(arguments, "method").get("method", Bench.method))
    options = [*options_of(Bench), *run_options(args.methods())]
    given = parse_options(options, arguments, "fedrema bench")
    if "net" in given:
        raise BadInput(f"--net {given['net']} is not valid here: use --network, such as --network cnn,alexnet.")
    for name in NOT_KEPT:
        if name in given:
            raise BadInput(f"--{name} is not valid here: the runs are not kept; --json FILE keeps the results.")
    own = {field.name for field in dataclasses.fields(Bench)}
    values = {name.replace("_", "-"): value for name, value in given.items() if name not in own}
    return fill(Bench, given, "fedrema bench"), values


def _defaults(values: Values) -> Values:
    import torch

    on_gpu = torch.cuda.is_available() and values.get("device") != "cpu"
    # A round takes seconds on a CPU and a fraction of a second on a GPU.
    return {"rounds": 10 if on_gpu else 2, **({} if _has_data(values) else {"samples": 600})}


def _has_data(values: Values) -> bool:
    """Return whether the options name data, rather than random inputs."""
    config = values.get("config")
    in_file = {name.replace("_", "-") for name in read_config(Path(str(config)))} if config else set()
    return any(name in values or name in in_file for name in DATA)


def _settings(network: str, methods: Sequence[str], values: Values) -> dict[str, Settings]:
    plain = not _has_data(values)
    found = {}
    for method in methods:
        layered = {**_defaults(values), **values, "net": network}
        settings = make_settings(method, layered, "fedrema bench", plain, among=methods)
        at_least(1, settings.local, "epochs")
        for name, needed in (("participation", 1.0), ("dropout", 0.0), ("late", 0.0)):
            if (value := getattr(settings.simulation, name)) != needed:
                raise BadInput(
                    f"--{name} {value} is not valid here: all clients participate in every step; use {needed:g}."
                )
        found[method] = settings
    return found


def _federation(network: str, settings: Settings, values: Values) -> "Federation":
    from fedrema.bench.work import generated

    return build_federation(settings.data) if _has_data(values) else generated(network, settings.data)


def _help() -> None:
    """Print all options with the defaults that apply here."""
    classes = {"data": DataSettings, "local": LocalTraining, "simulation": Simulation}
    description = (
        "Measure training speed on this machine: our backends, a textbook loop over clients, and the machine's peak"
        " rates. --rounds rounds are measured, after one (on a GPU: two) for warm-up.\n\n"
        "Without --dataset, --federation or --paper the clients hold random inputs of the network's shape. The options"
        " of the methods are accepted as well, as in fedrema run METHOD."
    )
    defaults = _defaults({})
    sections = [
        Section("Benchmark options", "", options_of(Bench)),
        *(Section(TITLES[name], "", options_of(kind, defaults)) for name, kind in classes.items()),
    ]
    print_help("fedrema bench", description, sections)
