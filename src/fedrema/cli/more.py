"""fedrema personalize."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table
from rich.text import Text

from fedrema.base.terminal import Console, safe
from fedrema.config.settings import parse_arguments
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from fedrema.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Personalize:
    """Make a model for a client that was not there: match its head once, fine-tune, score."""

    dir: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or one that holds runs, such as several seeds: a model is made from each."""
    data: str
    """The new client's samples: a .npz with x and y, and perhaps split (without it a part is kept for testing); or
    module:function, which returns (x, y) or (x, y, split)."""
    out: Path | None = None
    """Where to write its model; default: newcomers/NAME.safetensors in the run's folder."""
    epochs: int | None = None
    """Passes over its samples, before matching and again after; default: those of the run."""
    overwrite: bool = False
    """Replace the model that lies in --out."""


def personalize(arguments: list[str]) -> int:
    """Print what a newcomer gains, and write its model: one for each run."""
    asked: Personalize = parse_arguments(Personalize, arguments, "fedrema personalize")
    from fedrema.runs.directory import RunDirectory, find_runs
    from fedrema.runs.run import Run

    own = RunDirectory(asked.dir).config_file.is_file() or not asked.dir.is_dir()
    runs = [Run(folder) for folder in ([asked.dir] if own else find_runs([asked.dir]))]
    if asked.out is not None and len(runs) > 1:
        raise BadInput(f"--out {asked.out} is for the model of one run, but there are {len(runs)}: name one of them.")
    console = Console()
    for run in runs:
        if len(runs) > 1:
            console.print(Text(str(run.path), "bold"))
        _personalize(asked, run, console)
    return 0


def _personalize(asked: Personalize, run: "Run", console: Console) -> None:
    from fedrema.runs.export import write_model
    from fedrema.runs.new_clients import new_client_name
    from fedrema.runs.new_clients import personalize as welcome

    newcomer, name = welcome(run.path, asked.data, asked.epochs), new_client_name(asked.data)
    out = write_model(run, newcomer.params, name, asked.out, asked.overwrite)
    table = Table("stage", "accuracy", box=None, padding=(0, 2, 0, 0))
    for stage, accuracy in newcomer.accuracy.items():
        table.add_row(stage, "–" if accuracy is None else f"{accuracy:.1%}")
    console.print(Text(f"{safe(name)}: {newcomer.train} samples to train on, {newcomer.test} to test with."))
    console.print(table)
    if newcomer.peers:
        largest = sorted(newcomer.peers.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{safe(peer)} {weight:.0%}" for peer, weight in largest[:12])
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        console.print(Text(f"It learns from: {named}{more}"))
    else:
        reason = "is one for all" if newcomer.head_role == "shared" else "never leaves its client"
        console.print(f"It learns from the shared part alone: with this method a head {reason}.")
    console.print(Text(f"Model: {out}"), soft_wrap=True)
