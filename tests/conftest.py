"""Settings and fixtures of all tests."""

import os
import signal
import sys

import pytest
import torch

from fedrema.data import Federation
from tests import forked
from tests.fixtures import make_federation

# A shell's background jobs ignore SIGINT, and their children inherit that; tests interrupt processes with SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # tests run in parallel; more threads would compete for the cores
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it on import


@pytest.fixture(scope="session", autouse=True)
def own_configuration(tmp_path_factory):
    """Keep the user's secret, which marks runs of own code, out of the real configuration folder."""
    os.environ["XDG_CONFIG_HOME"] = os.environ["PYTEST_CONFIGURATION"] = str(tmp_path_factory.mktemp("configuration"))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def imported_files_are_forgotten(request):
    """Unload modules from the test's own folder: another test may have a file of the same name."""
    yield
    folder = request.node.funcargs.get("tmp_path")
    if folder is not None:
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                del sys.modules[name]


@pytest.fixture(scope="session")
def programs():
    """A folder with a `python` and a `fedrema` that start without importing torch first: see tests/forked."""
    with forked.programs() as folder:
        yield folder


@pytest.fixture
def subprocesses_are_forked(programs, monkeypatch):
    """Use the forking `python` of `programs` as `sys.executable`, with which the tested code starts processes."""
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("FORKED_EXECUTABLE", sys.executable)  # for the processes that these start in turn


UNTRACED = {
    *("test_methods.py", "test_hostile_replies.py", "test_same_as_simulated.py", "test_new_clients.py"),
    *("test_personal_model.py", "test_many_clients.py", "test_kernels.py", "test_figures.py", "test_reproduce.py"),
    *("test_docs.py", "test_execute_many.py", "test_beyond.py", "test_models.py", "test_launchers.py"),
    *("test_own_networks.py", "test_options_of_commands.py", "test_extreme_values.py", "test_special_files.py"),
    *("test_null_verdicts.py", "test_precision.py", "test_received_values.py", "test_refusals.py"),
}
"""Files whose tests execute the same lines for every method, attack, option, shape or figure. Other tests cover
these lines, and tracing them would double the time."""


def pytest_collection_modifyitems(items):
    """Run the slowest files first: otherwise one process would wait for the other at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_docs.py", "test_reproduce.py"))
    for item in items:
        if item.path.name in UNTRACED:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture
def federation() -> Federation:
    return make_federation()
