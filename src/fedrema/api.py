"""The public functions: what the command line does, for notebooks and scripts."""

import dataclasses
from pathlib import Path
from typing import Any, overload

from torch import nn

from fedrema.config.settings import as_arguments, parse_data, parse_settings
from fedrema.core import Method
from fedrema.core.checks import check_method
from fedrema.data import DataSettings, Federation, build_federation
from fedrema.reporting.trackers import check_trackers, open_trackers
from fedrema.runs.directory import FEDERATION_FILE
from fedrema.runs.execute import Watcher, execute
from fedrema.runs.execute import resume as resume_run
from fedrema.runs.run import Run
from fedrema.runs.series import execute_seeds, resume_series


@overload
def run(
    method: str | Method = "fedrema",
    *,
    federation: Federation | str | None = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    seeds: None = None,
    **settings: Any,
) -> Run: ...


@overload
def run(
    method: str | Method = "fedrema",
    *,
    federation: Federation | str | None = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    seeds: int,
    **settings: Any,
) -> list[Run]: ...


def run(
    method: str | Method = "fedrema",
    *,
    federation: Federation | str | None = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    seeds: int | None = None,
    **settings: Any,
) -> Run | list[Run]:
    """Train every client and return the run; with `seeds`, a list of runs.

    Parameters
    ----------
    method
        Its name, or an instance with settings of your choice: `FedReMa(delta=0.3)`.
    federation
        A `Federation`, or what --federation takes. Default: the dataset and partition of `settings`.
    net
        A network, or what --net takes. Default: by the shape of a sample.
    out
        Folder of the run; default: a new one under runs/. With `seeds`: the folder that holds seed-0, seed-1, …
    watch
        Called with every `Round` as it ends.
    seeds
        Repeat with this many training seeds, starting from `seed`. `fedrema.resume_all(out)` continues all of them.
    **settings
        Anything that `fedrema run METHOD --help-all` lists, with _ for -: `dataset="mnist", lr=0.05, rounds=100`.

    Examples
    --------
    >>> import fedrema
    >>> done = fedrema.run("fedavg", rounds=2, out="runs/two-rounds", overwrite=True)
    >>> len(done.rounds)
    2
    >>> runs = fedrema.run("fedavg", rounds=2, seeds=2, out="runs/two-seeds", overwrite=True)
    >>> [each.settings["seed"] for each in runs]
    [0, 1]
    """
    if isinstance(federation, str):
        settings["federation"] = federation
    if isinstance(net, str):
        settings["net"] = net
    given = federation if isinstance(federation, Federation) else None
    if given is not None:
        settings["federation"] = FEDERATION_FILE
    # A method's own settings are in the instance; any method knows the others.
    name = method if isinstance(method, str) else "fedavg"
    arguments = as_arguments({**settings, "out": out, "seeds": seeds})
    chosen = parse_settings(name, arguments, "fedrema.run")
    if isinstance(method, Method):
        check_method(type(method))
        chosen = dataclasses.replace(chosen, method=method)
    check_trackers(chosen.output.trackers)
    module = net if isinstance(net, nn.Module) else None
    if seeds is None:
        return execute(chosen, given, module, watch, [open_trackers])
    return execute_seeds(chosen, given, module, watch, [open_trackers])


def resume(path: str | Path, *, net: nn.Module | None = None, watch: Watcher | None = None, **settings: Any) -> Run:
    """Go on with a run that was stopped; `rounds`, `data_dir` and `device` may be given anew."""
    return resume_run(Path(path), settings, net, watch, [open_trackers])


def resume_all(
    path: str | Path, *, net: nn.Module | None = None, watch: Watcher | None = None, **settings: Any
) -> list[Run]:
    """Go on with all runs in a folder, also those that had not begun when they were stopped; returns all of them."""
    return resume_series(Path(path), settings, net, watch, [open_trackers])


def load(path: str | Path) -> Run:
    """Open the folder of a run, finished or not."""
    return Run(path)


def make_federation(**settings: Any) -> Federation:
    """Deal a dataset to clients: `make_federation(dataset="mnist", clients=50, partition="dirichlet", alpha=0.3)`."""
    chosen: DataSettings = parse_data(DataSettings, as_arguments(settings), "fedrema.make_federation")
    return build_federation(chosen)
