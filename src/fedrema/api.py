"""The public functions: the commands of the command line, for notebooks and scripts."""

from pathlib import Path
from typing import Any, overload

from torch import nn

from fedrema.config.settings import make_data_settings, make_settings
from fedrema.core import Method
from fedrema.core.checks import check_method
from fedrema.data import Federation, build_federation
from fedrema.reporting.trackers import check_trackers, open_trackers
from fedrema.runs.directory import FEDERATION_FILE
from fedrema.runs.execute import RoundCallback, execute
from fedrema.runs.execute import resume as resume_run
from fedrema.runs.run import Run
from fedrema.runs.run_list import execute_seeds, resume_listed


@overload
def run(
    method: str | Method = "fedrema",
    *,
    federation: Federation | str | None = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    watch: RoundCallback | None = None,
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
    watch: RoundCallback | None = None,
    seeds: int,
    **settings: Any,
) -> list[Run]: ...


def run(
    method: str | Method = "fedrema",
    *,
    federation: Federation | str | None = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    watch: RoundCallback | None = None,
    seeds: int | None = None,
    **settings: Any,
) -> Run | list[Run]:
    """Train every client and return the run; with `seeds`, a list of runs.

    Parameters
    ----------
    method
        Its name, or an instance with its settings: `FedReMa(delta=0.3)`.
    federation
        A `Federation`, or any value of --federation. Default: the dataset and partition of `settings`.
    net
        A network, or any value of --net. Default: chosen by the shape of a sample.
    out
        Folder of the run. Default: a new folder in runs/. With `seeds`: the folder that contains seed-0, seed-1, …
    watch
        Called with each finished `Round`.
    seeds
        Repeat with this many training seeds, starting from `seed`. `fedrema.resume_all(out)` resumes all of them.
    **settings
        Any option that `fedrema run METHOD --help-all` lists, with _ for -: `dataset="mnist", lr=0.05, rounds=100`.

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
    given = federation if isinstance(federation, Federation) else None
    values = {
        **settings,
        "federation": federation if given is None else FEDERATION_FILE,
        "net": None if isinstance(net, nn.Module) else net,
        "out": out,
        "seeds": seeds,
    }
    if isinstance(method, Method):
        check_method(type(method))
    chosen = make_settings(method, values, "fedrema.run")
    check_trackers(chosen.output.trackers)
    module = net if isinstance(net, nn.Module) else None
    if seeds is None:
        return execute(chosen, given, module, watch, [open_trackers])
    return execute_seeds(chosen, given, module, watch, [open_trackers])


def resume(
    path: str | Path, *, net: nn.Module | None = None, watch: RoundCallback | None = None, **settings: Any
) -> Run:
    """Resume an interrupted run; `rounds`, `data_dir` and `device` may be changed."""
    return resume_run(Path(path), settings, net, watch, [open_trackers])


def resume_all(
    path: str | Path, *, net: nn.Module | None = None, watch: RoundCallback | None = None, **settings: Any
) -> list[Run]:
    """Resume all runs in a folder, including those that had not started yet, and return all of them."""
    return resume_listed(Path(path), settings, net, watch, [open_trackers])


def load(path: str | Path) -> Run:
    """Open the folder of a run, finished or not."""
    return Run(path)


def make_federation(**settings: Any) -> Federation:
    """Partition a dataset: `make_federation(dataset="mnist", clients=50, partition="dirichlet", alpha=0.3)`."""
    return build_federation(make_data_settings(settings, "fedrema.make_federation"))
