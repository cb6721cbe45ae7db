import gzip
import io

import pytest
from rich.console import Console

from fedrema.data import load_pool
from fedrema.data.datasets import cache_folder
from fedrema.data.download import DownloadBar
from fedrema.errors import BadInput
from tests.data.conftest import tar_of


def offer(server, contents):
    server.files |= {f"/mnist/{name}.gz": gzip.compress(content) for name, content in contents.items()}


def left_behind():
    return sorted(path.name for path in cache_folder().rglob("*") if path.is_file())


def test_a_download_is_stored_in_the_cache_and_reused(server, small_mnist):
    offer(server, small_mnist)
    assert len(load_pool("mnist", mirror=server.address).y) == 8
    assert len(server.asked) == 4
    assert left_behind() == sorted(f"{name}.gz" for name in small_mnist)
    assert len(load_pool("mnist", mirror=server.address).y) == 8
    assert len(server.asked) == 4


def test_a_download_creates_and_fills_the_given_folder(server, small_cifar, tmp_path, monkeypatch):
    server.files["/cifar10/cifar-10-binary.tar.gz"] = tar_of(small_cifar)
    monkeypatch.setenv("FEDREMA_MIRROR", server.address + "/")
    assert len(load_pool("cifar10", tmp_path / "new" / "folder").y) == 24
    assert (tmp_path / "new/folder/cifar-10-batches-bin/cifar-10-binary.tar.gz").is_file()
    assert left_behind() == []


def test_only_missing_files_are_fetched(server, small_mnist, tmp_path):
    offer(server, small_mnist)
    load_pool("mnist", tmp_path, mirror=server.address)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    server.asked.clear()
    load_pool("mnist", tmp_path, mirror=server.address)
    assert server.asked == ["/mnist/t10k-labels-idx1-ubyte.gz"]


@pytest.mark.parametrize(
    "corrupt",
    [gzip.compress(b"something else", mtime=0), b"<html>Please log in</html>"],
    ids=["other content", "a page instead"],
)
def test_a_corrupt_download_is_not_kept(server, small_mnist, corrupt):
    offer(server, small_mnist)
    server.files["/mnist/train-images-idx3-ubyte.gz"] = corrupt
    address = f"{server.address}/mnist/train-images-idx3-ubyte.gz"
    with pytest.raises(BadInput, match=f"train-images-idx3-ubyte.gz from {address} is altered or incomplete"):
        load_pool("mnist", mirror=server.address)
    assert left_behind() == []


def test_a_corrupt_archive_is_not_kept(server, small_cifar):
    server.files["/cifar10/cifar-10-binary.tar.gz"] = tar_of(small_cifar | {"test_batch.bin": b"0" * 52})
    with pytest.raises(BadInput, match=r"cifar-10-binary.tar.gz from http.* was discarded: try again"):
        load_pool("cifar10", mirror=server.address)
    assert left_behind() == []


def test_an_incomplete_download_is_refused(server, small_mnist):
    offer(server, small_mnist)
    server.cut.add("/mnist/train-labels-idx1-ubyte.gz")
    with pytest.raises(
        BadInput, match=r"cannot download train-labels-idx1-ubyte.gz from http.*: .*the transfer was interrupted"
    ):
        load_pool("mnist", mirror=server.address)
    assert left_behind() == ["train-images-idx3-ubyte.gz"]


def test_a_file_that_is_missing_on_the_server_is_named(server, small_mnist):
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte.gz: http.*ubyte.gz returned 404"):
        load_pool("mnist", mirror=server.address)
    assert left_behind() == []


def test_an_unreachable_server_is_named(server, small_mnist):
    # A port that was just released: no process listens on it.
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(BadInput, match=r"is unreachable or does not respond; check the connection"):
        load_pool("mnist", mirror=f"http://127.0.0.1:{port}")
    assert left_behind() == []


def test_an_invalid_address_is_refused(small_mnist):
    with pytest.raises(BadInput, match=r"somewhere/mnist/train-images-idx3-ubyte.gz is not an http or https address"):
        load_pool("mnist", mirror="somewhere")


def test_a_full_disk_leaves_no_files(server, small_mnist, monkeypatch):
    def full(self, address, target, pooch):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", full)
    with pytest.raises(BadInput, match=r"cannot write .*: No space left on device; choose a writable folder"):
        load_pool("mnist", mirror=server.address)
    assert left_behind() == []


def test_the_progress_bar_is_shown_on_a_terminal_only(server, small_mnist, monkeypatch, capsys):
    offer(server, small_mnist)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_pool("mnist", mirror=server.address)
    assert "train-images" in capsys.readouterr().err


def test_the_progress_bar_counts_bytes():
    screen = io.StringIO()
    bar = DownloadBar("file.gz", Console(file=screen, force_terminal=True, width=80))
    bar.reset()
    bar.total = 2000
    bar.update(500)
    bar.reset()
    bar.update(2000)
    bar.close()
    assert "2.0/2.0 kB" in screen.getvalue()
