"""Named curves on axes: one look per method in every picture, names at the curves' ends, a band over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by every kind of colour vision; grey in place of yellow, weak on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STROKES = ("-", "--", "-.", ":")
"""Beyond eight curves the colours come again with another stroke."""
FEW_ROUNDS = 10
LEAST_FRAME = 10.0
"""Percentage points that a frame shows at least, lest noise look like news."""
LINE_SPACING = 1.3
"""Height of a line of text, in sizes of its letters."""
FEW_BANDS = 4
"""More bands would hide each other and are drawn fainter."""
LEADER = 26
"""Points between the end of a curve and its name."""


@dataclass(frozen=True)
class Look:
    """How a curve is told from others."""

    colour: str
    stroke: str = "-"
    emphasis: float = 1.0
    """How many times as wide as others it is drawn."""


METHOD_LOOKS = {
    "fedrema": Look("#D55E00", emphasis=1.7),
    "fedavg": Look("#0072B2"),
    "fedprox": Look("#56B4E9"),
    "moon": Look("#000000"),
    "local": Look("#999999"),
    "fedper": Look("#009E73"),
    "fedproto": Look("#E69F00"),
    "fedpac": Look("#CC79A7"),
    # More methods than colours: each of these takes that of a method it resembles.
    "fedprior": Look("#D55E00", "--"),
    "per-fedavg": Look("#0072B2", "--"),
    "scaffold": Look("#0072B2", "-."),
    "fedbn": Look("#0072B2", ":"),
    "fedbabu": Look("#009E73", "--"),
    "fedrep": Look("#009E73", "-."),
    "fedper++": Look("#009E73", ":"),
    "feddistill": Look("#E69F00", "--"),
    "fedkd": Look("#E69F00", "-."),
    "fedfa": Look("#E69F00", ":"),
    "pfedme": Look("#56B4E9", "--"),
    "ditto": Look("#56B4E9", "-."),
    "fedamp": Look("#56B4E9", ":"),
    "creff": Look("#CC79A7", "--"),
    "fedrod": Look("#CC79A7", "-."),
    "fedclassavg": Look("#CC79A7", ":"),
    "apfl": Look("#999999", "--"),
    "lg-fedavg": Look("#999999", "-."),
    "fedvf": Look("#999999", ":"),
    "fedala": Look("#000000", "--"),
    "fedselect": Look("#000000", "-."),
}
"""A method looks the same in every picture."""


End = tuple[str, Look, float]
"""What is written at a curve's end: its name, its look, and the value that it ends with."""


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
    critical_end: float | None
    """The last critical round, averaged over seeds; None where there is none, or where it has not ended."""

    @property
    def end(self) -> End:
        """What is written at its end."""
        return self.label, self.look, float(self.mean[-1])


def looks(methods: Sequence[str]) -> list[Look]:
    """Return a look for each curve, no two alike: a method's own for the first that names it, then what is free."""
    claimed = {method: place for place, method in reversed(list(enumerate(methods))) if method in METHOD_LOOKS}
    owned = {place: METHOD_LOOKS[method] for method, place in claimed.items()}
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
    critical_end: float | None = None,
) -> Curve | None:
    """Return the curve of a quantity that is known by round for each seed; None where there is nothing in common."""
    # Only rounds that all seeds have reached: a mean over fewer and fewer seeds would jump.
    common = sorted(set.intersection(*(set(one) for one in seeds))) if seeds else []
    if not common:
        return None
    values = factor * np.array([[one[number] for number in common] for one in seeds])
    end = critical_end if critical_end is not None and critical_end <= common[-1] else None
    over = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
    return Curve(label, look, np.array(common), *over, len(seeds), end)


def draw_lines(axes: "Axes", curves: Sequence[Curve], width: float = 1.6) -> None:
    """Draw mean, band and end of the critical period of each curve, by round."""
    from matplotlib.ticker import MaxNLocator

    strength = 0.15 if len(curves) <= FEW_BANDS else 0.09
    for curve in curves:
        look = curve.look
        marker = "o" if len(curve.rounds) == 1 else ""  # a line needs two points to be seen
        (line,) = axes.plot(curve.rounds, curve.mean, color=look.colour, linestyle=look.stroke, marker=marker)
        line.set(linewidth=width * look.emphasis, zorder=2 + look.emphasis)
        if curve.seeds > 1:
            axes.fill_between(curve.rounds, curve.low, curve.high, color=look.colour, alpha=strength, linewidth=0)
        if curve.critical_end is not None:
            axes.axvline(curve.critical_end, color=look.colour, linestyle=":", linewidth=1.3, zorder=2)
    dress(axes)
    axes.set_xlabel("Communication round")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    if curves:
        fit_rounds(axes, curves)


def fit_rounds(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Let the longest curve reach the right edge, where its name goes on from it."""
    first, last = (place([int(curve.rounds[end]) for curve in curves]) for place, end in ((min, 0), (max, -1)))
    axes.set_xlim((first, last) if last > first else (first - 0.5, last + 0.5))


def dress(axes: "Axes") -> None:
    """Leave of the frame what is needed to read values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.04)


def cut_start(axes: "Axes", curves: Sequence[Curve]) -> bool:
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


def name_curves(figure: "Figure", panels: Sequence[tuple["Axes", Sequence[End]]], size: float = 9) -> None:
    """Write each name to the right of its curve's end; apart where names would overlap. All else must be drawn."""
    figure.draw_without_rendering()  # only then it is known how high the axes are
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
    """Lead from the first height at the right edge to a name at the second."""
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
            # Level at both ends, so that it is clear whose name it leads to however steep it is.
            "connectionstyle": "arc,angleA=180,angleB=0,armA=8,armB=6,rad=0",
            "shrinkA": 3,
            "shrinkB": 2,
        },
        annotation_clip=False,
    )


def apart(heights: Sequence[float], line: float) -> list[float]:
    """Move ascending heights apart by a line of text each, as little as possible and within the axes (0 to 1)."""
    # Blocks of touching labels, each centred on the mean of where its members would like to be.
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
    """Say over how many seeds something is, from one to several; `seeds` says of what they are."""
    fewest, most = min(counts := list(counts)), max(counts)
    if most == 1:
        return f"one {seeds.replace('seeds', 'seed')}"
    return f"{most} {seeds}" if fewest == most else f"{fewest} to {most} {seeds}"


def about_curves(curves: Sequence[Curve], cut: bool, seeds: str = "training seeds") -> list[str]:
    """Say in sentences what is drawn."""
    count = count_seeds([curve.seeds for curve in curves], seeds)
    sentences = [f"Line: mean over {count}; band: lowest to highest seed."]
    if all(curve.seeds == 1 for curve in curves):
        sentences = [f"{count.capitalize()} each." if len(curves) > 1 else f"{count.capitalize()}."]
    if any(curve.critical_end is not None for curve in curves):
        sentences.append("Dotted: the critical period ends.")
    if cut:
        sentences.append("Some of the first rounds lie below the frame.")
    return sentences
