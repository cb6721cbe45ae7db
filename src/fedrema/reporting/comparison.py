"""The comparison of runs in Python: what `fedrema compare` shows, as values, tables and figures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedrema.reporting.curves import curves_figure
from fedrema.reporting.groups import Difference, Group, group_runs, paired_differences
from fedrema.reporting.tables import (
    PrintableTable,
    comparison_csv,
    comparison_html,
    comparison_latex,
    comparison_markdown,
    comparison_rows,
    comparison_table,
)
from fedrema.runs.run import Run

if TYPE_CHECKING:
    from fedrema.base.figures import Figure


class Comparison:
    """Runs side by side; made by `fedrema.compare`. A notebook shows it as tables."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.groups: list[Group] = group_runs(self.runs)
        """Runs that differ only in their training seed."""

    def table(self) -> PrintableTable:
        """Return the table of results, to be printed."""
        return comparison_table(self.runs)

    def rows(self, quantity: str = "honest", reference: str | None = None) -> list[dict[str, str | int | float | None]]:
        """Return a row per group with all digits, shares from 0 to 1; `pandas.DataFrame(rows)` makes it a frame.

        `quantity` and `reference` are those of `differences`.
        """
        return comparison_rows(self.runs, quantity, reference)

    def differences(self, quantity: str = "honest", reference: str | None = None) -> list[Difference]:
        """Return the mean paired difference of each group to the reference, with its 95 % interval.

        `quantity` is honest, best, final, worst_tenth, or another in summary.json, such as final_auc; `reference` is a
        method or a label of the table. Default: the best group.
        """
        return paired_differences(self.runs, quantity, reference)

    def plot(self, quantity: str | None = None, size: tuple[float, float] = (7.2, 4.4)) -> "Figure":
        """Return a Matplotlib figure with the mean curve of each group, and a band over its seeds.

        `quantity` is any number in a round's record, such as loss. Default: the primary metric. `size` is in inches.
        """
        return curves_figure(self.runs, quantity, size)

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        return comparison_markdown(self.runs)

    def latex(self) -> str:
        """Return the tables as LaTeX (booktabs)."""
        return comparison_latex(self.runs)

    def csv(self) -> str:
        """Return the rows as CSV."""
        return comparison_csv(self.runs)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return comparison_html(self.runs)
