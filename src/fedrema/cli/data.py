"""fedrema data."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.cli.arguments import parse_arguments
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from fedrema.data.datasets import DatasetStatus


@dataclasses.dataclass(frozen=True)
class Data:
    """List the datasets, and where each is stored or downloaded from."""

    data_dir: Path | None = None
    """Folder of the datasets. Default: $FEDREMA_DATA, otherwise the user's cache folder."""
    fetch: tuple[str, ...] = ()
    """Download and verify these datasets now instead of at first use."""
    csv: str | None = None
    """Write this natural federation to NAME.csv in the current folder; an existing file is kept."""


def data(arguments: list[str]) -> int:
    """Print where each dataset is."""
    args = parse_arguments(Data, arguments, "fedrema data")
    from rich.table import Table
    from rich.text import Text

    from fedrema.base.terminal import Console
    from fedrema.data import dataset_status, load_pool
    from fedrema.data.natural import NATURAL

    if args.csv is not None:
        return _save_csv(args.csv)
    for name in args.fetch:
        load_pool(name, args.data_dir)
    table = Table("dataset", "samples", "shape", "classes", box=None, padding=(0, 2, 0, 0))
    table.add_column("location", overflow="fold")
    for status in dataset_status(args.data_dir):
        shape = "×".join(map(str, status.shape))
        table.add_row(status.name, f"{status.samples:,}", shape, str(status.classes), location(status))
    console = Console()
    console.print(table)
    console.print()
    natural = Table("natural federation", "samples", "clients", "task", box=None, padding=(0, 2, 0, 0))
    natural.add_column("content, licence and source", overflow="fold")
    for each in NATURAL.values():
        place = "" if each.folder is not None else f" Not installed: {each.install}"
        natural.add_row(
            each.name, f"{each.samples:,}", str(each.clients), each.task,
            Text(f"{each.about}. {each.licence}; {each.source}.{place}"),
        )  # fmt: skip
    console.print(natural)
    return 0


def _save_csv(name: str) -> int:
    from fedrema.base.terminal import print_safe
    from fedrema.data.natural import NATURAL, save_csv

    if name not in NATURAL:
        raise BadInput(f"--csv {name!r} is not a natural federation; valid are {', '.join(NATURAL)}.")
    file = Path(f"{name}.csv")
    if file.exists():
        raise BadInput(f"{file} already exists: rename it, or change to another folder.")
    save_csv(name, file)
    dataset = NATURAL[name]
    print_safe(f"{dataset.samples:,} rows: {file} (--target {dataset.target} --client-column {dataset.client})")
    return 0


def location(status: "DatasetStatus") -> str:
    """Return where a dataset is, or where it would be downloaded from."""
    if status.address is None:
        return "included with scikit-learn"
    if status.found is not None:
        return str(status.found)
    if status.missing_from is not None:
        return f"incomplete in {status.missing_from}: no {', '.join(status.missing)}"
    return f"not downloaded; at first use from {status.address}"
