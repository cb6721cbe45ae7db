"""Curves on matplotlib axes: one style per method, labels at the curves' ends, a band over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedrema.core.reports import Reports

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are distinguishable with colour blindness; grey replaces yellow, faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STROKES = ("-", "--", "-.", ":")
"""With more than eight curves, colours repeat with another stroke."""
FEW_ROUNDS = 10
LEAST_FRAME = 10.0
"""Minimum height of the y axis in percentage points, so that noise does not fill it."""
LINE_SPACING = 1.3
"""Line height relative to the font size."""
FEW_BANDS = 4
"""More bands than this overlap and are drawn fainter."""
LEADER = 26
"""Points between the end of a curve and its label."""


@dataclass(frozen=True)
class Look:
    """Colour and stroke of a curve."""

    colour: str
    stroke: str = "-"
    emphasis: float = 1.0
    """Line width relative to other curves."""


End = tuple[str, Look, float]
"""The label at a curve's end: its text, the curve's look, and the curve's last value."""


@dataclass(frozen=True)
class Curve:
    """A quantity by round, over seeds."""

    label: str
    look: Look
    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int
    period_end: float | None = None
    """Last round of the method's period, averaged over seeds; None where it has none, or where it has not ended."""
    period: str = "period"
    """The title of that period."""

    @property
    def end(self) -> End:
        """The label at its end."""
        return self.label, self.look, float(self.mean[-1])


def looks(methods: Sequence[str], declared: Mapping[str, Reports]) -> list[Look]:
    """Return a distinct look for each curve, given the curves' methods and what these declare.

    The first curve of a method has the look that the method declares; all others get unused ones.
    """
    owned = {
        methods.index(method): Look(reports.colour, reports.stroke, reports.emphasis)
        for method, reports in declared.items()
        if method in methods and reports.colour is not None
    }
    taken = {(look.colour, look.stroke) for look in owned.values()}
    free = [Look(colour, stroke) for stroke in STROKES for colour in COLOURS if (colour, stroke) not in taken]
    others = [place for place in range(len(methods)) if place not in owned]
    owned |= {place: free[turn % len(free)] for turn, place in enumerate(others)}
    return [owned[place] for place in range(len(methods))]


def curve_over_seeds(
    label: str,
    look: Look,
    seeds: Sequence[Mapping[int, float]],
    factor: float = 1.0,
    period_end: float | None = None,
    period: str = "period",
) -> Curve | None:
    """Return the curve of a quantity from its values by round for each seed; None where seeds share no round."""
    # Only rounds that all seeds have reached: a mean over fewer and fewer seeds would jump.
    common = sorted(set.intersection(*(set(one) for one in seeds))) if seeds else []
    if not common:
        return None
    values = factor * np.array([[one[number] for number in common] for one in seeds])
    end = period_end if period_end is not None and period_end <= common[-1] else None
    over = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
    return Curve(label, look, np.array(common), *over, len(seeds), end, period)


def draw_lines(axes: "Axes", curves: Sequence[Curve], width: float = 1.6) -> None:
    """Draw the mean, the band over seeds and the end of the period of each curve."""
    from matplotlib.ticker import MaxNLocator

    strength = 0.15 if len(curves) <= FEW_BANDS else 0.09
    for curve in curves:
        look = curve.look
        marker = "o" if len(curve.rounds) == 1 else ""  # a line through one point is invisible
        (line,) = axes.plot(curve.rounds, curve.mean, color=look.colour, linestyle=look.stroke, marker=marker)
        line.set(linewidth=width * look.emphasis, zorder=2 + look.emphasis)
        if curve.seeds > 1:
            axes.fill_between(curve.rounds, curve.low, curve.high, color=look.colour, alpha=strength, linewidth=0)
        if curve.period_end is not None:
            axes.axvline(curve.period_end, color=look.colour, linestyle=":", linewidth=1.3, zorder=2)
    dress(axes)
    axes.set_xlabel("Communication round")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    if curves:
        fit_rounds(axes, curves)


def fit_rounds(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Set the x axis so that the longest curve reaches the right edge, next to its label."""
    first, last = (place([int(curve.rounds[end]) for curve in curves]) for place, end in ((min, 0), (max, -1)))
    axes.set_xlim((first, last) if last > first else (first - 0.5, last + 0.5))


def dress(axes: "Axes") -> None:
    """Remove the top and right spines, and draw a light horizontal grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.04)


def cut_start(
    axes: "Axes", curves: Sequence[Curve], higher_is_better: bool = True, least: float = LEAST_FRAME
) -> Literal["", "below", "above"]:
    """Cut bad values of the first rounds off the y axis if they would compress the rest.

    `least` is the minimum height of the axis. Returns where the cut values are; "" if nothing was cut.
    """
    if min(len(curve.rounds) for curve in curves) < FEW_ROUNDS:
        return ""
    settled = [max(2, len(curve.rounds) // 8) for curve in curves]
    if higher_is_better:
        lowest = min(float(curve.low[start:].min()) for curve, start in zip(curves, settled, strict=True))
        highest = max(float(curve.high.max()) for curve in curves)
        lowest = min(lowest, highest - least)
    else:
        lowest = min(float(curve.low.min()) for curve in curves)
        highest = max(float(curve.high[start:].max()) for curve, start in zip(curves, settled, strict=True))
        highest = max(highest, lowest + least)
    bottom, top = axes.get_ylim()
    margin = 0.06 * (highest - lowest)
    if highest - lowest + 2 * margin > 0.6 * (top - bottom):
        return ""
    axes.set_ylim(lowest - margin, highest + margin)
    return "below" if higher_is_better else "above"


def name_curves(figure: "Figure", panels: Sequence[tuple["Axes", Sequence[End]]], size: float = 9) -> None:
    """Label each curve to the right of its end, without overlaps. Call it last: labels depend on the layout."""
    figure.draw_without_rendering()  # computes the height of the axes
    for axes, ends in panels:
        line = LINE_SPACING * size / 72 / (axes.get_position().height * figure.get_figheight())
        bottom, top = axes.get_ylim()
        heights = [min(max((end - bottom) / (top - bottom), 0.0), 1.0) for _, _, end in ends]
        order = sorted(range(len(ends)), key=lambda place: heights[place])
        placed = apart([heights[place] for place in order], line)
        for height, place in zip(placed, order, strict=True):
            name, look, _ = ends[place]
            _write(figure, axes, name, look, (heights[place], height), size)


def _write(figure: "Figure", axes: "Axes", name: str, look: Look, heights: tuple[float, float], size: float) -> None:
    """Write a label at the second height, with a line from the first height at the right edge."""
    from matplotlib.transforms import ScaledTranslation

    axes.annotate(
        name,
        xy=(1.0, heights[0]),
        xytext=(1.0, heights[1]),
        xycoords="axes fraction",
        textcoords=axes.transAxes + ScaledTranslation(LEADER / 72, 0, figure.dpi_scale_trans),
        va="center",
        fontsize=size,
        color="black",
        arrowprops={
            "arrowstyle": "-",
            "color": look.colour,
            "linestyle": look.stroke,
            "linewidth": look.emphasis,
            "relpos": (0, 0.5),
            # Horizontal at both ends, so that steep lines still point at their labels.
            "connectionstyle": "arc,angleA=180,angleB=0,armA=8,armB=6,rad=0",
            "shrinkA": 3,
            "shrinkB": 2,
        },
        annotation_clip=False,
    )


def apart(heights: Sequence[float], line: float) -> list[float]:
    """Move ascending label heights apart to at least `line`, as little as possible and within the axes (0 to 1)."""
    # Blocks of touching labels, each centred on the mean of the original heights of its members.
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _span(blocks[-2], line)[1] > _span(blocks[-1], line)[0]:
            upper = blocks.pop()
            blocks[-1] += upper
    return [_span(block, line)[0] + line * (place + 0.5) for block in blocks for place in range(len(block))]


def _span(block: Sequence[float], line: float) -> tuple[float, float]:
    half = line * len(block) / 2
    centre = max(half, min(float(np.mean(block)), 1 - half))
    return centre - half, centre + half


def count_seeds(counts: Iterable[int], seeds: str = "training seeds") -> str:
    """Return "3 training seeds" or "2 to 3 training seeds"; `seeds` is the noun."""
    fewest, most = min(counts := list(counts)), max(counts)
    if most == 1:
        return f"one {seeds.removesuffix('s')}"
    return f"{most} {seeds}" if fewest == most else f"{fewest} to {most} {seeds}"


def about_curves(curves: Sequence[Curve], cut: str, seeds: str = "training seeds") -> list[str]:
    """Return the sentences of a caption that explain lines, bands and markers; `cut` is what `cut_start` returned."""
    count = count_seeds([curve.seeds for curve in curves], seeds)
    sentences = [f"Line: mean over {count}; band: lowest to highest {seeds.split()[-1].removesuffix('s')}."]
    if all(curve.seeds == 1 for curve in curves):
        sentences = [f"{count.capitalize()} each." if len(curves) > 1 else f"{count.capitalize()}."]
    ended = dict.fromkeys(curve.period for curve in curves if curve.period_end is not None)
    if ended:
        sentences.append(f"Dotted: end of the {' or '.join(ended)}.")
    if cut:
        sentences.append(f"Some of the first rounds are {cut} the visible range.")
    return sentences
