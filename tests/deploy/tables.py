"""Tables of nodes with missing values and categories, and a federation of apps in this process that trains on them."""

import csv

import numpy as np

from fedrema.cli import main
from fedrema.config.settings import read_toml
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.run_config import read_run_config
from fedrema.deploy.run_state import locked_run
from tests.deploy.flower_in_process import InProcessGrid

NAMES = ("east", "north", "south")
SETTINGS = (
    *("--rounds", "3", "--epochs", "1", "--hidden", "6", "--batch", "8", "--lr", "0.05", "--seed", "3"),
    *("--precision", "float64", "--backend", "loop", "--device", "cpu"),
)
TARGETS = {"multiclass": "kind", "binary": "died", "multilabel": "died,ill", "ordinal": "grade", "regression": "cost",
           "count": "visits"}  # fmt: skip
COLUMNS = "age,weight,ward"


def write_table(file, seed, task, rows=40, change=lambda row: row):
    """Write a node's table, whose columns depend on the task."""
    generator = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        age, weight = generator.normal(50 + 5 * seed, 10), generator.normal(70, 12)
        made.append(
            {
                "age": f"{age:.1f}",
                "weight": "" if number % 5 == seed % 5 else f"{weight:.2f}",
                "ward": ("A", "B", "C", f"only-{seed}", "NA")[int(generator.integers(5))],
                "died": int(age + generator.normal(0, 5) > 50),
                "ill": int(weight > 75),
                "kind": ("mild", "severe", f"rare-{seed}")[number % 3],
                "grade": min(3, int(abs(age - 40) // 8)),
                "cost": f"{100 + 3 * age + generator.normal(0, 4):.3f}",
                "visits": int(generator.poisson(max(age, 1) / 20)),
            }
        )
    kept = [*COLUMNS.split(","), *TARGETS[task].split(",")]
    changed = [change({name: row[name] for name in kept}) for row in made]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(changed[0]))
        writer.writeheader()
        writer.writerows(changed)


class Tables:
    """A federation that `fedrema deploy init` created, with a table in each node's folder."""

    def __init__(self, folder, task, method="fedavg", more=(), change=None, least=3, wait=3):
        self.folder, self.task = folder, task
        described = ["--columns", COLUMNS, "--target", TARGETS[task], "--task", task]
        arguments = [
            "--nodes",
            ",".join(NAMES),
            "--least-clients",
            str(least),
            "--wait-seconds",
            "3",
            *described,
            *SETTINGS,
            *more,
        ]
        assert main(["deploy", "init", str(folder), method, *arguments]) == 0
        self.place = ServerFolder.open(folder)
        self.tables = folder / "tables"
        self.tables.mkdir()
        for seed, name in enumerate(NAMES):
            edit = (change or {}).get(name, lambda row: row)
            write_table(self.tables / f"{name}.csv", seed, task, change=edit)
            node = folder / "nodes" / name
            (node / "table.csv").write_bytes((self.tables / f"{name}.csv").read_bytes())
            config = (node / "node.toml").read_text()
            (node / "node.toml").write_text(config.replace('data = "data.npz"', 'data = "table.csv"'))
        self.grid = None

    @property
    def config(self):
        config = read_toml(self.place.app / "pyproject.toml", "the app")["tool"]["flwr"]["app"]["config"]
        return {**config, "folder": str(self.place.run)}

    def conductor(self, spoil=lambda node, reply: reply, **changes):
        config = {**self.config, **changes}
        nodes = [NodeFolder.open(self.folder / "nodes" / name) for name in NAMES]
        for node in nodes:
            node.kept.mkdir(exist_ok=True)
        names = dict(zip((7, 8, 9), NAMES, strict=True))
        self.grid = InProcessGrid(config, [node.node_config() for node in nodes], names, spoil)
        return Conductor(self.grid, *read_run_config(config), pause=lambda seconds: None)

    def conduct(self, spoil=lambda node, reply: reply, **changes):
        conductor = self.conductor(spoil, **changes)
        with locked_run(self.place.run) as lock:
            conductor.conduct(lock)
        return conductor
