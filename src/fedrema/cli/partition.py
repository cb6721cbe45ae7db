"""fedrema partition."""

import dataclasses
from pathlib import Path

from fedrema.cli.arguments import parse_data
from fedrema.data import DataSettings, build_federation, draw_federation, federation_table


@dataclasses.dataclass(frozen=True)
class Partition:
    """Partition a dataset, or your own data, among clients: print, save or draw the label distribution."""

    data: DataSettings
    save: Path | None = None
    """Write the federation to this .npz file, for `fedrema run METHOD --federation FILE`."""
    plot: Path | None = None
    """Draw each client's label distribution to this .png, .svg or .pdf file."""


def partition(arguments: list[str]) -> int:
    """Print a federation, and save or draw it."""
    args = parse_data(Partition, arguments, "fedrema partition")
    from rich.filesize import decimal

    from fedrema.base.terminal import Console

    federation = build_federation(args.data)
    console = Console()
    console.print(federation_table(federation))
    if args.save:
        federation.save(args.save)
        size = decimal(args.save.stat().st_size)
        console.print(f"Saved: {args.save} ({size})", highlight=False, soft_wrap=True)
    if args.plot:
        draw_federation(federation, args.plot)
        console.print(f"Drawn: {args.plot}", highlight=False, soft_wrap=True)
    return 0
