"""fedrema run."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fedrema.base.terminal import Console, print_safe
from fedrema.cli.arguments import asks_for_help, parse_settings, parse_several, peek
from fedrema.cli.multi_gpu import devices_for, run_on_gpus
from fedrema.cli.option_help import text_width, wrapped
from fedrema.cli.report import REPORT, open_in_browser
from fedrema.cli.run_folders import common_folder
from fedrema.config.presets import Values
from fedrema.config.settings import Settings, read_config
from fedrema.core import LocalTraining
from fedrema.data import DataSettings, Federation
from fedrema.errors import BadInput, Diverged
from fedrema.methods import find_method, registry
from fedrema.reporting.progress import RunProgress, Watch, label_of
from fedrema.runs.callbacks import CallbackFor
from fedrema.runs.execute import Interrupted
from fedrema.runs.execute_many import Outcome, check_all, execute_all, group_joint
from fedrema.runs.run import Run
from fedrema.runs.run_list import check_folders, reached_round, remove_finished_lists, seeds_of, write_run_list
from fedrema.runs.saved_settings import default_folder
from fedrema.simulation.simulator import Simulator

DEMONSTRATION = ("local", "fedavg", "fedrema")
DEMONSTRATION_SETTINGS: Values = {"seeds": 3, "record": "relations", "threads": 1}
"""Defaults of the demonstration; with one thread per operation, results do not depend on the number of cores."""

"""What the outcomes of a task are called; default: classes."""


def run(arguments: list[str]) -> int:
    """Train with one method, or compare several."""
    named, rest = _methods(arguments)
    names = DEMONSTRATION if named is None else tuple(registry()) if named == "all" else _separated(named)
    if len(names) == 1:
        settings = parse_settings(names[0], rest)
        out = settings.output.out or default_folder(settings)
        return _run(seeds_of(settings.placed(out)), out)
    if asks_for_help(rest):
        print(_usage())
        return 0
    several = parse_several(names, rest, defaults=None if named else DEMONSTRATION_SETTINGS)
    out = several[0].output.out or default_folder(several[0], "comparison" if named else "demo")
    placed = [settings.placed(out / name.replace(":", "-")) for name, settings in zip(names, several, strict=True)]
    return _run([seeded for settings in placed for seeded in seeds_of(settings)], out)


def _methods(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the methods, as named on the command line or in the configuration file, and the other arguments."""
    if arguments and not arguments[0].startswith("-"):
        if len(arguments) > 1 and not arguments[1].startswith("-"):
            raise BadInput(f"Separate methods with commas: fedrema run {arguments[0]},{arguments[1]}.")
        return arguments[0], arguments[1:]
    config = peek(arguments, "config").get("config")
    named = read_config(Path(config)).get("method") if config else None
    return (None if named is None else str(named)), arguments


def _separated(named: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in named.split(",")))
    for name in names:
        find_method(name)  # an unknown method is reported before the first is run
    return names


def _usage() -> str:
    text = f"""Train clients with one or several methods.

        METHOD is one of {", ".join(registry())}, or your own as module:Class.

        fedrema run METHOD --help lists the essential options, fedrema run METHOD --help-all lists all of them; with
        --dataset NAME they show the defaults for that dataset.

        Several methods, or all, are trained one after the other; at the end a table and a plot compare them. An option
        that only some of them have applies to those.

        Without METHOD: a demonstration that compares Local, FedAvg and FedReMa with three seeds each, on handwritten
        digits or the data that the options name."""
    return f"usage: fedrema run [METHOD[,METHOD...]] [OPTIONS]\n\n{wrapped(text, text_width())}"


def _run(wanted: list[Settings], out: Path) -> int:
    from fedrema.reporting.trackers import check_trackers

    check_folders(wanted)
    check_trackers(wanted[0].output.trackers)
    built = check_all(wanted)
    if len(wanted) > 1:
        write_run_list(out, wanted)
    groups, devices = group_joint(wanted), devices_for(wanted[0])
    if len(devices) > 1 and len(wanted) > 1:
        return _run_on_gpus(groups, devices, wanted[0].output.quiet, out)

    def outcomes(watching: CallbackFor, progress: RunProgress) -> Iterator[tuple[Settings, Outcome]]:
        return execute_group(wanted, watching, progress, built)

    return follow(outcomes, wanted, out, wanted[0].output.quiet, wanted[0].output.open)


def execute_group(
    group: Sequence[Settings],
    watching: CallbackFor,
    progress: RunProgress,
    built: Mapping[DataSettings, Federation] | None = None,
) -> Iterator[tuple[Settings, Outcome]]:
    """Execute runs; print the settings that were chosen from their data."""
    from fedrema.reporting.trackers import open_trackers

    def prepared(settings: Settings, simulator: Simulator) -> None:
        progress.say(_chosen(settings.local, simulator))

    return execute_all(group, watching, observers=[open_trackers], on_prepared=prepared, built=built)


def follow(
    outcomes: Callable[[CallbackFor, RunProgress], Iterator[tuple[Settings, Outcome]]],
    wanted: list[Settings],
    out: Path,
    quiet: bool,
    open_report: bool,
    resumed: bool = False,
) -> int:
    """Show the progress of runs and, at the end, their results; return the exit code."""
    done: list[Run] = []
    failed: list[str] = []
    try:
        with RunProgress(quiet) as progress:

            def watching(settings: Settings) -> Watch:
                reached = reached_round(settings.output.folder) if resumed else 0
                period = settings.method.reports.period
                return progress.watch(label_of(settings), settings.simulation.rounds, period, reached)

            for settings, outcome in outcomes(watching, progress):
                if isinstance(outcome, Diverged):  # the other runs continue
                    failed.append(f"fedrema: {label_of(settings)}: {outcome}")
                else:
                    done.append(outcome)
    except Interrupted as stop:
        if len(wanted) == 1:
            return _interrupted(str(stop))
        return _interrupted(f"Stopped; continue all {len(wanted)} runs with: fedrema resume {out}")
    remove_finished_lists(out, [settings.output.folder for settings in wanted])
    if done and not quiet:
        _show_results(done, open_report)
    for sentence in failed:
        print_safe(sentence, file=sys.stderr)
    return 2 if failed else 0


def _run_on_gpus(groups: list[list[Settings]], devices: list[str], quiet: bool, out: Path) -> int:
    done, failed, stopped = run_on_gpus(groups, devices)
    remove_finished_lists(out, [settings.output.folder for group in groups for settings in group])
    if done and not quiet:
        _show_results(done, groups[0][0].output.open)
    if stopped:
        print_safe(f"fedrema: Stopped; continue all runs with: fedrema resume {out}", file=sys.stderr)
    return 130 if stopped else 2 if failed else 0


def _chosen(requested: LocalTraining, simulator: Simulator) -> str:
    """Return a sentence about the settings that were chosen from the data; empty if there are none."""
    used, federation = simulator.local, simulator.federation
    chosen = [f"--{name} {getattr(used, name):g}" for name in ("batch", "lr") if not getattr(requested, name)]
    if not chosen:
        return ""
    test = int(federation.test.sum())
    data = f"{len(federation)} clients, {len(federation.y) - test} training and {test} test samples"
    return f"Chosen from the data ({data}, {_target(federation)}): {' '.join(chosen)}"


def _target(federation: Federation) -> str:
    """Return what is predicted, in words."""
    number = federation.classes
    return {
        "multiclass": f"{number} classes",
        "binary": "2 classes",
        "multilabel": f"{number} labels: multilabel",
        "ordinal": f"{number} levels: ordinal",
        "regression": "a quantity: regression",
        "count": "a count: Poisson regression",
    }[federation.task.name]


def _interrupted(sentence: str) -> int:
    print_safe(f"fedrema: {sentence}", file=sys.stderr)
    return 130


def _show_results(runs: list[Run], open_report: bool) -> None:
    """Print the results of runs, draw their curves, write their report and print where everything is."""
    from fedrema.page.render import write_page
    from fedrema.reporting.curves import draw_curves
    from fedrema.reporting.tables import comparison_table

    console = Console()
    console.print(comparison_table(runs))
    folder = common_folder([run.path for run in runs])
    lines = [f"Results: {folder}"]
    if len(runs) > 1:
        draw_curves(runs, folder / "curves.png")
        lines.append(f"Curves:  {folder / 'curves.png'}")
    write_page([run.path for run in runs], folder / REPORT)
    lines += [
        f"Report:  {folder / REPORT}  (open it in a browser)",
        f"Next:    fedrema {'compare' if len(runs) > 1 else 'export'} {folder}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if open_report:
        open_in_browser(folder / REPORT)
