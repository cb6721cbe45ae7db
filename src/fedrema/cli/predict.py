"""fedrema predict."""

import dataclasses
import sys
from pathlib import Path

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Predict:
    """Predict new samples with the clients' models: raw rows of a table, images, or arrays."""

    run: Path = positional()
    """The folder of a run, or a folder that fedrema export has written."""
    data: str = positional()
    """The samples: a .csv, .csv.gz or .parquet file with the columns of the run, a folder with one such file per
    client, an image or a folder of images, or a .npz file with x. A target column is ignored."""
    client: str | None = None
    """The client whose model predicts all samples. Default: the client column of a table, client in a .npz file, or the
    folder of an image."""
    out: Path | None = None
    """CSV file to write; an existing file is replaced. Default: print the predictions."""
    adapt: bool = True
    """Apply the method's final local adaptation to each model first, if it has one (FedBABU, Per-FedAvg)."""
    trust_code: bool = False
    """Import your own method, network or data function that the run or export names, although it comes from another
    user or machine. Read that code first."""


def predict(arguments: list[str]) -> int:
    """Write predictions as CSV."""
    args = parse_arguments(Predict, arguments, "fedrema predict")
    from fedrema.base.terminal import print_safe
    from fedrema.runs.prediction import open_models

    if args.out is not None and args.out.is_dir():
        raise BadInput(f"--out {args.out} is a folder: name a file for the predictions.")
    found = open_models(args.run, args.adapt, args.trust_code).predict(args.data, args.client)
    if args.out is None:
        sys.stdout.write(found.csv())
    else:
        found.save(args.out)
        clients = len(set(found.clients))
        whose = "1 client" if clients == 1 else f"{clients} clients"
        print_safe(f"{len(found.labels):,} predictions of {whose}: {args.out}")
    return 0
