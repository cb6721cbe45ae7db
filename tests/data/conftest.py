"""Small datasets in the publishers' formats, and a local web server that serves them."""

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest

from fedrema.data.sources import CIFAR10, MNIST, SOURCES, SourceFile


def idx(array):
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def described(contents):
    return tuple(
        SourceFile(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    )


def tar_of(contents):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        folder = tarfile.TarInfo("cifar-10-batches-bin")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in {"readme.html": b"hello", **contents}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def own_surroundings(monkeypatch, tmp_path, request):
    """Hide the user's data folder, cache and mirror from all tests."""
    if "datasets" not in request.keywords:
        for variable in ("FEDREMA_DATA", "FEDREMA_MIRROR"):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def small_mnist(monkeypatch):
    """Contents of a tiny dataset in MNIST's format, registered as mnist."""
    random = np.random.default_rng(0)
    contents = {
        "train-images-idx3-ubyte": idx(random.integers(0, 256, (6, 2, 3), np.uint8)),
        "train-labels-idx1-ubyte": idx(np.array([0, 1, 2, 0, 1, 2], np.uint8)),
        "t10k-images-idx3-ubyte": idx(random.integers(0, 256, (2, 2, 3), np.uint8)),
        "t10k-labels-idx1-ubyte": idx(np.array([9, 3], np.uint8)),
    }
    source = replace(MNIST, files=described(contents), samples=8, shape=(1, 2, 3))
    monkeypatch.setitem(SOURCES, "mnist", source)
    return contents


@pytest.fixture
def small_cifar(monkeypatch):
    random = np.random.default_rng(1)
    contents = {}
    for file in CIFAR10.files:
        rows = random.integers(0, 10, (4, 1 + 12), np.uint8)
        contents[file.name] = rows.tobytes()
    source = replace(CIFAR10, files=described(contents), samples=24, shape=(3, 2, 2))
    monkeypatch.setitem(SOURCES, "cifar10", source)
    return contents


def write(folder, contents, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}{'.gz' if zipped else ''}").write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.fixture
def server():
    """A mirror: `server.files` maps paths to contents; responses for paths in `server.cut` end half-way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            web.asked.append(self.path)
            content = web.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if self.path in web.cut else content)

        def log_message(self, *arguments):
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.files, web.cut, web.asked = {}, set(), []
    web.address = f"http://127.0.0.1:{web.server_address[1]}"
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield web
    web.shutdown()
    thread.join()
    web.server_close()
