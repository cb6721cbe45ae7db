"""Show a federation: a figure of clients and classes, and a table for the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from fedrema.base.html import html_table, paragraph, title_line
from fedrema.base.terminal import safe
from fedrema.data.federation import Federation
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedrema.base.figures import Figure

_TRAIN_COLOUR, _TEST_COLOUR = "#0072B2", "#E69F00"  # distinguishable with colour-vision deficiencies
_TABLE_ROWS, _TABLE_CLASSES = 20, 7
_READABLE_ROWS = 30
_HTML_ROWS = 10


def draw_federation(federation: Federation, path: Path) -> None:
    """Draw a matrix of clients and classes, and each client's train and test samples, as PNG, PDF or SVG."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "pdf", "svg"):
        raise BadInput(f"cannot write a figure to {path}: the file name must end in .png, .pdf or .svg.")
    federation_figure(federation).write(path, dots_per_inch=150)


def federation_figure(federation: Federation) -> "Figure":
    """Return a figure with a matrix of clients and classes, and each client's train and test samples."""
    # Imported here, because importing matplotlib takes half a second.
    from fedrema.base.figures import Figure

    clients, classes = len(federation), federation.classes
    # In inches: constant up to 30 clients; beyond that, rows become thinner and the figure grows to at most 13.
    row_height = 0.3 if clients <= _READABLE_ROWS else min(9 + 0.03 * (clients - _READABLE_ROWS), 13) / clients
    figure = Figure(
        figsize=(4.6 + float(np.clip(0.42 * classes, 2.5, 9)), 1.6 + max(2.0, row_height * clients)),
        layout="constrained",
    )
    matrix, bars = figure.subplots(1, 2, sharey=True, width_ratios=(max(2.5, 0.42 * classes), 2.2))
    _draw_matrix(matrix, federation, row_height)
    _draw_bars(bars, federation)
    figure.suptitle(_title(federation), fontsize=11)
    return figure


def _draw_matrix(axes: "Axes", federation: Federation, row_height: float) -> None:
    counts = federation.label_counts()
    clients, classes = counts.shape
    # One hue from white (0) to dark, so that lightness alone shows the number.
    image = axes.imshow(counts, cmap="Blues", aspect="auto", interpolation="nearest", vmin=0)
    if clients <= 4 * _READABLE_ROWS:
        axes.set_yticks(np.arange(clients - 1) + 0.5, minor=True)
        axes.set_xticks(np.arange(classes - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.4)
        axes.tick_params(which="minor", length=0)
    if clients <= _READABLE_ROWS and classes <= 20:
        dark = counts > 0.6 * counts.max()
        for row, column in np.ndindex(*counts.shape):
            if counts[row, column]:
                colour = "white" if dark[row, column] else "black"
                axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour, fontsize=7)
    else:
        axes.figure.colorbar(image, ax=axes, label="samples", location="left", shrink=0.4, pad=0.02)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    step = 1 if row_height >= 0.2 else int(np.ceil(clients / 20))
    axes.set_yticks(range(0, clients, step), [_short(name) for name in federation.names[::step]], fontsize=8)
    column_step = int(np.ceil(classes / 20))
    names = [_short(name) for name in federation.class_names[::column_step]]
    # Longer names would overlap.
    axes.set_xticks(range(0, classes, column_step), names, rotation=0 if max(map(len, names)) <= 3 else 90)


def _draw_bars(axes: "Axes", federation: Federation) -> None:
    rows = np.arange(len(federation))
    train = federation.label_counts("train").sum(axis=1)
    test = federation.label_counts("test").sum(axis=1)
    if len(federation) <= _READABLE_ROWS:
        axes.barh(rows, train, height=0.8, color=_TRAIN_COLOUR, label="train")
        axes.barh(rows, test, left=train, height=0.8, color=_TEST_COLOUR, label="test")
    else:  # one outline instead of thousands of bars, whose gaps would cause aliasing
        edges = np.arange(len(federation) + 1) - 0.5
        outline: dict[str, Any] = {"edges": edges, "orientation": "horizontal", "fill": True}
        axes.stairs(train, **outline, color=_TRAIN_COLOUR, label="train")
        axes.stairs(train + test, **outline, baseline=train, color=_TEST_COLOUR, label="test")
        axes.set_xlim(left=0)
    axes.set_xlabel("samples")
    axes.tick_params(axis="y", which="both", left=False, labelleft=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8)


def _title(federation: Federation) -> str:
    info = federation.info
    source = info.get("dataset") or info.get("federation") or "federation"
    kind = info.get("partition") or info.get("partition_file")
    settings = [f"{key.replace('_', ' ')} {info[key]}" for key in ("s", "alpha", "classes_per_client") if key in info]
    parts = [str(source), *([str(kind)] if kind else []), *settings, f"{len(federation)} clients"]
    return ", ".join(parts)


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def federation_table(federation: Federation) -> Table:
    """Return a table of the first clients: their samples and their classes, most frequent first."""
    table = Table(title=_title(federation), caption=f"fingerprint {federation.fingerprint[:16]}")
    table.add_column("client", no_wrap=True)
    for heading in ("train", "test"):
        table.add_column(heading, justify="right", no_wrap=True)
    # Of rare classes it matters how many samples each split has.
    table.add_column("classes (training + test)" if federation.task.rare else "classes (samples)")
    by_split = [federation.label_counts(part) for part in ("train", "test")]
    (train, test), counts, names = (
        (part.sum(axis=1) for part in by_split),
        by_split[0] + by_split[1],
        federation.class_names,
    )
    # A last row "and 1 more" would take as much space as the client itself.
    row_count = len(federation) if len(federation) <= _TABLE_ROWS else _TABLE_ROWS - 1
    for row in range(row_count):
        order = np.argsort(-counts[row], kind="stable")
        held = {
            label: " + ".join(str(part[row, label]) for part in (by_split if federation.task.rare else [counts]))
            for label in order
            if counts[row, label]
        }
        classes = [f"{_short(names[label])} ({number})" for label, number in held.items()]
        if len(classes) > _TABLE_CLASSES:
            classes[_TABLE_CLASSES - 1 :] = [f"and {len(classes) - _TABLE_CLASSES + 1} more"]
        table.add_row(safe(_short(federation.names[row])), str(train[row]), str(test[row]), "  ".join(classes))
    if row_count < len(federation):
        rest = slice(row_count, None)
        table.add_row(f"... and {len(federation) - row_count} more", str(train[rest].sum()), str(test[rest].sum()), "")
    return table


def federation_html(federation: Federation) -> str:
    """Return a description for a notebook: the task, and the first clients with their samples."""
    task, test = federation.task, int(federation.test.sum())
    shape = " × ".join(map(str, federation.sample_shape)) or "1"
    what = f"{task.name}, {federation.classes} classes" if task.has_classes else task.name
    facts = f"{len(federation.y) - test} training and {test} test samples of shape {shape}; {what}"
    train, tests = (federation.label_counts(part).sum(axis=1) for part in ("train", "test"))
    counts, names = federation.label_counts(), federation.class_names
    rows: list[list[str | int]] = []
    for row in range(min(len(federation), _HTML_ROWS)):
        order = [label for label in np.argsort(-counts[row], kind="stable") if counts[row, label]][:3]
        most = ", ".join(f"{_short(names[label])} ({counts[row, label]})" for label in order)
        rows.append([federation.names[row], *([most] if task.has_classes else []), int(train[row]), int(tests[row])])
    headings = ["client", *(["most frequent classes"] if task.has_classes else []), "train", "test"]
    rest = len(federation) - len(rows)
    more = paragraph(f"and {rest} more clients", small=True) if rest else ""
    return title_line(_title(federation), facts) + html_table(headings, rows, texts=len(headings) - 2) + more
