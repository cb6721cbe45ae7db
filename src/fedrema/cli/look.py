"""fedrema methods, fedrema data, fedrema partition: what there is."""

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fedrema.base.options import field_documentation, valid_choices
from fedrema.base.terminal import Console
from fedrema.config.presets import PRESETS
from fedrema.config.settings import parse_arguments, parse_data
from fedrema.core import Method
from fedrema.data import DataSettings, build_federation, dataset_status, draw_federation, federation_table, load_pool
from fedrema.methods import find_method, registry


@dataclasses.dataclass(frozen=True)
class Methods:
    """List every method, its settings and its paper."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """Only this one, in full; your own as module:Class."""
    paper: bool = False
    """List the names that --paper takes, with their settings."""


def methods(arguments: list[str]) -> int:
    """Print the methods, one of them, or the paper's presets."""
    asked: Methods = parse_arguments(Methods, arguments, "fedrema methods")
    console = Console()
    if asked.paper:
        for name, preset in PRESETS.items():
            own = "".join(f"; {method}: {' '.join(arguments)}" for method, arguments in preset.own.items())
            settings = f"  {' '.join(preset.common)}{own}"
            console.print(Text.assemble((name, "bold"), settings), highlight=False, soft_wrap=True)
        return 0
    chosen = [find_method(asked.name)] if asked.name else list(registry().values())
    for kind in chosen:
        _print_method(console, kind, in_full=asked.name is not None)
    if not asked.name:
        console.print("fedrema methods NAME explains one; fedrema run NAME --help-all lists all that can be set.")
    return 0


def _print_method(console: Console, kind: type[Method], in_full: bool) -> None:
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in (paragraphs if in_full else paragraphs[:1]))
    own = f"{kind.__module__}:{kind.__qualname__}"
    called = kind.name if registry().get(kind.name) is kind else own
    console.print(Text.assemble((kind.title, "bold"), f"  (fedrema run {called})"), highlight=False)
    console.print(text, highlight=False)
    console.print(kind.paper, style="dim", highlight=False)
    settings = field_documentation(kind)
    if settings:
        table = Table("setting", "default", "meaning", box=None, padding=(0, 2, 0, 0))
        for name, (default, meaning) in settings.items():
            shown = "required" if default is dataclasses.MISSING else str(default)
            table.add_row(*map(Text, (f"--{name}", shown, meaning + valid_choices(kind, name))))
        console.print(table)
    console.print()


@dataclasses.dataclass(frozen=True)
class Data:
    """List the datasets: what is there, and what can be fetched."""

    data_dir: Path | None = None
    """Folder to look in; default: $FEDREMA_DATA, then a cache."""
    fetch: tuple[str, ...] = ()
    """Names of datasets to fetch and verify now, instead of at first use."""


def data(arguments: list[str]) -> int:
    """Print where each dataset is."""
    asked: Data = parse_arguments(Data, arguments, "fedrema data")
    for name in asked.fetch:
        load_pool(name, asked.data_dir)
    table = Table("dataset", "samples", "shape", "classes", box=None, padding=(0, 2, 0, 0))
    table.add_column("where", overflow="fold")
    for status in dataset_status(asked.data_dir):
        shape = "×".join(map(str, status.shape))
        table.add_row(status.name, f"{status.samples:,}", shape, str(status.classes), _where(status))
    Console().print(table)
    return 0


def _where(status: Any) -> str:
    if status.address is None:
        return "comes with scikit-learn"
    if status.found is not None:
        return str(status.found)
    if status.missing_from is not None:
        return f"incomplete in {status.missing_from}: no {', '.join(status.missing)}"
    return f"not here; fetched at first use from {status.address}"


@dataclasses.dataclass(frozen=True)
class Partition:
    """Deal a dataset (or one's own data) to clients: show who holds what, save it, draw it."""

    data: DataSettings
    save: Path | None = None
    """Write the federation to this .npz; `fedrema run METHOD --federation FILE` trains on it."""
    plot: Path | None = None
    """Draw who holds what to this .png, .svg or .pdf."""


def partition(arguments: list[str]) -> int:
    """Print a federation, and save or draw it."""
    asked: Partition = parse_data(Partition, arguments, "fedrema partition")
    federation = build_federation(asked.data)
    console = Console()
    console.print(federation_table(federation))
    if asked.save:
        federation.save(asked.save)
        size = decimal(asked.save.stat().st_size)
        console.print(f"Saved: {asked.save} ({size})", highlight=False, soft_wrap=True)
    if asked.plot:
        draw_federation(federation, asked.plot)
        console.print(f"Drawn: {asked.plot}", highlight=False, soft_wrap=True)
    return 0
