"""Settings and fixtures of all tests."""

import os
import signal
import sys

import pytest
import torch

from fedrema.data import Federation
from tests import forked
from tests.fixtures import make_federation

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side; more threads only get in each other's way
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which is when it is read


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def programs():
    """A folder with a `python` and a `fedrema` that start at once: see tests/forked."""
    with forked.programs() as folder:
        yield folder


@pytest.fixture
def others_start_at_once(programs, monkeypatch):
    """For a test whose subject starts other processes with `sys.executable`."""
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("FORKED_EXECUTABLE", sys.executable)  # what they start does too


UNTRACED = {
    *("test_methods.py", "test_hostile_replies.py", "test_same_as_simulated.py", "test_new_clients.py"),
    *("test_personal_model.py", "test_many_clients.py", "test_kernels.py", "test_figures.py", "test_reproduce.py"),
    *("test_docs.py", "test_execute_many.py", "test_beyond.py", "test_models.py", "test_launchers.py"),
}
"""Files whose tests run the same lines again and again: for every method, attack, shape or figure. Other tests cover
these lines, and tracing them takes as long again as running them."""


def pytest_collection_modifyitems(items):
    """Start with what takes longest: at the end one process would wait for the other."""
    items.sort(key=lambda item: item.path.name not in ("test_docs.py", "test_reproduce.py"))
    for item in items:
        if item.path.name in UNTRACED:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture
def federation() -> Federation:
    return make_federation()
