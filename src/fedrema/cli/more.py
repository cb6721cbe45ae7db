"""fedrema personalize, fedrema bench."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from fedrema.settings import parse_arguments, parse_settings


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
    console.print(f"{asked.data.stem}: {newcomer.train} samples to train on, {newcomer.test} to test with.")
    console.print(table)
    if newcomer.peers:
        largest = sorted(newcomer.peers.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{name} {weight:.0%}" for name, weight in largest[:12])
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        console.print(f"It learns from: {named}{more}", highlight=False)
    else:
        reason = "is one for all" if newcomer.head_role == "shared" else "never leaves its client"
        console.print(f"It learns from the shared part alone: with this method a head {reason}.")
    console.print(f"Model: {out}", highlight=False, soft_wrap=True)
    return 0


def bench(arguments: list[str]) -> int:
    """Print the speed of a few rounds; any option of `fedrema run` may be given."""
    method = arguments[0] if arguments and not arguments[0].startswith("-") else "fedrema"
    rest = arguments[1:] if arguments and arguments[0] == method else arguments
    if {"-h", "--help"} & set(rest):
        print(
            "usage: fedrema bench [METHOD] [OPTIONS]\n\n"
            "Measures a few rounds (default: fedrema --paper table1-mnist --rounds 4) as `fedrema run` plays them:\n"
            "seconds by part, the share around training, and the speed of training as a share of this machine's\n"
            "own matrix product. Takes every option of `fedrema run METHOD`."
        )
        return 0
    from fedrema.bench import measure

    speed = measure(parse_settings(method, ["--paper", "table1-mnist", "--rounds", "4", *rest], "fedrema bench"))
    table = Table("part of a round", "seconds", "share", box=None, padding=(0, 2, 0, 0))
    for part, seconds in speed.parts.items():
        table.add_row(part, f"{seconds:.3f}", f"{seconds / speed.round:.1%}")
    table.add_row("whole round", f"{speed.round:.3f}", "100.0%")
    console = Console()
    console.print(table)
    for line in (
        f"Data:            {speed.data}; read, verified and dealt once in {speed.loading:.2f} s",
        f"Around training: {speed.around:.1%} of a round",
        f"Training:        {speed.training_rate / 1e9:,.0f} GFLOP/s, {speed.share:.0%} of this machine's matrix product"
        f" ({speed.matrix_rate / 1e9:,.0f} GFLOP/s, {torch_threads()})",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def torch_threads() -> str:
    """Say on what the reference was measured."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
