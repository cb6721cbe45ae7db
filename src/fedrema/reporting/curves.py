"""How groups of runs learn, round by round: a picture for a paper."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedrema.base.files import written_whole
from fedrema.errors import BadInput
from fedrema.reporting.groups import Group, data_title, group_runs
from fedrema.reporting.plots import (
    Curve,
    Look,
    about_curves,
    curve_over_seeds,
    cut_start,
    draw_lines,
    looks,
    name_curves,
)
from fedrema.runs.run import Run

WORDS = {
    "accuracy": ("Accuracy", "Test accuracy of the clients' models (%)"),
    "trained_accuracy": ("Accuracy after local training", "Test accuracy right after local training (%)"),
    "worst_tenth": ("The worst-served clients", "Test accuracy of the worst-served tenth (%)"),
    "loss": ("Training loss", "Mean loss of local training"),
    "mean_gap": ("Mean gap", "Mean largest gap between similarities"),
    "gap_ratio": ("Mean gap", "Mean gap as a share of its peak"),
}
PERCENT = ("accuracy", "trained_accuracy", "worst_tenth")


def draw_curves(
    runs: Sequence[Run],
    path: Path | str,
    quantity: str = "accuracy",
    size: tuple[float, float] = (7.2, 4.4),
    dots_per_inch: int = 200,
) -> None:
    """Draw a mean curve per group of runs, with a band over its seeds, as PNG, SVG or PDF by the file's ending.

    `quantity` is any number in a round's record or in the method's trace; groups without it are left out. `size` is in
    inches.
    """
    path = Path(path)
    kind = picture_kind(path)
    groups = group_runs(runs)
    shown = zip(groups, looks([group.method for group in groups]), strict=True)
    curves = [curve for group, look in shown if (curve := group_curve(group, look, quantity))]
    if not curves:
        raise BadInput(f"There is no {quantity!r} to draw: no round of these runs has it.")
    # Imported here: it takes half a second that only a picture is worth.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, curves)
    axes.set_ylabel(_words(quantity)[1])
    cut = quantity in PERCENT and cut_start(axes, curves)
    axes.set_title(f"{_words(quantity)[0]} by round: {data_title(groups)}", fontsize=10.5, loc="left")
    figure.supxlabel(_caption(curves, cut), fontsize=8, color="0.35", x=0.01, ha="left")
    name_curves(figure, [(axes, [curve.end for curve in curves])])
    with written_whole(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=dots_per_inch)


def picture_kind(path: Path) -> str:
    """Return png, svg or pdf by a file's ending; refuses any other."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise BadInput(f"--plot {path} cannot be drawn: names ending in .png, .svg or .pdf are valid.")
    return kind


def group_curve(group: Group, look: Look, quantity: str) -> Curve | None:
    found = []
    for run in group.counted:
        try:
            rounds, values = run.curve(quantity)
        except BadInput:  # this run has no such quantity, or no round yet
            continue
        if values.ndim != 1 or values.dtype.kind not in "bif":
            raise BadInput(f"{quantity!r} cannot be drawn: it is not one number per round.")
        found.append(dict(zip(rounds.tolist(), values.astype(float).tolist(), strict=True)))
    factor = 100 if quantity in PERCENT else 1
    return curve_over_seeds(group.label, look, found, factor, _critical_end(group))


def _critical_end(group: Group) -> float | None:
    ends = []
    for run in group.counted:
        critical = {record.round: record.trace.get("critical") for record in run.rounds}
        known = {number: flag for number, flag in critical.items() if flag is not None}
        if not any(known.values()) or all(known.values()):
            return None
        ends.append(max(number for number, flag in known.items() if flag))
    return float(np.mean(ends)) if ends else None


def _words(quantity: str) -> tuple[str, str]:
    plain = quantity.replace("_", " ").capitalize()
    return WORDS.get(quantity, (plain, plain))


def _caption(curves: Sequence[Curve], cut: bool) -> str:
    sentences = about_curves(curves, cut)
    return "\n".join([" ".join(sentences[:2]), *sentences[2:]])
