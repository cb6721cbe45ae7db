"""A verdict in words: one sentence, and notes on which clients count and which conclusions are less certain."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fedrema.simulation.gains import FEW_EVENTS, FEWEST_SAMPLES
from fedrema.tasks import Metric

if TYPE_CHECKING:
    from fedrema.reporting.verdict import ClientGain, Verdict

WIDE_SPREAD = 2
"""Above so many times the federation's standard deviation, the rate of false conclusions is not the stated one."""
MOST_NAMES = 12
NUMBERS = {2: "two", 3: "three", 4: "four"}
VERBS = {
    "gain": ("gains", "gain"),
    "loss": ("loses", "lose"),
    "no difference shown": ("shows no difference", "show no difference"),
    "too few samples": ("has too few test samples", "have too few test samples"),
    "not tested": ("is not tested", "are not tested"),
}


def conclusions_text(counts: Mapping[str, int], total: int) -> str:
    """Return the numbers of clients by conclusion."""
    tested = counts["not tested"] < total
    always = ("gain", "loss", "no difference shown") if tested else ()
    words = [
        f"{count} {VERBS[conclusion][count != 1]}"
        for conclusion, count in counts.items()
        if count or conclusion in always
    ]
    first, *rest = words or ["0 are not tested"]
    number, _, verb = first.partition(" ")
    noun = "client" if total == 1 else "clients"
    return ", ".join([f"{number} of {total} {noun} {verb}", *rest])


def mean_text(found: "Verdict") -> str:
    """Return the mean gain, and what its interval is for; empty without a mean."""
    mean = found.mean
    if mean.mean is None:
        return ""
    if mean.clients == 1:
        where = "" if len(found.clients) == 1 else " of the only client for which it is defined"
        return f"gain{where} {found.shown_gain(mean.mean, None, None)}"
    numbers = found.shown_gain(mean.mean, found.low, found.high)
    if mean.scope == "clients like these":
        return f"mean gain {numbers} for clients like these (t interval over {mean.clients} clients, each counted once)"
    few = NUMBERS[mean.clients]
    return (
        f"mean gain of these {mean.clients} clients {numbers};"
        f" {few} clients do not show what a further client would gain"
    )


def notes(found: "Verdict") -> Iterator[str]:
    """Yield sentences on who counts in the mean, and on conclusions that are less certain than others."""
    defined = [client for client in found.clients if client.gain.gain is not None]
    few = sum(client.gain.conclusion == "too few samples" for client in defined)
    undefined = len(found.clients) - len(defined)
    if found.mean.mean is not None and few:
        who, verb = ("client", "counts") if few == 1 else ("clients", "count")
        yield f"The {few} {who} with too few test samples {verb} in the mean like any other."
    if defined and undefined:
        who, verb, whom = ("client", "is", "it") if undefined == 1 else ("clients", "are", "them")
        yield f"{undefined} {who} {verb} left out of the mean: {found.metric.title} is undefined for {whom}."
    if defined and found.mean.mean is None:
        events = sum(client.gain.events or 0 for client in found.clients)
        yield (
            f"All test samples together contain {events} of the rare outcome, fewer than {FEW_EVENTS}: there is no mean"
            " gain."
        )
    if found.counts["not tested"]:
        yield _untested(found.metric)
    elif few == len(defined) and any(client.gain.samples >= FEWEST_SAMPLES for client in defined):
        yield "The test samples of the clients, or those of a class, are too few for conclusions about single clients."
    yield from _uncertain(found.clients)


def _untested(metric: Metric) -> str:
    other = "rmse" if metric.name == "r2" else "log_loss"
    return f"No test of a single client's {metric.title} is known to be valid: use another metric (--metric {other})."


def _uncertain(clients: Sequence["ClientGain"]) -> Iterator[str]:
    concluded = [client for client in clients if client.gain.low is not None]
    rare = [
        f"{client.name} ({client.gain.events})"
        for client in concluded
        if client.gain.events is not None and client.gain.events < FEW_EVENTS
    ]
    if rare:
        yield f"Based on fewer than {FEW_EVENTS} test samples of an outcome: {_names(rare)}."
    wide = [client.name for client in concluded if client.gain.spread and client.gain.spread > WIDE_SPREAD]
    if wide:
        yield (
            f"The gains of single samples vary more than twice as much as in the federation, so that a false conclusion"
            f" is likelier than 5 %: {_names(wide)}."
        )


def _names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
