"""fedrema personalize."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from fedrema.settings import parse_arguments
from fedrema.text import Console, safe


@dataclasses.dataclass(frozen=True)
class Personalize:
    """Make a model for a client that was not there: match its head once, fine-tune, score."""

    dir: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    data: Path
    """The new client's samples: a .npz with x and y, and perhaps split; without it a part is kept for testing."""
    out: Path | None = None
    """Where to write its model; default: newcomers/NAME.safetensors in the run's folder."""
    epochs: int | None = None
    """Passes over its samples, before matching and again after; default: those of the run."""
    overwrite: bool = False
    """Replace the model that lies in --out."""


def personalize(arguments: list[str]) -> int:
    """Print what a newcomer gains, and write its model."""
    asked: Personalize = parse_arguments(Personalize, arguments, "fedrema personalize")
    from fedrema.runs.export import write_model
    from fedrema.runs.personalize import personalize as welcome
    from fedrema.runs.run import Run

    newcomer = welcome(asked.dir, asked.data, asked.epochs)
    out = write_model(Run(asked.dir), newcomer.params, asked.data.stem, asked.out, asked.overwrite)
    console = Console()
    table = Table("stage", "accuracy", box=None, padding=(0, 2, 0, 0))
    for stage, accuracy in newcomer.accuracy.items():
        table.add_row(stage, "–" if accuracy is None else f"{accuracy:.1%}")
    console.print(f"{safe(asked.data.stem)}: {newcomer.train} samples to train on, {newcomer.test} to test with.")
    console.print(table)
    if newcomer.peers:
        largest = sorted(newcomer.peers.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{safe(name)} {weight:.0%}" for name, weight in largest[:12])
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        console.print(f"It learns from: {named}{more}", highlight=False)
    else:
        reason = "is one for all" if newcomer.head_role == "shared" else "never leaves its client"
        console.print(f"It learns from the shared part alone: with this method a head {reason}.")
    console.print(f"Model: {out}", highlight=False, soft_wrap=True)
    return 0
