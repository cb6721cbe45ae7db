"""fedrema personalize."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from fedrema.base.terminal import Console
    from fedrema.runs.new_clients import NewClient
    from fedrema.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Personalize:
    """Make a model for a new client that did not participate in training: match its head once, fine-tune, evaluate.

    The new model is compared with the one on arrival, and with one that is trained on the client's own samples only.
    """

    data: str
    """The new client's samples: a .npz file with x, y and optionally split (otherwise some samples are set aside for
    testing); or module:function, which returns (x, y) or (x, y, split)."""
    dir: Path = positional()
    """The folder of a run, or one that contains runs, such as several seeds; each run yields a model."""
    out: Path | None = None
    """File for the model. Default: newcomers/NAME.safetensors in the run's folder."""
    epochs: int | None = None
    """Epochs of training before matching, and of fine-tuning after it. Default: those of the run."""
    overwrite: bool = False
    """Replace the model in --out, if there is one."""
    trust_code: bool = False
    """Import your own method, network or data function that the run names, although it comes from another user or
    machine. Read that code first."""


def personalize(arguments: list[str]) -> int:
    """Print the primary metric on a new client after each step, and write its model: one for each run."""
    args = parse_arguments(Personalize, arguments, "fedrema personalize")
    from rich.text import Text

    from fedrema.base.terminal import Console
    from fedrema.runs.directory import RunDirectory, find_runs
    from fedrema.runs.run import Run

    is_run = RunDirectory(args.dir).config_file.is_file() or not args.dir.is_dir()
    runs = [Run(folder, args.trust_code) for folder in ([args.dir] if is_run else find_runs([args.dir]))]
    if args.out is not None and len(runs) > 1:
        raise BadInput(f"--out {args.out} is for the model of one run, but there are {len(runs)}: name one of them.")
    console = Console()
    for run in runs:
        if len(runs) > 1:
            console.print(Text(str(run.path), "bold"))
        _personalize(args, run, console)
    return 0


def _personalize(args: Personalize, run: "Run", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    from fedrema.base.terminal import safe
    from fedrema.reporting.quantities import metric_text
    from fedrema.runs.export import write_model
    from fedrema.runs.new_clients import new_client_name
    from fedrema.runs.new_clients import personalize as make_model
    from fedrema.tasks import find_metric

    made, name = make_model(run.path, args.data, args.epochs, trust=args.trust_code), new_client_name(args.data)
    out = write_model(run, made.params, name, args.out, args.overwrite)
    metric = find_metric(run.metric)
    table = Table("stage", metric.title, box=None, padding=(0, 2, 0, 0))
    for stage, value in made.scores.items():
        table.add_row(stage, "–" if value is None else f"{value:.1%}" if metric.percent else metric_text(metric, value))
    console.print(Text(f"{safe(name)}: {made.train} samples to train on, {made.test} to test with."))
    console.print(table)
    console.print(_gains(made))
    if made.peers:
        largest = sorted(made.peers.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{safe(peer)} {weight:.0%}" for peer, weight in largest[:12])
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        console.print(Text(f"It learns from: {named}{more}"))
    else:
        reason = "all clients have the same head" if made.head_role == "shared" else "heads never leave their clients"
        console.print(f"It uses only the shared parameters: with this method {reason}.")
    console.print(Text(f"Model: {out}"), soft_wrap=True)


def _gains(made: "NewClient") -> "Table":
    """Return how much better the fine-tuned model is than the one on arrival, and than one that was trained alone."""
    from rich.table import Table
    from rich.text import Text

    from fedrema.reporting.verdict import conclusion_text, shown
    from fedrema.runs.new_clients import LOCAL
    from fedrema.simulation.gains import compare_models
    from fedrema.simulation.scoring import metric_for

    tuned = made.predictions["fine-tuned"]
    metric = metric_for(tuned.task)
    table = Table("fine-tuned compared with", "gain", "95 % interval", "conclusion", box=None, padding=(0, 2, 0, 0))
    others = {"on arrival": "on arrival", LOCAL: f"Local ({made.local_epochs} epochs)"}
    for stage, words in others.items():
        if stage in made.predictions:
            (gain,) = compare_models(metric, {made.name: (tuned, made.predictions[stage])}).clients
            between = "–" if gain.low is None else f"{shown(metric, gain.low)} to {shown(metric, gain.high)}"
            table.add_row(*map(Text, (words, shown(metric, gain.gain), between, conclusion_text(gain))))
    return table
