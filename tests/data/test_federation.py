import json
import zipfile

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from fedrema.data import Federation, federation_from, to_float
from fedrema.errors import BadInput


def small(**changes):
    arrays = {
        "x": np.arange(14, dtype=np.float32).reshape(7, 2),
        "y": np.array([0, 1, 2, 0, 1, 2, 0]),
        "client": np.array([10, 2, 10, 2, 10, 10, 3]),
        "split": np.array([0, 0, 1, 1, 0, 0, 0]),
    }
    return Federation.from_arrays(**(arrays | changes))


def same(a, b):
    return a.fingerprint == b.fingerprint and a.info == b.info and a.names == b.names


def test_clients_are_in_ascending_order_of_number():
    federation = small()
    assert federation.names == ("2", "3", "10")
    assert (len(federation), federation.classes, federation.sample_shape) == (3, 3, (2,))
    assert federation.client.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert federation.label_counts().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 2]]
    assert federation.label_counts("test").tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert small(client=list("babaabc")).names == ("a", "b", "c")


def test_splits_are_padded_with_zeros():
    train, test = small().split("train"), small().split("test")
    assert train.count.tolist() == [1, 1, 3]
    assert train.x.tolist() == [
        [[2, 3], [0, 0], [0, 0]],
        [[12, 13], [0, 0], [0, 0]],
        [[0, 1], [8, 9], [10, 11]],
    ]
    assert train.y.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 2]]
    assert (test.count.tolist(), test.y.tolist()) == ([1, 0, 1], [[0], [0], [2]])
    assert small(split=np.zeros(7, bool)).split("test").x.shape == (3, 0, 2)
    with pytest.raises(BadInput, match="part 'all' is unknown; valid are train and test"):
        small().split("all")


def test_reorder_moves_names_with_their_clients():
    federation = small()
    turned = federation.reorder([2, 0, 1])
    assert turned.names == ("10", "2", "3")
    before, after = federation.split("train"), turned.split("train")
    assert (after.x == before.x[[2, 0, 1]]).all()
    assert (after.count == before.count[[2, 0, 1]]).all()
    assert turned.fingerprint != federation.fingerprint
    assert turned.reorder([1, 2, 0]).fingerprint == federation.fingerprint
    with pytest.raises(BadInput, match=r"order \[0, 0, 1\] is not a permutation of the rows 0 to 2"):
        federation.reorder([0, 0, 1])


def test_the_fingerprint_depends_on_the_content_only():
    base = small()
    changes = [
        {"x": np.arange(14, dtype=np.uint8).reshape(7, 2)},
        {"x": np.arange(1, 15, dtype=np.float32).reshape(7, 2)},
        {"x": np.arange(14, dtype=np.float32).reshape(7, 2, 1)},
        {"y": [0, 1, 2, 0, 1, 2, 1]},
        {"client": [10, 2, 10, 2, 10, 10, 4]},
        {"client": [10, 2, 10, 2, 10, 3, 3]},
        {"split": [0, 0, 1, 1, 0, 1, 0]},
        {"classes": 4},
    ]
    prints = {small(**change).fingerprint for change in changes} | {base.fingerprint}
    assert len(prints) == len(changes) + 1
    assert small(info={"note": 1}).fingerprint == base.fingerprint
    assert len(base.fingerprint) == 64


@pytest.mark.parametrize("client", [[10, 2, 10, 2, 10, 10, 3], list("babaabc"), ["07", "7", "07", "7", "7", "8", "8"]])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_a_saved_federation_is_loaded_unchanged(tmp_path, client, kind):
    federation = small(client=client, x=np.arange(14, dtype=kind).reshape(7, 2), info={"note": "ä"}, classes=5)
    for each in (federation, federation.reorder(range(len(federation))[::-1])):
        each.save(tmp_path / "folder" / "it.npz")
        assert same(Federation.load(tmp_path / "folder" / "it.npz"), each)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["it.npz"]


def test_a_users_file_needs_only_three_arrays(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((10, 3)), y=np.arange(10) % 2, client=np.repeat([0, 1], 5))
    federation = Federation.load(tmp_path / "own.npz")
    assert federation.x.dtype == np.float32
    assert federation.info == {"federation": "own.npz"}
    assert [int(n) for n in federation.split("test").count] == [1, 1]


def test_the_random_test_split_depends_on_the_name_not_the_row():
    x = np.arange(30, dtype=np.float32)[:, None]
    y, client = np.zeros(30, int), np.repeat(["a", "b", "c"], 10)
    everyone = Federation.from_arrays(x, y, client)
    without = Federation.from_arrays(x[10:], y[10:], client[10:])
    assert (everyone.test[10:] == without.test).all()
    assert everyone.test.sum() == 6
    assert (everyone.test != Federation.from_arrays(x, y, client, data_seed=1).test).any()
    assert Federation.from_arrays(x, y, client, test_share=0.5).test.sum() == 15


def test_all_forms_of_split_are_equivalent():
    words = np.array(["train", "train", "test", "test", "train", "train", "train"])
    assert small().fingerprint == small(split=words).fingerprint
    assert small().fingerprint == small(split=small().test[[3, 0, 4, 1, 5, 6, 2]].tolist()).fingerprint


def test_accepted_types_of_arrays():
    for kind in (np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint64):
        assert small(x=np.ones((7, 2), kind)).x.dtype == np.int32
    assert small(x=np.full((7, 2), 2**40)).x.dtype == np.int64
    assert small(x=np.ones((7, 2), np.float64)).x.dtype == np.float32
    assert small(x=torch.ones(7, 2), y=torch.zeros(7, dtype=torch.long)).y.dtype == np.int64
    assert small(y=np.array([0.0, 1, 2, 0, 1, 2, 0])).y.dtype == np.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": np.full((7, 2), np.nan)},
            r"x has NaN or infinite values in 7 samples, the first is nan in row 0 \(client '10'\), column 0;"
            " all values must be finite",
        ),
        (
            {"x": np.r_[np.zeros((6, 2)), [[0, 1e300]]]},
            r"x has NaN or infinite values in 1 samples, the first is 1e\+300 in row 6 \(client '3'\), column 1;"
            " all values must be finite",
        ),
        ({"x": np.array([["a", "b"]] * 7)}, "x has the type <U1; valid are uint8 for pixels, floats and integers"),
        ({"x": np.array([[None, 1]] * 7)}, "x holds Python objects"),
        ({"x": [[1, 2], [1]]}, "x is not an array with rows of equal length"),
        ({"x": torch.ones(7, 2, requires_grad=True)}, "x is not an array with rows of equal length"),
        ({"x": np.zeros(7)}, r"x has the shape \(7,\)"),
        ({"x": np.zeros((0, 2))}, r"x has the shape \(0, 2\)"),
        ({"y": np.zeros(6, int)}, "y has 6 entries but x has 7 samples"),
        ({"y": np.zeros((6, 2), int)}, r"y has the shape \(6, 2\); labels need one row for each of the 7 samples"),
        ({"y": np.zeros((7, 2, 2), int)}, r"y has the shape \(7, 2, 2\)"),
        ({"y": np.full((7, 2), 2)}, r"y has 2 in row 0 \(client '10'\), label 0; labels must be 0 or 1"),
        ({"y": np.full(7, 0.5)}, "y is 0.5 for every sample: there is nothing to predict"),
        ({"y": [0.5, np.nan, 1, 1, 1, 1, 1]}, r"y is nan in row 1 \(client '2'\); every sample needs a finite number"),
        (
            {"y": np.full(7, 0.5), "task": "multiclass"},
            r"y has values that are not whole numbers, such as 0.5 in row 0 \(client '10'\)",
        ),
        ({"y": np.r_[np.zeros(6), np.nan]}, "y has values that are not whole numbers, such as nan in row 6"),
        ({"y": np.full(7, 1j)}, "y has the type complex128; labels must be whole numbers or strings"),
        ({"y": ["a"] * 6 + [""]}, r"y has an empty label in row 6 \(client '3'\)"),
        ({"y": ["a"] * 7, "classes": 2}, "y holds strings, but with classes=2 it must hold 0 to 1"),
        ({"class_names": ["0", "1"]}, r"y has the label '2' in row 2 \(client '10'\); the classes are 0, 1"),
        ({"class_names": ["0", "0"]}, "class_names contains a class twice: 0, 0"),
        ({"classes": 3, "class_names": ["a"]}, "class_names has 1 names for 3 classes"),
        (
            {"y": np.array([0, 1, 2, -1, 0, 0, 0])},
            r"y has the label -1 in row 3 \(client '2'\); labels must be 0, 1, 2, … or strings",
        ),
        ({"classes": 2}, r"y has the label 2 in row 2 \(client '10'\); labels must be between 0 and 1"),
        ({"classes": 0}, "classes is 0; it must be at least 1"),
        ({"client": np.zeros(3, int)}, "client has 3 entries"),
        (
            {"client": np.ones(7)},
            r"client has the type float64; it must hold whole numbers or strings:"
            r" client.astype\(int\) converts 1.0 to 1",
        ),
        (
            {"client": [1, 2, np.nan, 1, 1, 1, 1]},
            "client has nan in row 2; client identifiers must be whole numbers or strings",
        ),
        (
            {"split": np.ones(7)},
            r"split has the value 1.0 in row 0 \(client '10'\); valid are 'train' and 'test', or 0 and 1",
        ),
        ({"split": ["train"] * 6 + ["valid"]}, r"split has the value valid in row 6 \(client '3'\)"),
        ({"split": [0, 0, 0, 0, 0, 0, 2]}, "split has the value 2 in row 6"),
        ({"split": [0, 0, 0, 0, 0, 0, 1]}, "client '3' has only test samples"),
        ({"names": ["2", "3", "10", "11"]}, "client '11' has no samples"),
        ({"names": ["2", "3"]}, "client has '10', which is not among the 2 names"),
        ({"names": ["2", "3", "10", "10"]}, "names has 4 entries with duplicates"),
        ({"data_seed": -1}, "--data-seed -1 is negative"),
        ({"test_share": 1.0}, "--test-share 1.0 must be between 0 and 1"),
    ],
)
def test_invalid_arrays_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        small(**change)


def damaged(path, how):
    small().save(path)
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        place = content.index(b"PK", 10) - 60
        path.write_bytes(content[:place] + bytes(40) + content[place + 40 :])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("x,y\n1,2\n")
    elif how == "array":
        np.save(path.with_suffix(".npy"), np.zeros(3))
        path.with_suffix(".npy").replace(path)
    elif how == "no header":
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("x", "y", "client"):
                archive.writestr(f"{name}.npy", b"garbage")


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "text", "array", "no header"])
def test_damaged_files_are_refused(tmp_path, how):
    damaged(tmp_path / "it.npz", how)
    with pytest.raises(BadInput, match=r"it\.npz (is not a \.npz file or is truncated|cannot be read|lacks|: )"):
        Federation.load(tmp_path / "it.npz")


def test_files_with_missing_or_unknown_arrays_are_refused(tmp_path):
    path = tmp_path / "it.npz"
    with pytest.raises(BadInput, match=r"does not exist or is not a file; give a .npz file with x, y, client"):
        Federation.load(path)
    np.savez(path, x=np.zeros((2, 2)), y=np.zeros(2))
    with pytest.raises(BadInput, match=r"lacks 'client': it must hold x, y, client and may hold split, meta, nothing"):
        Federation.load(path)
    np.savez(path, x=np.array([[None], [1]]), y=np.zeros(2), client=np.zeros(2, int))
    with pytest.raises(BadInput, match=r"cannot be read \(it holds Python objects\)"):
        Federation.load(path)
    np.savez(path, x=np.zeros((2, 2)), y=np.array([0, -1]), client=np.zeros(2, int))
    with pytest.raises(BadInput, match=r"it\.npz: y has the label -1"):
        Federation.load(path)


@pytest.mark.parametrize("meta", ["no json", "[]", json.dumps({"names": [1]}), json.dumps({"classes": "3"})])
def test_invalid_metadata_is_refused(tmp_path, meta):
    np.savez(tmp_path / "it.npz", x=np.zeros((2, 2)), y=[0, 1], client=[0, 0], meta=np.array(meta))
    with pytest.raises(BadInput, match="'meta' is not the JSON object"):
        Federation.load(tmp_path / "it.npz")


def test_an_edited_file_is_refused(tmp_path):
    path = tmp_path / "it.npz"
    small().save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **arrays | {"y": 2 - arrays["y"]})
    with pytest.raises(BadInput, match=r"it\.npz was changed after it was saved"):
        Federation.load(path)
    arrays["splits"] = arrays.pop("split")
    np.savez(path, **arrays)
    with pytest.raises(BadInput, match="holds 'splits': it must hold x, y, client and may hold split, meta"):
        Federation.load(path)


def test_a_file_without_read_permission_is_refused(tmp_path, monkeypatch):
    small().save(tmp_path / "it.npz")

    def refuse(*arguments, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(BadInput, match=r"cannot read .*: Permission denied"):
        Federation.load(tmp_path / "it.npz")


def test_info_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(BadInput, match="info of the federation must contain JSON values only"):
        small(info={"made by": object()}).save(tmp_path / "it.npz")
    assert not list(tmp_path.iterdir())


def test_on_a_full_disk_the_old_file_is_kept_and_no_other_left(tmp_path, monkeypatch):
    path = tmp_path / "it.npz"
    small().save(path)
    before = path.read_bytes()

    def full(stream, **arrays):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez_compressed", full)
    with pytest.raises(BadInput, match=r"cannot write .*it\.npz: No space left on device"):
        small(classes=9).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_pixels_are_scaled_to_minus_one_to_one_and_floats_are_kept():
    pixels = torch.tensor([0, 255, 51], dtype=torch.uint8)
    assert torch.allclose(to_float(pixels), torch.tensor([-1.0, 1.0, -0.6]))
    assert to_float(pixels, torch.float64).dtype == torch.float64
    assert to_float(torch.tensor([3.5]), torch.float64).item() == 3.5


@pytest.mark.parametrize(
    ("y", "labels", "names"),
    [
        ([0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 0], ()),
        ([1, 2, 1, 2, 1, 2, 1], [0, 1, 0, 1, 0, 1, 0], ("1", "2")),
        ([0, 999_999, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], ("0", "999999")),
        ([2.0, 7.0, 2.0, 2.0, 2.0, 2.0, 2.0], [0, 1, 0, 0, 0, 0, 0], ("2", "7")),
        (["sick", "well", "sick", "sick", "sick", "sick", "sick"], [0, 1, 0, 0, 0, 0, 0], ("sick", "well")),
        (["10", "2", "2", "2", "2", "2", "2"], [1, 0, 0, 0, 0, 0, 0], ("2", "10")),
        (["1", "0", "0", "0", "0", "0", "0"], [1, 0, 0, 0, 0, 0, 0], ()),
        ([True, False, True, True, True, True, True], [1, 0, 1, 1, 1, 1, 1], ("False", "True")),
        (np.array(["b", "a", "b", "b", "b", "b", "b"], object), [1, 0, 1, 1, 1, 1, 1], ("a", "b")),
    ],
)
def test_the_labels_that_occur_are_the_classes(y, labels, names, tmp_path):
    federation = Federation.from_arrays(np.zeros((7, 2)), y, np.zeros(7, int))
    assert federation.y.tolist() == labels
    assert federation.own_class_names == names
    assert federation.class_names == (names or ("0", "1", "2")[: federation.classes])
    federation.save(tmp_path / "it.npz")
    again = Federation.load(tmp_path / "it.npz")
    assert (again.class_names, again.fingerprint) == (federation.class_names, federation.fingerprint)


def test_class_names_are_part_of_the_fingerprint_unless_they_are_the_default_numbers():
    named = Federation.from_arrays(np.zeros((4, 2)), ["a", "b", "a", "b"], np.zeros(4, int))
    plain = Federation.from_arrays(np.zeros((4, 2)), [0, 1, 0, 1], np.zeros(4, int))
    other = Federation.from_arrays(np.zeros((4, 2)), ["c", "d", "c", "d"], np.zeros(4, int))
    assert len({named.fingerprint, plain.fingerprint, other.fingerprint}) == 3
    # The value of all earlier versions: results and checkpoints depend on it.
    assert plain.fingerprint == "d8b8037220d320e23f6f7eec50a20ca07a153b81a4e63548297ef14a3d696372"


def test_classes_are_matched_by_name():
    theirs = Federation.from_arrays(np.zeros((3, 2)), ["well", "sick", "well"], np.zeros(3, int))
    ours = theirs.relabelled(("dead", "sick", "well"))
    assert (ours.y.tolist(), ours.classes, ours.class_names) == ([2, 1, 2], 3, ("dead", "sick", "well"))
    with pytest.raises(BadInput, match="y of client '0' has the label 'sick'; the classes are dead, well"):
        theirs.relabelled(("dead", "well"))


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.arange(100) % 4, None),
        (np.arange(100) % 4 + 1, None),
        (np.arange(1000) % 100, None),
        (np.array(["a", "c"] * 50), None),
        (np.r_[np.arange(99) % 4, 99_999], "0, 1, 2, 3, 99999: 99995 numbers in between are missing, such as 4"),
        (np.arange(100) % 20, "there are 20 classes for 100 samples"),
        (np.arange(3000) % 73 + 18, "they look like a quantity, but fedrema predicts classes"),
        (np.zeros(100, int), "there is only one class"),
    ],
)
def test_suspicious_labels_are_reported_in_one_line(y, words, caplog):
    Federation.from_arrays(np.zeros((len(y), 2)), y, np.zeros(len(y), int))
    if words is None:
        assert not caplog.records
    else:
        (record,) = [record for record in caplog.records if "is rare" not in record.getMessage()]
        assert words in record.getMessage()
        assert "\n" not in record.getMessage()


def test_integers_stay_integers_and_have_the_fingerprint_of_floats(tmp_path):
    whole = np.arange(14).reshape(7, 2)
    kept = small(x=whole)
    assert kept.fingerprint == small(x=whole.astype(np.float32)).fingerprint
    kept.save(tmp_path / "it.npz")
    again = Federation.load(tmp_path / "it.npz")
    assert again.x.dtype == np.int32
    assert again.fingerprint == kept.fingerprint
    large = np.array([[2**24], [2**24 + 1]])  # the same as float32
    one, other = (Federation.from_arrays(large[[k, k]], [0, 1], [0, 0]) for k in (0, 1))
    assert one.fingerprint != other.fingerprint
    with pytest.raises(BadInput, match="x has 18446744073709551615; integers up to 9223372036854775807 are valid"):
        small(x=np.full((7, 2), 2**64 - 1, np.uint64))


@pytest.mark.parametrize("library", [pd, pl])
def test_a_frame_becomes_the_same_federation_as_with_federation_from(library):
    columns = {"age": [1.0, 2.0, 3.0, 4.0], "ill": ["a", "b", "b", "a"], "site": ["n", "n", "s", "s"]}
    frame = library.DataFrame(columns)
    made = Federation.from_dataframe(frame, "ill", "site", test_share=0.5)
    assert made.fingerprint == federation_from(frame, "ill", "site", test_share=0.5).fingerprint
    assert made.names == ("n", "s")
    parts = {name: library.DataFrame({"age": [1.0, 2.0], "ill": ["a", "b"]}) for name in ("n", "s")}
    assert Federation.from_dataframe(parts, target="ill").names == ("n", "s")


@pytest.mark.parametrize("source", ["data.csv", {}, {"n": [1]}, np.zeros((2, 2))])
def test_what_is_no_frame_is_refused(source):
    with pytest.raises(BadInput, match=r"from_dataframe cannot use .*: give a pandas or polars DataFrame"):
        Federation.from_dataframe(source)


def test_a_federation_is_drawn(federation):
    assert federation.plot()._repr_png_().startswith(b"\x89PNG")
