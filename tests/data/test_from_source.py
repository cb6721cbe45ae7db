import datetime
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedrema
from fedrema.data import federation_from, load_user_data, read_user_table
from fedrema.data.preprocessing import fit_preprocessing, local_statistics, merge_statistics
from fedrema.data.roles import TableOptions
from fedrema.errors import BadInput

COLUMNS = {
    "hospital": ["north", "north", "north", "south", "south", "south"],
    "age": [30.0, 40.0, None, 50.0, 20.0, 35.0],
    "smokes": [True, False, None, True, True, False],
    "colour": ["red", "blue", None, "red", "red", "blue"],
    "day": [datetime.date(2024, 1, 1 + number) for number in range(6)],
    "stay": [1, 2, 3, 4, 5, 60],
}
SETTINGS = {"target": "stay", "client_column": "hospital", "task": "regression"}


def check(federation):
    assert federation.names == ("north", "south")
    assert federation.task.name == "regression"
    assert federation.y.tolist() == [1, 2, 3, 4, 5, 60]
    # age and whether it is missing; smokes, colour and day: two categories and other, or a number
    assert federation.x.shape[0] == 6
    names = federation.preprocessing.output_names
    assert names[0] == "age"
    assert names[-1] == "day"
    assert "smokes=True" in names
    assert "colour=(other)" in names
    assert federation.preprocessing.describe()[-1]["kind"] == "days since 1970-01-01"


def test_a_pandas_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COLUMNS)
    plain = federation_from(frame, **SETTINGS)
    check(plain)
    typed = frame.astype({"age": "Float64", "smokes": "boolean", "colour": "category", "stay": "Int64"})
    typed["day"] = pandas.to_datetime(frame["day"]).dt.tz_localize("UTC")
    assert federation_from(typed, **SETTINGS).fingerprint == plain.fingerprint
    by_client = {name: part.drop(columns="hospital") for name, part in frame.groupby("hospital")}
    assert federation_from(by_client, target="stay", task="regression").fingerprint == plain.fingerprint


def test_pandas_frames_with_other_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"client": [1, 1, 2, 2], "y": [0, 1, 0, 1], 7: [1, 2, 3, 4]})
    frame["wait"] = pandas.to_timedelta([1, 2, 3, 4], unit="D")
    federation = federation_from(frame)
    assert federation.preprocessing.output_names == ("7", "wait")
    assert federation.names == ("1", "2")
    frame["list"] = [[1], [2], [3], [4]]
    with pytest.raises(BadInput, match=r"column 'list' holds list; valid are numbers, texts, true or false, and dates"):
        federation_from(frame)
    frame.columns = ["client", "y", "a", "a", "b"]
    with pytest.raises(BadInput, match="the table has two columns named 'a'"):
        federation_from(frame)
    parts = {"a": pandas.DataFrame({"y": [0, 1], "x": [1, 2]}), "b": pandas.DataFrame({"y": [0.0]})}
    with pytest.raises(BadInput, match="client 'a' has a column 'x' and client 'b' has none"):
        federation_from(parts)
    parts["b"] = parts["a"][:0]
    with pytest.raises(BadInput, match="client 'b' has no rows"):
        federation_from(parts)
    parts["b"] = pandas.DataFrame({"y": [0.0, None], "x": [1, 2]})
    with pytest.raises(BadInput, match=r"the target 'y' is missing in row 1 of the table of client 'b'"):
        federation_from(parts)


def test_a_polars_frame():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(COLUMNS)
    plain = federation_from(frame, **SETTINGS)
    check(plain)
    typed = frame.with_columns(
        polars.col("colour").cast(polars.Categorical),
        polars.col("day").cast(polars.Datetime("ns")).dt.replace_time_zone("UTC"),
        (polars.col("stay") * 1.0).cast(polars.Float32),
    )
    assert federation_from(typed, **SETTINGS).fingerprint == plain.fingerprint
    with_length = frame.with_columns(wait=polars.duration(days=polars.col("stay")))
    assert "wait" in federation_from(with_length, **SETTINGS).preprocessing.output_names


def test_a_function_that_returns_a_frame(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_frame.py").write_text(
        "import pandas\n"
        "def load():\n"
        "    return pandas.DataFrame({'who': [1, 1, 2, 2], 'a': [1, 2, 3, 4], 'y': list('abab')})"
    )
    try:
        federation = load_user_data("my_frame:load", options=TableOptions(client_column="who"))
        assert federation.info == {"federation": "my_frame:load"}
        with pytest.raises(BadInput, match=r"--federation my_frame:load: no column is named client or site"):
            load_user_data("my_frame:load")
    finally:
        sys.modules.pop("my_frame", None)


def test_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(COLUMNS)
    parquet.write_table(table, tmp_path / "all.parquet", row_group_size=2)
    plain = federation_from(tmp_path / "all.parquet", **SETTINGS)
    check(plain)
    typed = table.set_column(3, "colour", table["colour"].dictionary_encode())
    typed = typed.set_column(5, "stay", table["stay"].cast(pyarrow.decimal128(21, 1)))
    typed = typed.set_column(4, "day", table["day"].cast(pyarrow.timestamp("ns")))
    typed = typed.append_column("nothing", pyarrow.nulls(6))
    parquet.write_table(typed, tmp_path / "typed.parquet")
    assert federation_from(tmp_path / "typed.parquet", **SETTINGS).fingerprint == plain.fingerprint
    for name in ("north", "south"):
        mine = table.filter(pyarrow.compute.equal(table["hospital"], name)).drop_columns("hospital")
        (tmp_path / "sites").mkdir(exist_ok=True)
        parquet.write_table(mine, tmp_path / "sites" / f"{name}.parquet")
    assert federation_from(tmp_path / "sites", target="stay", task="regression").fingerprint == plain.fingerprint


def test_damaged_parquet_files_are_refused(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(BadInput, match=r"a.parquet is not a Parquet file or is damaged"):
        load_user_data(str(tmp_path / "a.parquet"))
    lists = pyarrow.table({"client": [1, 2], "y": [0, 1], "a": [[1], [2]]})
    parquet.write_table(lists, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"column 'a' has the type list<.*>; valid are numbers, texts"):
        load_user_data(str(tmp_path / "a.parquet"))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:8] + b"\xff" * 60 + whole[68:])
    with pytest.raises(BadInput, match=r"a.parquet"):
        load_user_data(str(tmp_path / "a.parquet"))


def test_parquet_needs_an_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"which needs pyarrow: install it with pip install 'fedrema\[parquet\]'\.$"):
        load_user_data(str(tmp_path / "a.parquet"))


class Pictures(Dataset):
    def __init__(self, samples, mode="RGB"):
        self.samples, self.mode = samples, mode

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        return Image.new(self.mode, (5, 4), number), number % 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(np.ones(3), 0.5), (np.zeros(3), 0.25)])


def test_pytorch_datasets():
    generator = torch.Generator().manual_seed(0)
    parts = {name: TensorDataset(torch.randn(6, 3, generator=generator), torch.arange(6) % 2) for name in ("b", "a")}
    federation = federation_from(parts)
    assert federation.names == ("b", "a")
    assert federation.sample_shape == (3,)
    pairs = {name: (part, TensorDataset(torch.randn(2, 3), torch.tensor([0, 1]))) for name, part in parts.items()}
    assert federation_from(pairs).split("test").count.tolist() == [2, 2]
    assert federation_from({"a": Pictures(4), "b": Pictures(2)}).sample_shape == (3, 4, 5)
    assert federation_from({"a": Pictures(4, "L"), "b": Pictures(2, "L")}).x.dtype == np.uint8
    assert federation_from({"a": Stream(), "b": Stream()}).task.name == "regression"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "the dataset of client 'a' is empty"),
        ([1.0], r"sample 0 of client 'a' is float; it must be \(x, y\)"),
        ([([1.0], 0), ([1.0, 2.0], 0)], r"sample 1 of client 'a' has the shape \(2,\), the first \(1,\)"),
        ([({"image": 1}, 0)], "a dataset holds dict; samples must be tensors, arrays, images or numbers"),
    ],
)
def test_unsuitable_pytorch_datasets_are_refused(samples, message):
    class Given(Pictures):
        def __getitem__(self, number):
            return samples[number]

    with pytest.raises(BadInput, match=message):
        federation_from({"a": Given(len(samples))})
    with pytest.raises(BadInput, match="--scale has no meaning for PyTorch datasets"):
        federation_from({"a": Pictures(3)}, scale="none")


class ClassLabel:
    names = ("sick", "well")


class HuggingFace:
    """The methods of a Hugging Face dataset that are used."""

    def __init__(self, columns, features=None):
        self.columns, self.features = columns, features or dict.fromkeys(columns)
        self.column_names = list(columns)

    def with_format(self, kind):
        assert kind == "numpy"
        return self

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows):
        return {name: np.asarray(values[rows]) for name, values in self.columns.items()}


def test_hugging_face_datasets():
    columns = {"site": ["a", "a", "b", "b"], "age": [1, 2, 3, 4], "label": [0, 1, 1, 0], "note": ["x", None, "y", "x"]}
    columns["seen"] = np.array(["2024-01-01", "NaT", "2024-01-02", "2024-01-03"], "datetime64[s]")
    dataset = HuggingFace(columns, {**dict.fromkeys(columns), "label": ClassLabel()})
    federation = federation_from(dataset)
    assert federation.class_names == ("sick", "well")
    assert federation.preprocessing.output_names[0] == "age"
    both = {"train": dataset, "test": dataset}
    assert federation_from(both).split("test").count.tolist() == [2, 2]
    assert federation_from({"one": dataset, "two": dataset}).names == ("one", "two")


def test_hugging_face_datasets_of_images():
    images = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
    dataset = HuggingFace({"image": images, "label": [0, 1, 1, 0], "site": ["a", "a", "b", "b"]})
    federation = federation_from(dataset)
    assert federation.sample_shape == (3, 2, 3)
    assert federation.names == ("a", "b")
    named = HuggingFace(dataset.columns, {"image": None, "label": ClassLabel(), "site": None})
    assert federation_from(named).class_names == ("sick", "well")
    unlabelled = HuggingFace({**dataset.columns, "label": [0, 1, -1, 0]}, named.features)
    with pytest.raises(BadInput, match=r"the target 'label' is missing in row 2\."):
        federation_from(unlabelled)
    both = federation_from({"train": dataset, "test": dataset})
    assert both.split("test").count.tolist() == [2, 2]
    mixed = HuggingFace({**dataset.columns, "age": [1, 2, 3, 4]})
    with pytest.raises(BadInput, match=r"column 'image' holds arrays; .*: use --columns image"):
        federation_from(mixed)
    assert federation_from(mixed, columns="image").fingerprint == federation.fingerprint


def test_other_objects_are_refused():
    with pytest.raises(BadInput, match=r"a federation cannot be made from int; valid are pandas and polars frames"):
        federation_from(3)
    with pytest.raises(BadInput, match="a federation cannot be made from dict"):
        federation_from({})
    given = fedrema.Federation.from_arrays(np.ones((2, 1)), [0, 1], [0, 0])
    assert federation_from(given) is given


def test_a_table_is_trained_saved_and_read_again(tmp_path):
    generator = np.random.default_rng(0)
    lines = ["client,a,b,y"]
    for row in range(80):
        a = generator.normal()
        lines.append(f"{row % 4},{a:.3f},{'uv'[row % 2]},{a * 2 + row % 2:.3f}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    federation = federation_from(tmp_path / "t.csv")
    federation.save(tmp_path / "t.npz")
    read = fedrema.Federation.load(tmp_path / "t.npz")
    assert read.preprocessing == federation.preprocessing
    assert read.fingerprint == federation.fingerprint
    run = fedrema.run("fedavg", federation=str(tmp_path / "t.csv"), rounds=2, out=tmp_path / "run", quiet=True)
    assert len(run.rounds) == 2
    # Another site's samples, preprocessed as those of the run.
    (tmp_path / "new.csv").write_text("client,a,b,y\nnew,0.5,w,1.5\nnew,1.5,u,2.5\n")
    new = federation_from(tmp_path / "new.csv", preprocessing=federation.preprocessing, task="regression")
    assert new.sample_shape == federation.sample_shape


def test_a_site_computes_statistics_from_its_own_table(tmp_path):
    rows = {"north": "1,u,0\n2,v,1\n3,u,1\n", "south": "4,u,0\n,w,1\n6,w,0\n"}
    (tmp_path / "sites").mkdir()
    for name, text in rows.items():
        (tmp_path / "sites" / f"{name}.csv").write_text(f"a,b,y\n{text}")
    together = federation_from(tmp_path / "sites")
    parts, masks = [], {}
    for name in rows:
        file = str(tmp_path / "sites" / f"{name}.csv")
        table = read_user_table(file, client=name)
        masks[name] = table.test_mask(0, 0.2)
        parts.append(local_statistics(table, ~masks[name]))
    fitted = fit_preprocessing(merge_statistics(parts), TableOptions())
    assert fitted == together.preprocessing
    alone = [
        load_user_data(
            str(tmp_path / "sites" / f"{name}.csv"), class_names=("0", "1"), preprocessing=fitted, client=name
        )
        for name in rows
    ]
    np.testing.assert_array_equal(np.concatenate([each.x for each in alone]), together.x)
    assert np.concatenate([each.test for each in alone]).tolist() == together.test.tolist()
    assert len(read_user_table(str(tmp_path / "sites"))) == 6
    (tmp_path / "new.csv").write_text("a,b\n1,u\n")
    assert read_user_table(str(tmp_path / "new.csv"), client="new", need_target=False).targets == {}
    with pytest.raises(BadInput, match=r"is not a .csv, .csv.gz or .parquet file or a folder of them or of images"):
        read_user_table(str(tmp_path / "absent.npz"))


def test_images_of_another_site_get_the_size_of_the_federation(tmp_path):
    for site, size in (("a", (6, 4)), ("b", (9, 9))):
        for kind in ("x", "y"):
            (tmp_path / site / site / kind).mkdir(parents=True)
            for number in range(3):
                Image.new("L", size, number).save(tmp_path / site / site / kind / f"{number}.png")
    first = load_user_data(str(tmp_path / "a"))
    second = load_user_data(str(tmp_path / "b"), preprocessing=first.preprocessing)
    assert first.sample_shape == second.sample_shape == (1, 4, 6)
    assert read_user_table(str(tmp_path / "b")).inputs["image"].pixels.shape == (6, 1, 9, 9)
