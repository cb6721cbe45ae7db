"""Federations prepared in advance, for machines without the dataset."""

import dataclasses
import os
import shutil

import numpy as np
import pytest

from fedrema.cli import main
from fedrema.data import DataSettings, PreparedFolder, build_federation
from fedrema.data.prepared import HEADER_BYTES, MAXIMUM_BYTES
from fedrema.errors import BadInput
from fedrema.experiments.store import Store
from tests.data.conftest import write

FILE = """
seeds = 2
[settings]
dataset = "mnist"
partition = "iid"
clients = 2
samples = 4
test_share = 0.5
rounds = 1
epochs = 1
[rows.fedavg]
[rows.fedper]
[rows.digits]
method = "fedavg"
dataset = "digits"
"""
SETTINGS = DataSettings(dataset="mnist", partition="iid", clients=2, samples=4, test_share=0.5)


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "table.toml"
    file.write_text(FILE)
    return file


@pytest.fixture
def prepared(tmp_path, small_mnist, monkeypatch):
    """Prepare the federation, then remove the dataset and make downloads impossible."""
    monkeypatch.setenv("FEDREMA_DATA", str(write(tmp_path / "datasets" / "mnist", small_mnist).parent))
    federation = build_federation(SETTINGS)
    PreparedFolder(tmp_path / "prepared").save(federation)
    shutil.rmtree(tmp_path / "datasets")
    monkeypatch.delenv("FEDREMA_DATA")
    monkeypatch.setenv("FEDREMA_MIRROR", "http://127.0.0.1:9")
    return federation


@pytest.fixture
def prepared_file(prepared, tmp_path):
    (file,) = (tmp_path / "prepared" / "federations").iterdir()
    return file


def placed(folder, **changes):
    return dataclasses.replace(SETTINGS, data_dir=folder, **changes)


def test_prepared_federations_replace_the_dataset(table, tmp_path, small_mnist, monkeypatch, capsys):
    monkeypatch.setenv("FEDREMA_DATA", str(write(tmp_path / "datasets" / "mnist", small_mnist).parent))
    there = build_federation(SETTINGS)
    folder = tmp_path / "prepared"
    assert main(["grid", str(table), "--prepare", str(folder), "--out", str(tmp_path / "out")]) == 0
    (file,) = (folder / "federations").iterdir()  # one file for both rows and seeds; digits needs none
    assert capsys.readouterr().out == f"{file}\n"
    assert not (tmp_path / "out").exists()
    assert main(["grid", str(table), "--out", str(tmp_path / "with"), "--quiet"]) == 0

    shutil.rmtree(tmp_path / "datasets")
    monkeypatch.setenv("FEDREMA_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setenv("FEDREMA_DATA", str(folder))
    for settings in (SETTINGS, placed(folder)):
        here = build_federation(settings)
        assert (here.fingerprint, here.info, here.names) == (there.fingerprint, there.info, there.names)
        assert here.x.dtype == there.x.dtype == np.uint8
    assert main(["grid", str(table), "--out", str(tmp_path / "without"), "--quiet"]) == 0
    keys = [Store(tmp_path / out / "runs").keys() for out in ("with", "without")]
    assert len(keys[0]) == 6
    assert keys[0] == keys[1]


def test_seeds_that_vary_the_partition_are_all_prepared(table, tmp_path, small_mnist, monkeypatch, capsys):
    monkeypatch.setenv("FEDREMA_DATA", str(write(tmp_path / "datasets" / "mnist", small_mnist).parent))
    table.write_text(f"vary = 'both'\n{FILE}")
    command = ["grid", str(table), "--prepare", str(tmp_path / "prepared")]
    assert main(command) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == 2
    assert main([*command, "--seeds", "3"]) == 0
    assert len(list((tmp_path / "prepared" / "federations").iterdir())) == 3
    shutil.rmtree(tmp_path / "datasets")
    monkeypatch.delenv("FEDREMA_DATA")
    for seed in range(3):
        found = build_federation(placed(tmp_path / "prepared", data_seed=seed), download=False)
        assert found.info["data_seed"] == seed


def test_the_papers_data_can_be_prepared(tmp_path, monkeypatch, small_mnist, capsys):
    monkeypatch.setenv("FEDREMA_DATA", str(write(tmp_path / "datasets" / "mnist", small_mnist).parent))
    folder = tmp_path / "prepared"
    assert main(["reproduce", "heatmaps", "--smoke", "--prepare", str(folder)]) == 0
    assert not folder.exists()  # a smoke test runs on digits
    assert main(["reproduce", "table1", "--only", "mnist", "--prepare", str(folder)]) == 2
    assert "the dataset has 8" in capsys.readouterr().err  # the paper needs more samples than this small dataset has


@pytest.mark.parametrize("changes", [{"data_seed": 1}, {"test_share": 0.25}, {"clients": 1}, {"partition": "shards"}])
def test_a_prepared_federation_is_not_used_for_other_settings(changes, prepared, tmp_path):
    assert build_federation(placed(tmp_path / "prepared")).fingerprint == prepared.fingerprint
    with pytest.raises(BadInput, match=r"^cannot download train-images-idx3-ubyte.gz from http://127.0.0.1:9/mnist/"):
        build_federation(placed(tmp_path / "prepared", **changes))
    with pytest.raises(BadInput, match=r"^dataset mnist: not found in "):
        build_federation(placed(tmp_path / "prepared", **changes), download=False)


def test_without_a_dataset_a_grid_says_so_in_one_sentence(prepared, table, tmp_path, capsys):
    assert main(["grid", str(table), "--out", str(tmp_path / "out"), "--only", "fedavg", "--quiet"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("fedrema: fedavg: cannot download train-images-idx3-ubyte.gz from")
    assert message.count("\n") == 1


def test_a_renamed_file_is_refused(prepared, prepared_file, tmp_path):
    renamed = dataclasses.replace(prepared, info={**prepared.info, "data_seed": 1})
    other = PreparedFolder(tmp_path / "else").save(renamed)
    prepared_file.rename(prepared_file.with_name(other.name))
    with pytest.raises(
        BadInput,
        match=rf"^{prepared_file.parent / other.name} was prepared with settings that do not match its name",
    ):
        build_federation(placed(tmp_path / "prepared", data_seed=1))


@pytest.mark.parametrize(
    ("alter", "sentence"),
    [
        (lambda arrays: {**arrays, "y": arrays["y"][::-1]}, "was changed after it was saved"),
        (lambda arrays: {**arrays, "row": arrays["row"][::-1]}, "was changed after it was saved"),
        (lambda arrays: {**arrays, "row": arrays["row"] + 1}, "refers to images that its files do not hold"),
        (lambda arrays: {**arrays, "row": -1 - arrays["row"]}, "refers to images that its files do not hold"),
        (lambda arrays: {**arrays, "archive": arrays["archive"] + 1}, "refers to images that its files do not hold"),
        (lambda arrays: {**arrays, "row": arrays["row"] + 0.5}, "refers to images that its files do not hold"),
        (lambda arrays: {**arrays, "archives": np.array(["../images/x.npz"])}, "does not say where its images are"),
        (lambda arrays: {**arrays, "archive": arrays["archive"][1:]}, "does not say where its images are"),
        (lambda arrays: {name: arrays[name] for name in arrays if name != "meta"}, "lacks 'meta'"),
        (lambda arrays: {name: arrays[name] for name in arrays if name != "y"}, "lacks 'y'"),
    ],
)
def test_an_altered_file_is_refused(alter, sentence, prepared_file, tmp_path, table, capsys, monkeypatch):
    with np.load(prepared_file) as file:
        arrays = dict(file)
    np.savez(prepared_file, **alter(arrays))
    with pytest.raises(BadInput, match=rf"^{prepared_file} {sentence}"):
        build_federation(placed(tmp_path / "prepared"))
    monkeypatch.setenv("FEDREMA_DATA", str(tmp_path / "prepared"))
    assert main(["grid", str(table), "--out", str(tmp_path / "out"), "--only", "fedavg", "--quiet"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"fedrema: fedavg: {prepared_file} {sentence}")
    assert message.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"no archive at all"])
def test_a_damaged_file_is_refused_until_it_is_prepared_again(content, prepared, prepared_file, tmp_path):
    prepared_file.write_bytes(content)
    with pytest.raises(BadInput, match=rf"^{prepared_file} is not a .npz file or is truncated"):
        build_federation(placed(tmp_path / "prepared"))
    assert PreparedFolder(tmp_path / "prepared").save(prepared) == prepared_file
    assert build_federation(placed(tmp_path / "prepared")).fingerprint == prepared.fingerprint


def test_the_dataset_is_read_from_the_folder_in_the_settings(table, tmp_path, small_mnist, monkeypatch):
    write(tmp_path / "datasets" / "mnist", small_mnist)
    monkeypatch.setenv("FEDREMA_MIRROR", "http://127.0.0.1:9")
    table.write_text(FILE.replace("rounds = 1", f"rounds = 1\ndata_dir = '{tmp_path / 'datasets'}'"))
    assert main(["grid", str(table), "--prepare", str(tmp_path / "prepared")]) == 0
    assert len(list((tmp_path / "prepared" / "federations").iterdir())) == 1


def test_an_available_dataset_is_partitioned_instead(prepared_file, tmp_path, small_mnist):
    write(tmp_path / "prepared" / "mnist", small_mnist)
    prepared_file.write_bytes(b"not read")
    assert build_federation(placed(tmp_path / "prepared")).info["dataset"] == "mnist"


@pytest.mark.parametrize(
    ("alter", "sentence"),
    [
        (lambda file: file.unlink(), "is missing: copy the whole folder"),
        (lambda file: file.write_bytes(b"no archive"), "is not a .npz file or is truncated"),
        (lambda file: np.savez(file, x=np.zeros((8, 1, 28, 28), np.uint8)), "was changed after it was saved"),
        (lambda file: np.savez(file, x=np.uint8(0)), "was changed after it was saved"),
        (lambda file: np.savez(file, y=np.zeros(8)), "lacks 'x'"),
    ],
)
def test_altered_images_are_refused_until_they_are_prepared_again(alter, sentence, prepared, tmp_path):
    (file,) = (tmp_path / "prepared" / "images").iterdir()
    alter(file)
    with pytest.raises(BadInput, match=rf"^{file} {sentence}"):
        build_federation(placed(tmp_path / "prepared"))
    PreparedFolder(tmp_path / "prepared").save(prepared)
    assert build_federation(placed(tmp_path / "prepared")).fingerprint == prepared.fingerprint


def test_each_image_is_stored_once(tmp_path, small_mnist, monkeypatch):
    monkeypatch.setenv("FEDREMA_DATA", str(write(tmp_path / "datasets" / "mnist", small_mnist).parent))
    smaller = dataclasses.replace(SETTINGS, samples=2)
    federations = [build_federation(dataclasses.replace(smaller, data_seed=seed)) for seed in range(4)]
    monkeypatch.setattr("fedrema.data.prepared.MAXIMUM_BYTES", HEADER_BYTES + 3 * federations[0].x[0].nbytes)
    for federation in federations:  # a folder may be extended later
        PreparedFolder(tmp_path / "prepared").save(federation)
    stored = [np.load(file)["x"] for file in sorted((tmp_path / "prepared" / "images").iterdir())]
    assert all(len(images) <= 3 for images in stored)
    images = [image.tobytes() for each in stored for image in each]
    used = {image.tobytes() for federation in federations for image in federation.x}
    assert sorted(images) == sorted(used)
    assert len(used) > 4
    for seed, federation in enumerate(federations):
        found = build_federation(dataclasses.replace(smaller, data_dir=tmp_path / "prepared", data_seed=seed))
        assert found.fingerprint == federation.fingerprint


@pytest.mark.datasets
@pytest.mark.skipif("FEDREMA_DATA" not in os.environ, reason="FEDREMA_DATA does not say where the datasets lie")
@pytest.mark.parametrize(("dataset", "samples"), [("cifar10", 600), ("cifar10", 100), ("mnist", 600)])
def test_five_partitions_of_the_paper_can_be_moved(dataset, samples, tmp_path, monkeypatch):
    settings = DataSettings(dataset=dataset, clients=20, samples=samples, s=0.2)
    folder = PreparedFolder(tmp_path / "prepared")
    there = [build_federation(dataclasses.replace(settings, data_seed=seed)) for seed in range(5)]
    for federation in there:
        folder.save(federation)
    files = [file for file in (tmp_path / "prepared").rglob("*") if file.is_file()]
    assert all(file.stat().st_size <= MAXIMUM_BYTES for file in files)
    total = sum(len(np.load(file)["x"]) for file in files if file.parent.name == "images")
    assert total == len({image.tobytes() for federation in there for image in federation.x})
    monkeypatch.delenv("FEDREMA_DATA")
    monkeypatch.setenv("FEDREMA_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setattr("fedrema.data.build.is_available", lambda *_: False)
    for seed, federation in enumerate(there):
        found = build_federation(dataclasses.replace(settings, data_seed=seed, data_dir=tmp_path / "prepared"))
        assert (found.fingerprint, found.names) == (federation.fingerprint, federation.names)
