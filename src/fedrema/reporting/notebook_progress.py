"""Progress of runs in a notebook: one line with a bar, which also remains readable in a saved notebook."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedrema.base.html import escaped
from fedrema.config.settings import Settings
from fedrema.core import Period
from fedrema.reporting.progress import RunProgress, StateText, label_of
from fedrema.runs.callbacks import RoundCallback
from fedrema.simulation.state import Round

SECONDS_BETWEEN_UPDATES = 0.2


def in_notebook() -> bool:
    """Return whether this code runs in a Jupyter kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


class NotebookBar:
    """The bar of one run, as a callback that receives its rounds."""

    def __init__(self, label: str, rounds: int, period: Period | None) -> None:
        self.label, self.rounds = label, rounds
        self.round, self.text = 0, ""
        self.state = StateText(period)
        self.shown: Any = None
        self.updated = 0.0

    def __call__(self, finished: Round) -> None:
        """Show a round, several times per second at most."""
        self.round, self.text = finished.record.round, self.state.after(finished.record)
        if self.shown is not None and time.monotonic() - self.updated < SECONDS_BETWEEN_UPDATES:
            return
        self.show()

    def show(self) -> None:
        """Display the bar as of the last round."""
        from IPython.display import display

        self.updated = time.monotonic()
        if self.shown is None:
            self.shown = display(self, display_id=True)  # type: ignore[no-untyped-call]  # not annotated
        else:
            self.shown.update(self)

    def __repr__(self) -> str:
        return f"{self.label}: round {self.round}/{self.rounds} {self.text}".rstrip()

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.round}" max="{self.rounds}" style="width: 16em"></progress>'
        return f"<div>{escaped(self.label)} {bar} round {self.round}/{self.rounds} {escaped(self.text)}</div>"


BarsFor = Callable[[Settings, int], list[RoundCallback]]
"""Returns the callbacks that show the progress of a run, which has finished a number of rounds."""


@contextmanager
def shown_progress(show: bool | None) -> Iterator[BarsFor]:
    """Show a bar for each run, by default in notebooks only."""
    notebook = in_notebook()
    if not (notebook if show is None else show):
        yield lambda settings, done: []
    elif notebook:
        bars: list[NotebookBar] = []

        def add(settings: Settings, done: int) -> list[RoundCallback]:
            bars.append(NotebookBar(label_of(settings), settings.simulation.rounds, settings.method.reports.period))
            return [bars[-1]]

        try:
            yield add
        finally:
            for bar in bars:
                if bar.round:
                    bar.show()
    else:
        with RunProgress(quiet=False) as progress:
            yield lambda settings, done: [
                progress.watch(label_of(settings), settings.simulation.rounds, settings.method.reports.period, done)
            ]
