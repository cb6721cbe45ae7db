"""The public functions: the commands of the command line, for notebooks and scripts."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

from torch import nn

from fedrema.config.settings import Settings, make_data_settings, make_settings
from fedrema.core import Method
from fedrema.core.checks import check_method
from fedrema.data import Federation, build_federation, federation_from
from fedrema.errors import BadInput, describe
from fedrema.reporting.comparison import Comparison
from fedrema.reporting.notebook_progress import shown_progress
from fedrema.reporting.trackers import check_trackers, open_trackers
from fedrema.runs.callbacks import CallbackFor, EarlyStopping, RoundCallback, started
from fedrema.runs.directory import FEDERATION_FILE, find_runs
from fedrema.runs.execute import execute
from fedrema.runs.execute import resume as resume_run
from fedrema.runs.run import Run
from fedrema.runs.run_list import execute_seeds, reached_round, resume_listed

TABLE_SETTINGS = frozenset(inspect.signature(federation_from).parameters) - {
    *("source", "data_seed", "test_share", "class_names", "preprocessing", "info")
}
"""Settings that only say how a table is read."""
OnRound = RoundCallback | EarlyStopping | Sequence[RoundCallback | EarlyStopping] | None


@overload
def run(
    method: str | Method = "fedrema",
    *,
    federation: Any = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
    seeds: None = None,
    **settings: Any,
) -> Run: ...


@overload
def run(
    method: str | Method = "fedrema",
    *,
    federation: Any = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
    seeds: int,
    **settings: Any,
) -> list[Run]: ...


def run(
    method: str | Method = "fedrema",
    *,
    federation: Any = None,
    net: nn.Module | str | None = None,
    out: str | Path | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
    seeds: int | None = None,
    **settings: Any,
) -> Run | list[Run]:
    """Train every client and return the run; with `seeds`, a list of runs.

    Parameters
    ----------
    method
        Its name, or an instance with its settings: `FedReMa(delta=0.3)`.
    federation
        A `Federation`, any value of --federation, or a frame, dataset or mapping that `federation_from` accepts, read
        with the settings `target`, `client_column` and so on. Default: the dataset and partition of `settings`.
    net
        A network, or any value of --net. Default: chosen by the shape of a sample.
    out
        Folder of the run. Default: a new folder in runs/. With `seeds`: the folder that contains seed-0, seed-1, …
    on_round
        A callback or a list of callbacks, each called with every finished `Round`. One that returns True stops the run
        after this round: the run is then finished, and `fedrema.resume` continues it up to `rounds`. `EarlyStopping`
        is such a callback.
    progress
        Show a progress bar. Default: in notebooks only.
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
    >>> stopped = fedrema.run(
    ...     "fedavg", rounds=9, out="runs/stops", overwrite=True, on_round=lambda finished: finished.record.loss < 2
    ... )
    >>> stopped.finished, len(stopped.rounds) < 9, len(fedrema.resume("runs/stops").rounds)
    (True, True, 9)
    """
    if federation is not None and not isinstance(federation, Federation | str | Path):
        federation = _from_object(federation, settings)
        settings = {name: value for name, value in settings.items() if name.replace("-", "_") not in TABLE_SETTINGS}
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
    with _watching(on_round, progress) as watching:
        if seeds is None:
            return execute(chosen, given, module, watching(chosen), [open_trackers])
        return execute_seeds(chosen, given, module, watching, [open_trackers])


def _from_object(source: Any, settings: Mapping[str, Any]) -> Federation:
    """Create a federation from a frame or dataset, with the settings of a run that say how to read it."""
    options = {name.replace("-", "_"): value for name, value in settings.items() if value is not None}
    wanted = TABLE_SETTINGS | {"data_seed", "test_share"}
    return federation_from(source, **{name: value for name, value in options.items() if name in wanted})


def resume(
    path: str | Path,
    *,
    net: nn.Module | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
    trust_code: bool = False,
    **settings: Any,
) -> Run:
    """Resume a run that was interrupted or stopped; `rounds`, `data_dir` and `device` may be changed.

    `on_round` and `progress` are those of `run`, `trust_code` is that of `load`.
    """
    with _watching(on_round, progress, resumed=True) as watching:
        return resume_run(Path(path), settings, net, watching, [open_trackers], trust_code)


def resume_all(
    path: str | Path,
    *,
    net: nn.Module | None = None,
    on_round: OnRound = None,
    progress: bool | None = None,
    trust_code: bool = False,
    **settings: Any,
) -> list[Run]:
    """Resume all runs in a folder, including those that had not started yet, and return all of them."""
    with _watching(on_round, progress, resumed=True) as watching:
        return resume_listed(Path(path), settings, net, watching, [open_trackers], trust_code)


@contextmanager
def _watching(on_round: OnRound, progress: bool | None, resumed: bool = False) -> Iterator[CallbackFor]:
    """Yield a function that returns the callback of a run; show progress bars meanwhile."""
    given = list(on_round) if isinstance(on_round, Sequence) else [] if on_round is None else [on_round]
    for each in given:
        if not isinstance(each, EarlyStopping) and not callable(each):
            raise BadInput(
                f"on_round={describe(each)} is invalid: it must be a function of a round, or a list of functions."
            )
    with shown_progress(progress) as bars:

        def callback_for(settings: Settings) -> RoundCallback:
            done = reached_round(settings.output.folder) if resumed else 0
            return started([*given, *bars(settings, done)])

        yield callback_for


def compare(runs: Run | str | Path | Sequence[Any]) -> Comparison:
    """Compare runs: a table of results, paired differences with intervals, and curves.

    Parameters
    ----------
    runs
        Runs, folders of runs, folders that contain runs, and lists of these. Runs that differ only in their training
        seed form one row of the table.

    Examples
    --------
    >>> import fedrema
    >>> local = fedrema.run("local", rounds=2, seeds=2, out="runs/local", overwrite=True)
    >>> fedavg = fedrema.run("fedavg", rounds=2, seeds=2, out="runs/fedavg", overwrite=True)
    >>> comparison = fedrema.compare([local, fedavg])
    >>> [row["method"] for row in comparison.rows()]
    ['Local', 'FedAvg']
    >>> [difference.pairs for difference in comparison.differences(reference="local")]
    [2]
    >>> comparison.plot().savefig("curves.png")
    """
    return Comparison(_all_runs(runs))


def _all_runs(runs: Any) -> list[Run]:
    if isinstance(runs, Run):
        return [runs]
    if isinstance(runs, str | Path):
        return [Run(folder) for folder in find_runs([Path(runs)])]
    if isinstance(runs, Sequence):
        return [run for each in runs for run in _all_runs(each)]
    kind = type(runs).__name__
    raise BadInput(f"a value of type {kind} cannot be compared: give runs, folders of runs, or a list of these.")


def load(path: str | Path, *, trust_code: bool = False) -> Run:
    """Open the folder of a run, finished or not.

    `trust_code=True` permits models and predictions to import the method, network or data function that the run names
    although this user has not given it. Read that code first.
    """
    return Run(path, trust_code)


def make_federation(**settings: Any) -> Federation:
    """Partition a dataset: `make_federation(dataset="mnist", clients=50, partition="dirichlet", alpha=0.3)`."""
    return build_federation(make_data_settings(settings, "fedrema.make_federation"))
