"""fedrema export."""

import dataclasses
from pathlib import Path

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Export:
    """Write each client's model as safetensors, with a README that shows how to load it in plain PyTorch."""

    dirs: tuple[Path, ...] = positional()
    """At least one folder of a run, or folder that contains runs."""
    out: Path | None = None
    """Folder for the models of a single run. Default: models in the run's folder."""
    clients: tuple[str, ...] = ()
    """Names of the clients to export. Default: all."""
    overwrite: bool = False
    """Replace models that were exported before."""
    adapt: bool = True
    """Apply the method's final local adaptation to each model first, if it has one (FedBABU, Per-FedAvg)."""
    trust_code: bool = False
    """Import your own method, network or data function that the run names, although it comes from another user or
    machine. Read that code first."""


def export(arguments: list[str]) -> int:
    """Export models."""
    args = parse_arguments(Export, arguments, "fedrema export")
    from fedrema.base.terminal import print_safe
    from fedrema.runs.directory import EXPORT_INDEX, find_runs
    from fedrema.runs.export import export_models
    from fedrema.runs.manifest import read_object
    from fedrema.runs.run import Run

    runs = [Run(folder, args.trust_code) for folder in find_runs(args.dirs)]
    if args.out is not None and len(runs) > 1:
        raise BadInput(f"--out {args.out} is for the models of one run, but there are {len(runs)}: name one of them.")
    for run in runs:
        written = export_models(run, args.out, args.clients or None, args.overwrite, adapt=args.adapt)
        folder = args.out or run.path / "models"
        models = "model" if len(written) == 1 else "models"
        print_safe(f"{len(written)} {models}: {folder} (its README.md shows how to load one)")
        if (run.path.parent / "server.toml").is_file():  # the run of a deployment
            from fedrema.deploy.audit_service import record_export

            record_export(run.path.parent, "server", folder / EXPORT_INDEX, f"{len(written)} {models} to {folder}")
        index = read_object(folder / EXPORT_INDEX, "cannot be read")
        if elsewhere := [entry["client"] for entry in index.get("only_on_nodes", [])]:
            print_safe(
                "The complete models of these clients exist only on their nodes; there, fedrema deploy model "
                f"NODE_FOLDER writes them: {', '.join(elsewhere)}."
            )
        if never := index.get("never_counted"):
            print_safe(f"These clients have not contributed to any round: {', '.join(never)}.")
    return 0
