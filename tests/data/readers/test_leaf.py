import json

import numpy as np
import pytest

from fedrema.data import load_user_data
from fedrema.data.roles import TableOptions
from fedrema.errors import BadInput


def write(path, data, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(data),
        "num_samples": [len(y) for _, y in data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }
    path.write_text(json.dumps(content | changes))
    return str(path)


ONE = {"f01": ([[0.5, 1], [0, 1]], [3, 4]), "f02": ([[1, 1], [2.5, 0], [0, 0]], [4, 4, 3])}


def test_one_file(tmp_path):
    federation = load_user_data(write(tmp_path / "all.json", ONE))
    assert federation.names == ("f01", "f02")
    assert federation.class_names == ("3", "4")
    assert federation.x.dtype == np.float32
    assert federation.split("test").count.tolist() == [1, 1]


def test_a_folder_with_train_and_test(tmp_path):
    write(tmp_path / "train" / "a.json", {"f01": ONE["f01"]})
    write(tmp_path / "train" / "b.json", {"f02": ONE["f02"]})
    write(tmp_path / "test" / "a.json", {"f01": ([[9.0, 9.0]], [3])})
    federation = load_user_data(str(tmp_path))
    assert federation.split("train").count.tolist() == [2, 3]
    assert federation.split("test").count.tolist() == [1, 0]


def test_texts_of_one_length_become_numbers_of_characters(tmp_path):
    write(tmp_path / "plays.json", {"romeo": (["abc", "bca"], ["d", "a"]), "juliet": (["cab", "aad"], ["b", "a"])})
    federation = load_user_data(str(tmp_path))
    assert federation.info == {"federation": tmp_path.name, "characters": "abcd"}
    assert federation.x.tolist()[0] == [0, 1, 2]
    assert federation.x.dtype == np.int32
    assert federation.class_names == ("a", "b", "d")


def test_a_quantity(tmp_path):
    data = {"a": ([[0.5], [1.0]], [0.25, 0.5]), "b": ([[0], [1]], [0, 3])}
    assert load_user_data(write(tmp_path / "q.json", data)).task.name == "regression"


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (ONE, {"num_samples": [2, 4]}, r"all.json: user 'f02' must have 4 samples in user_data, with x and y\.$"),
        (ONE, {"num_samples": [2]}, "users must be unique, and num_samples must have one number for each"),
        (ONE, {"users": ["f01", "f03"]}, "user 'f03' must have 3 samples"),
        (ONE, {"user_data": 3}, "all.json is not a JSON file of LEAF with users, num_samples and user_data"),
        ({}, {}, "all.json has no users"),
        ({"a": (["abc", "ab"], [0, 1])}, {}, "x holds texts of different lengths"),
        ({"a": ([[1, 2], [1]], [0, 1])}, {}, "x of user 'a' must hold numbers of one shape"),
    ],
)
def test_damaged_files_are_refused(tmp_path, data, changes, message):
    with pytest.raises(BadInput, match=message):
        load_user_data(write(tmp_path / "all.json", data, **changes))


def test_settings_of_tables_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"--scale has no meaning for .*all.json, which holds LEAF data; leave it out"):
        load_user_data(write(tmp_path / "all.json", ONE), options=TableOptions(scale="none"))
