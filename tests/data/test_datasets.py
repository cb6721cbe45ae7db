import gzip
import re

import numpy as np
import pytest

from fedrema.data import dataset_names, dataset_status, load_pool
from fedrema.data.datasets import _digits_folder, cache_folder, pool_size
from fedrema.data.file_formats import read_idx, read_rows
from fedrema.data.sources import SOURCES
from fedrema.errors import BadInput
from tests.data.conftest import idx, tar_of, write


def test_digits_are_those_of_scikit_learn():
    pool = load_pool("digits")
    assert (pool.x.shape, pool.x.dtype, pool.y.dtype, pool.classes) == (
        (1797, 1, 8, 8),
        np.float32,
        np.int64,
        10,
    )
    assert (pool.x.min(), pool.x.max()) == (-1, 1)
    assert pool_size("digits") == 1797
    assert _digits_folder().is_dir()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", ["mnist", ".", "MNIST/raw"])
def test_idx_files_are_read_plain_or_zipped_from_any_usual_folder(tmp_path, small_mnist, zipped, folder):
    write(tmp_path / folder, small_mnist, zipped)
    pool = load_pool("mnist", tmp_path, download=False)
    assert (pool.x.shape, pool.x.dtype) == ((8, 1, 2, 3), np.uint8)
    assert pool.y.tolist() == [0, 1, 2, 0, 1, 2, 9, 3]
    assert pool.x[0].tobytes() == small_mnist["train-images-idx3-ubyte"][16:22]
    assert pool.x[7].tobytes() == small_mnist["t10k-images-idx3-ubyte"][-6:]


@pytest.mark.parametrize("form", ["cifar-10-batches-bin", "cifar10", ".", "archive"])
def test_cifar_is_read_from_its_folder_or_straight_from_the_archive(tmp_path, small_cifar, form):
    if form == "archive":
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_of(small_cifar))
    else:
        write(tmp_path / form, small_cifar)
    pool = load_pool("cifar10", tmp_path, download=False)
    assert pool.x.shape == (24, 3, 2, 2)
    assert pool.y[0] == small_cifar["data_batch_1.bin"][0]
    assert pool.x[-1].tobytes() == small_cifar["test_batch.bin"][-12:]


def test_folders_are_searched_in_order(tmp_path, small_mnist, monkeypatch):
    write(cache_folder() / "mnist", small_mnist)
    assert load_pool("mnist", download=False).name == "mnist"
    assert load_pool("mnist", tmp_path / "absent", download=False).name == "mnist"
    monkeypatch.setenv("FEDREMA_DATA", str(write(tmp_path / "variable", {}).parent / "variable"))
    write(tmp_path / "variable" / "mnist", small_mnist)
    found = {status.name: status.found for status in dataset_status()}
    assert found["mnist"] == tmp_path / "variable" / "mnist"


def test_an_unknown_dataset_is_refused():
    with pytest.raises(BadInput, match="'svhn' is unknown; valid are digits, mnist, fmnist, cifar10"):
        load_pool("svhn")
    assert dataset_names() == ("digits", "mnist", "fmnist", "cifar10")


def test_a_data_folder_that_is_a_file_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput, match=r"--data-dir .*file is a file"):
        load_pool("mnist", file)
    monkeypatch.setenv("FEDREMA_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match=r"FEDREMA_DATA=.*nowhere is not a folder"):
        load_pool("mnist")


def test_a_missing_dataset_without_download_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"dataset mnist: not found in .*absent, .*cache; allow the download"):
        load_pool("mnist", tmp_path / "absent", download=False)
    assert not (tmp_path / "absent").exists()


def test_missing_files_of_a_dataset_are_named(tmp_path, small_mnist):
    del small_mnist["t10k-labels-idx1-ubyte"]
    write(tmp_path / "mnist", small_mnist)
    with pytest.raises(BadInput, match=r"mnist lacks t10k-labels-idx1-ubyte"):
        load_pool("mnist", tmp_path, download=False)
    status = next(status for status in dataset_status(tmp_path) if status.name == "mnist")
    assert (status.found, status.missing) == (None, ("t10k-labels-idx1-ubyte",))
    assert status.missing_from == tmp_path / "mnist"


def test_status_shows_folder_or_source_of_each_dataset(tmp_path, small_cifar):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_of(small_cifar))
    digits, mnist, fmnist, cifar = dataset_status(tmp_path, mirror="http://mirror.example/sets/")
    assert digits.found is not None
    assert digits.address is None
    assert (mnist.found, mnist.missing, mnist.samples, mnist.shape) == (None, (), 70_000, (1, 28, 28))
    assert fmnist.address == "http://mirror.example/sets/fmnist/"
    assert cifar.found == tmp_path / "cifar-10-binary.tar.gz"
    assert dataset_status(tmp_path)[1].address == "https://ossci-datasets.s3.amazonaws.com/mnist/"


def test_files_of_another_dataset_with_the_same_names_are_refused(tmp_path, small_mnist):
    write(tmp_path, small_mnist)
    assert [status.found for status in dataset_status(tmp_path)][1:3] == [tmp_path, None]
    write(tmp_path / "fmnist", small_mnist)
    with pytest.raises(BadInput, match=r"is a file of the dataset mnist, not the train-images-idx3-ubyte expected"):
        load_pool("fmnist", tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-3], r"train-images-idx3-ubyte has 49 of 52 bytes"),
        (lambda content: content[:-1] + b"\x00\x00", "differs from the published file"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "differs from the published file"),
        (lambda content: gzip.compress(content)[:-9], "does not decompress"),
        (lambda content: gzip.compress(content)[:12] + b"garbage!", "does not decompress"),
        (lambda content: b"\x1f\x8bno gzip at all", "does not decompress"),
    ],
)
def test_damaged_files_are_named(tmp_path, small_mnist, damage, message):
    name = "train-images-idx3-ubyte"
    write(tmp_path / "mnist", small_mnist | {name: damage(small_mnist[name])})
    with pytest.raises(
        BadInput, match=f"{name} is altered or incomplete: .*{message}.*; delete it to download it again"
    ):
        load_pool("mnist", tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda contents: tar_of(contents)[:-40], "does not unpack|has 0 of"),
        (lambda contents: b"no archive", "does not unpack"),
        (
            lambda contents: tar_of({"test_batch.bin": contents["test_batch.bin"]}),
            "data_batch_1.bin is not in it",
        ),
        (lambda contents: tar_of(contents | {"test_batch.bin": b"0" * 52}), "content of test_batch.bin"),
    ],
)
def test_damaged_archives_are_named(tmp_path, small_cifar, damage, message):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(damage(small_cifar))
    with pytest.raises(BadInput, match=f"cifar-10-binary.tar.gz is altered or incomplete: .*({message})"):
        load_pool("cifar10", tmp_path)


def test_files_without_read_permission_are_refused(tmp_path, small_mnist, small_cifar, monkeypatch):
    def refuse(*arguments, **settings):
        raise PermissionError(13, "Permission denied")

    write(tmp_path / "mnist", small_mnist)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_of(small_cifar))
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(BadInput, match=r"cannot read .*: Permission denied"):
        load_pool("mnist", tmp_path)
    monkeypatch.setattr("tarfile.open", refuse)
    with pytest.raises(BadInput, match=r"cannot read .*tar.gz: Permission denied"):
        load_pool("cifar10", tmp_path)


def test_idx_header_is_checked():
    good = idx(np.zeros((2, 2, 2), np.uint8))
    assert read_idx(good, "f", 3).shape == (2, 2, 2)
    for bad in (b"", b"\0\0\x08", good.replace(b"\x08\x03", b"\x0d\x03", 1), idx(np.zeros(3, np.uint8))):
        with pytest.raises(BadInput, match="f is not an idx file of 3 dimensions: it must start with 0x00000803"):
            read_idx(bad, "f", 3)
    with pytest.raises(BadInput, match="announces 2 x 2 x 2 values but holds 7"):
        read_idx(good[:-1], "f", 3)


def test_rows_are_checked():
    for bad in (b"", bytes(14)):
        with pytest.raises(BadInput, match=re.escape(f"{len(bad)} bytes are not a multiple of the row length 13")):
            read_rows(bad, "f", (3, 2, 2))


def test_images_and_labels_must_fit_together(tmp_path, small_mnist, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], classes=5))
    write(tmp_path / "mnist", small_mnist)
    with pytest.raises(BadInput, match="8 images and 8 labels up to 9 do not match"):
        load_pool("mnist", tmp_path)
