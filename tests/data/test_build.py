import dataclasses
import json

import numpy as np
import pytest

from fedrema.data import DataSettings, Federation, build, build_federation, load_pool
from fedrema.errors import BadInput


def test_the_default_federation_is_that_of_the_demonstration():
    federation = build_federation(DataSettings())
    assert (len(federation), federation.sample_shape, federation.classes) == (20, (1, 8, 8), 10)
    assert federation.split("train").x.shape == (20, 32, 1, 8, 8)
    assert federation.split("test").count.tolist() == [8] * 20
    assert federation.names == tuple(map(str, range(20)))
    json.dumps(federation.info)


@pytest.mark.parametrize("partition", ["grouped", "dirichlet", "shards", "iid", "quantity"])
def test_every_partition_can_be_rebuilt_from_its_info(partition):
    chosen = DataSettings(partition=partition, clients=7, samples=30, data_seed=4)
    federation = build_federation(chosen)
    assert len(federation) == 7
    assert federation.label_counts().sum() == 210
    assert federation.fingerprint == build_federation(chosen).fingerprint
    other = dataclasses.replace(chosen, data_seed=5)
    assert federation.fingerprint != build_federation(other).fingerprint
    assert federation.info["partition"] == partition
    # info names exactly the settings that define the partition.
    assert ("alpha" in federation.info) == (partition in ("dirichlet", "quantity"))


def test_own_data_replaces_dataset_and_partition(tmp_path):
    build_federation(DataSettings(clients=3)).save(tmp_path / "it.npz")
    assert len(build_federation(DataSettings(federation=str(tmp_path / "it.npz"), clients=9))) == 3


def test_too_many_samples_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr(build, "load_pool", None)
    with pytest.raises(
        BadInput, match="200 clients with 600 samples each need 120000 samples, but the dataset has 60000"
    ):
        build_federation(DataSettings(dataset="cifar10", clients=200, samples=600))


def test_shards_of_more_classes_than_exist_are_refused():
    with pytest.raises(BadInput, match="--classes-per-client 11 is more than the 10 classes"):
        build_federation(DataSettings(partition="shards", classes_per_client=11))


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
        ({"a": [0, 0]}, "assigns sample 0 more than once"),
        ({"a": [1797]}, "indices must be between 0 and 1796, the samples of digits"),
        ({"a": [-1]}, "indices must be between 0 and 1796"),
        ({"a": [0.5]}, "index must hold whole numbers"),
        ({"a": [0], "b": []}, "client 'b' has no samples"),
        ({"a": "012"}, "must map each client to a list of indices"),
        ({"a": [0], "b": {"train": [1]}}, "must map each client"),
        ({"a": {"valid": [1]}}, "split has the value valid"),
        ({"a": {"test": [1]}}, "has only test samples"),
        ({}, "must map each client"),
        ([1, 2], "must map each client"),
    ],
)
def test_invalid_partition_files_are_refused(tmp_path, table, message):
    path = tmp_path / "who.json"
    path.write_text(json.dumps(table))
    with pytest.raises(BadInput, match=f"--partition-file .*{message}"):
        from_file(path)


def test_unreadable_partition_files_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"--partition-file .* cannot be read: No such file"):
        from_file(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput, match="is not valid JSON"):
        from_file(tmp_path / "bad.json")
    with pytest.raises(BadInput, match=r"does not exist or is not a file; give a .npz file with index, client"):
        from_file(tmp_path / "absent.npz")
    np.savez(tmp_path / "short.npz", index=[1, 2], client=[0])
    with pytest.raises(BadInput, match="index and client must have the same length"):
        from_file(tmp_path / "short.npz")
