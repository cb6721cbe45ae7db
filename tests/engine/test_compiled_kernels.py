"""What Triton's compiler makes of the kernels for Hopper GPUs; it runs without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_no_product_reads_registers_that_the_next_step_overwrites(tmp_path):
    """Matrix products are asynchronous: of one whose first factor is in registers, none may be left unfinished."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, script],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    programs = [line.split(";") for line in done.stdout.splitlines()]
    assert len(programs) == 22
    assert all(int(products) > 0 for _, products, _, _ in programs)
    assert [title for title, _, place, unfinished in programs if place == "registers" and int(unfinished)] == []
