"""Time and peak memory of reading a table: python benchmarks/check_reading.py 10000000. Fails above 8 GB.

Writes a CSV file with 50 input columns (numbers, some of them missing, and categories), reads it into a federation in
a new process, and deletes it. The file repeats the same 100,000 rows, which does not matter to the reader. Ten million
rows need 4 GB of disk space.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LIMIT = 8.0
COLUMNS = 50
ROWS = 100_000


def write(path: Path, rows: int) -> None:
    """Write a CSV file with this many rows."""
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(ROWS, COLUMNS - 2))
    columns = [[f"{value:.5g}" for value in column] for column in numbers.T]
    for row in range(0, ROWS, 7):
        columns[0][row] = "NA"
    columns += [generator.choice(["red", "green", "blue"], ROWS).tolist() for _ in range(2)]
    columns.append([f"site {number}" for number in generator.integers(0, 20, ROWS)])
    columns.append([str(int(value > 0)) for value in numbers[:, 1] + numbers[:, 2]])
    names = [*(f"column {number}" for number in range(COLUMNS)), "site", "target"]
    lines = [",".join(row) + "\n" for row in zip(*columns, strict=True)]
    with path.open("w") as stream:
        stream.write(",".join(names) + "\n")
        for start in range(0, rows, ROWS):
            stream.write("".join(lines[: rows - start]))


def read(path: str) -> dict[str, object]:
    """Read the file; return seconds and peak gigabytes, also before reading."""
    from fedrema.data import load_user_data

    before = peak()
    start, processor = time.perf_counter(), time.process_time()
    federation = load_user_data(path)
    return {
        "samples": len(federation.x),
        "inputs": federation.x.shape[1],
        "clients": len(federation),
        "seconds": round(time.perf_counter() - start, 1),
        "processor seconds": round(time.process_time() - processor, 1),
        "gigabytes": round(peak(), 2),
        "before": round(before, 2),
    }


def peak() -> float:
    """Return the peak memory of this process in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 10**6 * 1.024


def main() -> int:
    """Print one line; return 1 if reading needs too much memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--read", metavar="FILE", help="only read this file")
    given = parser.parse_args()
    if given.read:
        print(json.dumps(read(given.read)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, given.rows)
        size = path.stat().st_size / 10**9
        command = [sys.executable, __file__, "--read", str(path)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{given.rows:,} rows of {COLUMNS} columns, {size:.2f} GB: {found}")
    return int(found["gigabytes"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
