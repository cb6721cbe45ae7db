"""Settings with which users' own data is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedrema.data.preprocessing import Preprocessing
from fedrema.data.roles import TableOptions


@dataclass(frozen=True)
class LoadOptions:
    """Settings for what the data does not specify itself."""

    data_seed: int = 0
    """Seed of the test splits, if the data has no `split`."""
    test_share: float = 0.2
    """Share of test samples, if the data has no `split`."""
    class_names: Sequence[str] | None = None
    """The classes of the run that the data is used for; None: those of the data."""
    table: TableOptions = field(default_factory=TableOptions)
    """How to read and preprocess tables and images."""
    client: str | None = None
    """Name of the client of a table file in which no column names the clients."""
    preprocessing: Preprocessing | None = None
    """The preprocessing of the run that the data is used for; None: it is fitted to the data."""

    rare: bool | None = None
    """Whether a class is rare, so that splits are stratified; None: decided by the data."""

    @property
    def for_arrays(self) -> dict[str, Any]:
        """The arguments of `Federation.from_arrays` that these options determine."""
        return {
            "data_seed": self.data_seed,
            "test_share": self.test_share,
            "class_names": self.class_names,
            "task": None if self.table.task == "auto" else self.table.task,
            "rare": self.rare,
        }
