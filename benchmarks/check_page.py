"""Measure the page of a large synthetic run: 10,000 rounds × 1,000 clients.

`python benchmarks/check_page.py` needs playwright and a Chromium (`make test-browser` installs them), 1.5 GB of
disk and some minutes. It fails if the report is larger than 20 MB, or if it takes more than 3 s to show numbers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedrema.methods.fedrema import FedReMa
from fedrema.page.browser import chromium
from fedrema.page.render import write_page
from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import FederationFacts, Manifest, RanOn
from fedrema.simulation.records import MetricRecord, RoundRecord

MOST_BYTES = 20e6
MOST_SECONDS = 3.0


def write_run(path: Path, rounds: int, clients: int, finished: bool) -> None:
    """Write a run of FedReMa with ten groups of clients."""
    generator = np.random.default_rng(0)
    directory = RunDirectory(path)
    settings = {"seed": 0, "rounds": rounds, "delta": 0.5, "lr": 0.05, "partition": "grouped", "groups": 10}
    info = {"dataset": "synthetic", "partition": "grouped", "s": 0.1}
    names = [f"client-{row}" for row in range(clients)]
    federation = FederationFacts("f" * 64, names, 10, [], (8, 8), [], [], info)
    ran_on = RanOn("cpu", "stacked", "float32", "exact", 1, 1, "", "", {})
    title = FedReMa.title
    directory.create(Manifest(FedReMa.name, settings, "0", {}, {}, federation, ran_on, FedReMa.reports, title))
    labels = generator.integers(0, 40, (clients, 10))
    directory.write_label_counts(labels, labels // 4)
    difficulty = generator.uniform(0.1, 1, clients)
    records = []
    for number in range(1, rounds + 1):
        accuracy = np.clip(1 - difficulty / (1 + number / 40) + generator.normal(0, 0.01, clients), 0, 1)
        critical = number < rounds // 20
        mean, worst = float(accuracy.mean()), float(np.sort(accuracy)[: clients // 10].mean())
        metrics = {"accuracy": MetricRecord(mean, (mean, mean), worst, accuracy.tolist())}
        record = RoundRecord(
            number,
            list(range(clients)),
            loss=float(1 / number),
            client_loss=(difficulty / number).tolist(),
            metrics=metrics,
            trained=metrics,
            trace={
                "critical": critical,
                "set_sizes": generator.integers(2, 90, clients).tolist(),
                **({"mean_gap": 1 / number, "gap_ratio": 1 / number} if critical else {}),
            },
            bytes_up=1000 * clients,
            bytes_down=1000 * clients,
            seconds={"train": 1.0, "aggregate": 0.2, "evaluate": 0.3, "other": 0.0},
        )
        directory.append(record)
        brief = {"accuracy": MetricRecord(mean, (mean, mean), worst)}
        records.append(
            replace(record, participants=[], client_loss=[], metrics=brief, trained=brief, trace={"critical": critical})
        )
    group = np.arange(clients) * 10 // clients
    alike = np.where(group[:, None] == group, 0.9, 0.2).astype(np.float32)
    kept = {
        number: {
            "S": np.clip(alike + generator.normal(0, 0.05, alike.shape), 0, 1).astype(np.float32),
            "sets": (alike > 0.5).astype(np.float32),
            "G": (alike > 0.5).astype(np.float32) * number,
        }
        for number in range(rounds // 10, rounds + 1, rounds // 10)
    }
    directory.write_relations(kept)
    if finished:
        directory.write_summary(records, len(kept))


def first_paint(address: str) -> dict[str, float]:
    """Return the seconds until a page shows something, numbers, the first figure, and all figures."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address, timeout=60_000)
        page.wait_for_selector("html[data-drawn=all]", timeout=120_000)
        entries = page.evaluate("performance.getEntries().map((one) => [one.name, one.startTime])")
    first: dict[str, float] = {}
    for name, milliseconds in entries:
        first.setdefault(name, milliseconds / 1000)
    return {name: first[name] for name in ("first-contentful-paint", "numbers", "figure", "all")}


def measure(rounds: int, clients: int) -> bool:
    """Print the measurements; return whether a limit was exceeded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "huge"
        write_run(path, rounds, clients, finished=True)
        print(f"rounds.jsonl: {(path / 'rounds.jsonl').stat().st_size / 1e6:.0f} MB")
        print(f"relations.npz: {(path / 'relations.npz').stat().st_size / 1e6:.0f} MB")
        begun = time.monotonic()
        report = Path(folder) / "report.html"
        write_page([path], report)
        size = report.stat().st_size
        print(f"fedrema report: {time.monotonic() - begun:.1f} s, {size / 1e6:.1f} MB")
        shown = first_paint(report.as_uri())
        print("report in Chromium:", json.dumps({name: round(value, 2) for name, value in shown.items()}), "s")
        command = [sys.executable, "-m", "fedrema", "watch", str(path), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[2]
            watched = first_paint(address)
            server.terminate()
        print("watch in Chromium:", json.dumps({name: round(value, 2) for name, value in watched.items()}), "s")
    return size > MOST_BYTES or max(shown["numbers"], watched["numbers"]) > MOST_SECONDS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--quick", action="store_true", help="300 rounds of 50 clients")
    asked = parser.parse_args()
    if asked.quick:
        measure(300, 50)  # a trial run: its limits are not checked
    else:
        sys.exit(int(measure(asked.rounds, asked.clients)))
