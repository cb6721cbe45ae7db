"""The benchmark with many clients in a few processes runs, and every client takes part in every round."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

pytestmark = pytest.mark.network
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "load.py"


@pytest.mark.parametrize("mode", [(), ("--secure-aggregation",)])
def test_a_few_clients_share_processes(mode):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--quick", *mode], capture_output=True, text=True, timeout=600, env=environment
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 clients in 2 processes" in ended.stdout
    assert "at least 4 participants" in ended.stdout
    assert re.search(r"delivery \d+\.\d+ s, training \d+\.\d+ s, collection \d+\.\d+ s, aggregation \d", ended.stdout)
    assert re.search(r"all messages per round: \d+\.\d+ MB up, \d+\.\d+ MB down", ended.stdout)
    assert re.search(r"CPU seconds per round: \d+\.\d+ \(.*SuperLink \d+\.\d+", ended.stdout)
