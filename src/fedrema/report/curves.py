"""How groups of runs learn, round by round: a picture for a paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrema.data.atomic import written_whole
from fedrema.errors import BadInput
from fedrema.report.groups import Group, data_title, group_runs
from fedrema.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by every kind of colour vision; grey in place of yellow, weak on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STROKES = ("-", "--", "-.")
"""Beyond eight groups the colours come again with another stroke."""
WORDS = {
    "accuracy": ("Accuracy", "Test accuracy of the clients' models (%)"),
    "trained_accuracy": ("Accuracy after local training", "Test accuracy right after local training (%)"),
    "worst_tenth": ("The worst-served clients", "Test accuracy of the worst-served tenth (%)"),
    "loss": ("Training loss", "Mean loss of local training"),
    "mean_gap": ("Mean gap", "Mean largest gap between similarities"),
    "gap_ratio": ("Mean gap", "Mean gap as a share of its peak"),
}
PERCENT = ("accuracy", "trained_accuracy", "worst_tenth")
FEW_ROUNDS = 10
LEAST_FRAME = 10.0
"""Percentage points that a frame shows at least, lest noise look like news."""
LINE_OF_TEXT = 0.052
"""Height of a label as a share of the axes."""


@dataclass(frozen=True)
class Curve:
    """A group's quantity by round, over its seeds."""

    label: str
    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int
    critical_end: float | None
    """The last critical round, averaged over seeds; None where there is none, or where it has not ended."""


def draw_curves(runs: Sequence[Run], path: Path, quantity: str = "accuracy") -> None:
    """Draw a mean curve per group of runs, with a band over its seeds, as PNG, SVG or PDF by the file's ending.

    `quantity` is any number in a round's record or in the method's trace; groups without it are left out.
    """
    kind = picture_kind(path)
    groups = group_runs(runs)
    curves = [curve for group in groups if (curve := _curve(group, quantity))]
    if not curves:
        raise BadInput(f"There is no {quantity!r} to draw: no round of these runs has it.")
    # Imported here: it takes half a second that only a picture is worth.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for place, curve in enumerate(curves):
        colour, stroke = _look(place)
        marker = "o" if len(curve.rounds) == 1 else ""  # a line needs two points to be seen
        (line,) = axes.plot(curve.rounds, curve.mean, color=colour, linestyle=stroke, marker=marker)
        line.set(linewidth=1.6, zorder=3)
        if curve.seeds > 1:
            axes.fill_between(curve.rounds, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        if curve.critical_end is not None:
            axes.axvline(curve.critical_end, color=colour, linestyle=":", linewidth=1.3, zorder=2)
    _dress(axes, curves, quantity)
    cut = quantity in PERCENT and _cut_start(axes, curves)
    _name_curves(axes, curves)
    axes.set_title(f"{_words(quantity)[0]} by round: {data_title(groups)}", fontsize=10.5, loc="left")
    figure.supxlabel(_caption(curves, cut), fontsize=8, color="0.35", x=0.01, ha="left")
    with written_whole(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=200)


def picture_kind(path: Path) -> str:
    """Return png, svg or pdf by a file's ending; refuses any other."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise BadInput(f"--plot {path} cannot be drawn: names ending in .png, .svg or .pdf are valid.")
    return kind


def _curve(group: Group, quantity: str) -> Curve | None:
    found = []
    for run in group.counted:
        try:
            rounds, values = run.curve(quantity)
        except BadInput:  # this run has no such quantity, or no round yet
            continue
        if values.ndim != 1 or values.dtype.kind not in "bif":
            raise BadInput(f"{quantity!r} cannot be drawn: it is not one number per round.")
        found.append(dict(zip(rounds.tolist(), values.astype(float).tolist(), strict=True)))
    if not found:
        return None
    # Only rounds that all seeds have reached: a mean over fewer and fewer seeds would jump.
    common = sorted(set.intersection(*(set(one) for one in found)))
    values = np.array([[one[number] for number in common] for one in found]) * (100 if quantity in PERCENT else 1)
    if not common:
        return None
    end = _critical_end(group)
    return Curve(
        group.label,
        np.array(common),
        values.mean(axis=0),
        values.min(axis=0),
        values.max(axis=0),
        len(found),
        end if end is not None and end <= common[-1] else None,
    )


def _critical_end(group: Group) -> float | None:
    ends = []
    for run in group.counted:
        critical = {record["round"]: record.get("trace", {}).get("critical") for record in run.rounds}
        known = {number: flag for number, flag in critical.items() if flag is not None}
        if not any(known.values()) or all(known.values()):
            return None
        ends.append(max(number for number, flag in known.items() if flag))
    return float(np.mean(ends)) if ends else None


def _dress(axes: "Axes", curves: Sequence[Curve], quantity: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("Communication round")
    axes.set_ylabel(_words(quantity)[1])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    first, last = (place([int(curve.rounds[end]) for curve in curves]) for place, end in ((min, 0), (max, -1)))
    # A curve reaches the right edge, where its name goes on from it.
    axes.set_xlim((first, last) if last > first else (first - 0.5, last + 0.5))
    axes.margins(y=0.04)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _look(place: int) -> tuple[str, str]:
    return COLOURS[place % len(COLOURS)], STROKES[place // len(COLOURS) % len(STROKES)]


def _cut_start(axes: "Axes", curves: Sequence[Curve]) -> bool:
    """Let low first rounds run out of the frame where they would squeeze all that follows; tell whether."""
    if min(len(curve.rounds) for curve in curves) < FEW_ROUNDS:
        return False
    lowest = min(float(curve.low[max(2, len(curve.low) // 8) :].min()) for curve in curves)
    highest = max(float(curve.high.max()) for curve in curves)
    lowest = min(lowest, highest - LEAST_FRAME)
    bottom, top = axes.get_ylim()
    margin = 0.06 * (highest - lowest)
    if highest - lowest + 2 * margin > 0.6 * (top - bottom):
        return False
    axes.set_ylim(lowest - margin, highest + margin)
    return True


def _name_curves(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Write each name at the right end of its curve, moved apart where they would overlap."""
    bottom, top = axes.get_ylim()
    heights = [(curve.mean[-1] - bottom) / (top - bottom) for curve in curves]
    order = sorted(range(len(curves)), key=lambda place: heights[place])
    placed = _apart([heights[place] for place in order])
    for height, place in zip(placed, order, strict=True):
        colour, stroke = _look(place)
        axes.annotate(
            curves[place].label,
            xy=(1.0, heights[place]),
            xytext=(1.08, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color="black",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linestyle": stroke,
                "linewidth": 1.0,
                "relpos": (0, 0.5),
                # Level at both ends, so that it is clear whose name it leads to however steep it is.
                "connectionstyle": "arc,angleA=180,angleB=0,armA=9,armB=7,rad=0",
                "shrinkA": 3,
                "shrinkB": 3,
            },
            annotation_clip=False,
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Move ascending heights apart by a line of text each, as little as possible and within the axes."""
    # Blocks of touching labels, each centred on the mean of where its members would like to be.
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _span(blocks[-2])[1] > _span(blocks[-1])[0]:
            upper = blocks.pop()
            blocks[-1] += upper
    return [_span(block)[0] + LINE_OF_TEXT * (place + 0.5) for block in blocks for place in range(len(block))]


def _span(block: Sequence[float]) -> tuple[float, float]:
    half = LINE_OF_TEXT * len(block) / 2
    centre = max(half, min(float(np.mean(block)), 1 - half))
    return centre - half, centre + half


def _words(quantity: str) -> tuple[str, str]:
    plain = quantity.replace("_", " ").capitalize()
    return WORDS.get(quantity, (plain, plain))


def _caption(curves: Sequence[Curve], cut: bool) -> str:
    counts = sorted({curve.seeds for curve in curves})
    if counts == [1]:
        sentences = ["One training seed each." if len(curves) > 1 else "One training seed."]
    else:
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        sentences = [f"Line: mean over {number} training seeds; band: lowest to highest seed."]
    if any(curve.critical_end is not None for curve in curves):
        sentences.append("Dotted: the critical period ends.")
    if cut:
        sentences.append("Some of the first rounds lie below the frame.")
    return "\n".join([" ".join(sentences[:2]), *sentences[2:]])
