import ast
import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from fedrema.data import DataSettings, Federation, build_federation, load_pool, options
from fedrema.errors import BadInput


def test_the_default_is_the_demonstration():
    federation = build_federation(DataSettings())
    assert (len(federation), federation.sample_shape, federation.classes) == (20, (1, 8, 8), 10)
    assert federation.split("train").x.shape == (20, 32, 1, 8, 8)
    assert federation.split("test").count.tolist() == [8] * 20
    assert federation.names == tuple(map(str, range(20)))
    json.dumps(federation.info)


@pytest.mark.parametrize("partition", ["grouped", "dirichlet", "shards", "iid", "quantity"])
def test_every_partition_can_be_built_again(partition):
    chosen = DataSettings(partition=partition, clients=7, samples=30, data_seed=4)
    federation = build_federation(chosen)
    assert len(federation) == 7
    assert federation.label_counts().sum() == 210
    assert federation.fingerprint == build_federation(chosen).fingerprint
    other = dataclasses.replace(chosen, data_seed=5)
    assert federation.fingerprint != build_federation(other).fingerprint
    assert federation.info["partition"] == partition
    # Whatever decides the partition is told, and nothing that does not.
    assert ("alpha" in federation.info) == (partition in ("dirichlet", "quantity"))


def test_own_data_replaces_dataset_and_partition(tmp_path):
    build_federation(DataSettings(clients=3)).save(tmp_path / "it.npz")
    assert len(build_federation(DataSettings(federation=str(tmp_path / "it.npz"), clients=9))) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "svhn"}, "--dataset svhn is unknown; valid are digits, mnist, fmnist, cifar10"),
        ({"partition": "fair"}, "--partition fair is unknown; valid are grouped, dirichlet"),
        ({"clients": 0}, "--clients 0 is too small; 1 or more is valid"),
        ({"samples": 1}, "--samples 1 is too small; 2 or more"),
        ({"groups": 0}, "--groups 0 is too small"),
        ({"classes_per_client": 0}, "--classes-per-client 0 is too small"),
        ({"s": 1.1}, "--s 1.1 is outside 0 to 1"),
        ({"s": float("nan")}, "--s nan is outside 0 to 1"),
        ({"alpha": 0.0}, "--alpha 0.0 is not valid"),
        ({"alpha": float("inf")}, "--alpha inf is not valid"),
        ({"alpha": float("nan")}, "--alpha nan is not valid"),
        ({"test_share": 0.0}, "--test-share 0.0 is outside 0 to 1"),
        ({"data_seed": -3}, "--data-seed -3 is negative"),
        ({"federation": "a.npz", "partition_file": Path("b.npz")}, "exclude each other"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(BadInput, match=message):
        DataSettings(**change)


def test_too_much_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(options, "load_pool", None)
    with pytest.raises(BadInput, match="200 clients of 600 would need 120000 samples but the dataset has 60000"):
        build_federation(DataSettings(dataset="cifar10", clients=200, samples=600))


def test_shards_of_more_classes_than_there_are():
    with pytest.raises(BadInput, match="--classes-per-client 11 is more than there are"):
        build_federation(DataSettings(partition="shards", classes_per_client=11))


def test_every_field_is_documented():
    body = ast.parse(inspect.getsource(DataSettings)).body[0].body
    fields = [number for number, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert len(fields) == len(dataclasses.fields(DataSettings))
    for number in fields:
        assert isinstance(body[number + 1], ast.Expr), body[number].target.id


def from_file(path):
    return build_federation(DataSettings(partition_file=path))


def test_a_partition_from_an_npz(tmp_path):
    path = tmp_path / "who.npz"
    np.savez(path, index=[5, 3, 9, 1], client=[1, 0, 1, 0], split=[0, 0, 1, 1])
    federation = from_file(path)
    pool = load_pool("digits")
    assert (federation.x == pool.x[[3, 1, 5, 9]]).all()
    assert federation.test.tolist() == [False, True, False, True]
    assert federation.info == {"dataset": "digits", "partition_file": "who.npz"}


def test_a_partition_from_json(tmp_path):
    path = tmp_path / "who.json"
    path.write_text(json.dumps({"10": [0, 1, 2], "9": [3, 4]}))
    assert from_file(path).names == ("9", "10")
    path.write_text(json.dumps({"007": [0, 1, 2], "7": [3, 4]}))
    assert from_file(path).names == ("007", "7")
    path.write_text(json.dumps({"b": {"train": [0], "test": [1]}, "a": {"train": [2, 3]}}))
    federation = from_file(path)
    assert isinstance(federation, Federation)
    assert (federation.names, federation.test.tolist()) == (("a", "b"), [False, False, False, True])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": [0, 0]}, "gives sample 0 away more than once"),
        ({"a": [1797]}, "indices 0 to 1796 of digits are valid"),
        ({"a": [-1]}, "indices 0 to 1796"),
        ({"a": [0.5]}, "index of whole numbers"),
        ({"a": [0], "b": []}, "client 'b' has no samples"),
        ({"a": "012"}, "must map each client to a list of indices"),
        ({"a": [0], "b": {"train": [1]}}, "must map each client"),
        ({"a": {"valid": [1]}}, "split has the value valid"),
        ({"a": {"test": [1]}}, "has only test samples"),
        ({}, "must map each client"),
        ([1, 2], "must map each client"),
    ],
)
def test_partition_files_that_are_refused(tmp_path, table, message):
    path = tmp_path / "who.json"
    path.write_text(json.dumps(table))
    with pytest.raises(BadInput, match=f"--partition-file .*{message}"):
        from_file(path)


def test_partition_files_that_cannot_be_read(tmp_path):
    with pytest.raises(BadInput, match=r"--partition-file .* cannot be read: No such file"):
        from_file(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput, match="is not valid JSON"):
        from_file(tmp_path / "bad.json")
    with pytest.raises(BadInput, match=r"is not there or is not a file; give a .npz file with index, client"):
        from_file(tmp_path / "absent.npz")
    np.savez(tmp_path / "short.npz", index=[1, 2], client=[0])
    with pytest.raises(BadInput, match="must be equally long"):
        from_file(tmp_path / "short.npz")
