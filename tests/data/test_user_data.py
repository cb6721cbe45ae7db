import sys

import numpy as np
import pytest

from fedrema.data import load_user_data
from fedrema.errors import BadInput


def client(path, samples=5, **changes):
    arrays = {"x": np.ones((samples, 2), np.float32), "y": np.arange(samples) % 2} | changes
    np.savez(path, **arrays)


MODULE = """
import numpy as np
from fedrema.data import Federation
from fedrema.errors import BadInput
x, y, who = np.ones((6, 2)), np.arange(6) % 2, np.repeat([4, 5], 3)
def federation(): return Federation.from_arrays(x, y, who, info={"by": "me"})
def three(): return x, y, who
def four(): return x, y, who, ["train", "test", "train"] * 2
def keys(): return {"x": x, "y": y, "client": who, "classes": 7}
def clients(): return {"bob": (x, y), "ann": (x[:2], y[:2])}
def raises(): raise RuntimeError("no such drive")
def refuses(): raise BadInput("not today")
def reads(): return np.load("gone.npy")
def number(): return 3
def empty(): return {}
def other(): return {"bob": x}
def broken(): return x, y[:2], who
def objects(): return {"bob": ([[1], [1, 2]], y)}
constant = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_own_data.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_own_data", None)


def test_data_from_one_file(tmp_path):
    np.savez(tmp_path / "all.npz", x=np.ones((6, 2)), y=np.arange(6) % 2, client=np.repeat([4, 5], 3))
    assert load_user_data(str(tmp_path / "all.npz")).names == ("4", "5")


def test_data_from_a_folder_with_a_file_per_client(tmp_path):
    for name, samples in (("10", 5), ("9", 10), ("2", 3)):
        client(tmp_path / f"{name}.npz", samples)
    (tmp_path / ".hidden.npz").touch()
    federation = load_user_data(str(tmp_path), data_seed=3, test_share=0.4)
    assert federation.names == ("2", "9", "10")
    assert federation.split("test").count.tolist() == [1, 4, 2]
    assert federation.info == {"federation": tmp_path.name}


def test_data_from_a_folder_with_its_own_splits(tmp_path):
    client(tmp_path / "north.npz", split=["train"] * 4 + ["test"])
    client(tmp_path / "east.npz", split=[0, 1, 0, 0, 1])
    with pytest.raises(BadInput, match="split"):
        load_user_data(str(tmp_path))
    client(tmp_path / "east.npz", split=["train", "test", "train", "train", "test"])
    federation = load_user_data(str(tmp_path))
    assert federation.names == ("east", "north")
    assert federation.split("test").count.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("function", "names", "classes"),
    [
        ("federation", ("4", "5"), 2),
        ("three", ("4", "5"), 2),
        ("four", ("4", "5"), 2),
        ("keys", ("4", "5"), 7),
        ("clients", ("bob", "ann"), 2),
    ],
)
def test_data_from_a_function(module, function, names, classes):
    path = list(sys.path)
    federation = load_user_data(f"my_own_data:{function}")
    assert (federation.names, federation.classes) == (names, classes)
    assert sys.path == path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "my_own_data:raises",
            r"my_own_data:raises raised RuntimeError: no such drive \(my_own_data.py, line \d+\)\.$",
        ),
        ("my_own_data:reads", r"raised FileNotFoundError: .*gone\.npy' \(my_own_data.py, line 13\)\.$"),
        (
            "my_broken_module:load",
            r"cannot be loaded: ZeroDivisionError: division by zero \(my_broken_module.py, line 1\)",
        ),
        ("my_own_data:refuses", "^not today$"),
        ("my_own_data:number", r"returned int; it must return a Federation, arrays \(x, y, client"),
        ("my_own_data:empty", "returned dict"),
        ("my_own_data:other", "returned dict"),
        ("my_own_data:broken", "--federation my_own_data:broken: y has 2 entries but x has 6"),
        ("my_own_data:objects", "x of client 'bob' is not an array with rows of equal length"),
        ("my_own_data:absent", "my_own_data has no 'absent'"),
        ("my_own_data:constant", "is not a function but int"),
        ("my_absent_module:f", "cannot be loaded: ModuleNotFoundError: No module named 'my_absent_module'"),
        ("my_broken_module:f", "cannot be loaded: ZeroDivisionError"),
        ("nowhere.npz", "--federation nowhere.npz does not exist; valid are a .npz, .csv, .csv.gz"),
        ("my_own_data.py", "my_own_data.py is a file of an unknown kind"),
    ],
)
def test_invalid_sources_are_refused(module, source, message):
    with pytest.raises(BadInput, match=message):
        load_user_data(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": np.ones((5, 3), np.float32)},
            r"client 'b' has samples of the shape \(3,\) and type float32, client 'a' ",
        ),
        ({"x": np.ones((5, 2), np.uint8)}, "type uint8"),
        ({"y": np.zeros(4, int)}, r"client 'b' has x of the shape \(5, 2\) and y of the shape \(4,\)"),
        ({"x": np.float32(1), "y": np.int64(1)}, r"x of the shape \(\)"),
        ({"x": np.ones((0, 2), np.float32), "y": np.zeros(0, int)}, "there must be at least one sample"),
        ({"split": np.zeros(5, int)}, "client 'a' has no 'split' but other clients have"),
        ({"y": np.full(5, -2)}, "y has the label -2 in row 0 of client 'b'"),
        (
            {"x": np.array([[1, 2]] * 4 + [[1, np.nan]], np.float32)},
            "the first is nan in row 4 of client 'b', column 1",
        ),
    ],
)
def test_folders_with_incompatible_clients_are_refused(tmp_path, changes, message):
    client(tmp_path / "a.npz")
    client(tmp_path / "b.npz", **changes)
    with pytest.raises(BadInput, match=f"--federation .*{message}"):
        load_user_data(str(tmp_path))


def test_a_folder_without_clients_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"is a folder without data; valid are a .npz"):
        load_user_data(str(tmp_path))
