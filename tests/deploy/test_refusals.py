"""No part of a sample, a file or a path leaves a node in an error: neither in a message nor in a file of the server."""

import gzip
import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet

from fedrema.cli import main
from fedrema.deploy import flower_client_app
from fedrema.deploy.approval import approve, approved_plan, proposed_plan
from fedrema.deploy.audit import Event, verify
from fedrema.deploy.flower_executor import Executor
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node import Node
from fedrema.deploy.privacy import PrivacyGuard
from fedrema.errors import BadInput, Diverged
from tests.deploy.executors import Approved
from tests.deploy.messages_to_nodes import STATISTICS, ask, reason, with_agreement
from tests.deploy.tables import NAMES, Tables

PLANTED = ("Zq7Maria", "58.123457", "zq7file", "91357")
"""What the damaged tables and their names contain, and no error may."""
DATA = "data: its data cannot be used in this federation, and its node.log says why"
HEADER = "age,weight,ward,kind"
GOOD = [f"{40 + n}.5,{60 + n},{'AB'[n % 2]},{('mild', 'severe')[n % 2]}" for n in range(20)]


def table(*rows, header=HEADER):
    return "\n".join([header, *rows, ""]).encode()


CELLS = {
    "text for a number": table(*GOOD, "Zq7Maria,60,A,mild"),
    "a number with a comment": table(*GOOD, "58.123457 (Zq7Maria),60,A,mild"),
    "numbers for text": table(*[row.replace(",A,", ",58.123457,").replace(",B,", ",91357,") for row in GOOD]),
    "infinite": table(*GOOD, "inf,60,Zq7Maria,mild"),
    "too large": table(*GOOD, "1e300,58.123457,Zq7Maria,mild"),
    "unknown label": table(*GOOD, "50,60,A,Zq7Maria"),
    "a label with a comment": table(*GOOD, "50,60,A,mild (Zq7Maria)"),
    "missing label": table(*GOOD, "58.123457,60,Zq7Maria,"),
    "numbers as labels": table(*[row.replace("mild", "58.123457").replace("severe", "91357") for row in GOOD]),
    "short row": table(*GOOD, "58.123457,Zq7Maria"),
    "long row": table(*GOOD, "58.123457,60,A,mild,Zq7Maria"),
    "open quote": table(*GOOD, '"Zq7Maria,60,A,mild'),
    "not UTF-8": table(*GOOD) + "58.123457,60,Zq7Mariaü,mild\n".encode("latin-1"),
    "NUL": table(*GOOD, "58.123457,60,Zq7Maria\x00,mild"),
    "a long field": table(*GOOD, f"58.123457,60,{'Zq7Maria' * 40_000},mild"),
    "no rows": table(),
    "empty": b"",
    "only a name": b"Zq7Maria",
    "a column is missing": table(*[row.partition(",")[2] for row in GOOD], header="weight,ward,kind"),
    "an additional column": table(*[f"{row},1" for row in GOOD], header=f"{HEADER},Zq7Maria"),
    "a column twice": table(*[f"{row},1" for row in GOOD], header=f"{HEADER},age"),
    "a wrong split": table(*[f"{row},Zq7Maria" for row in GOOD], header=f"{HEADER},split"),
    "several clients": table(*[f"{row},{('Zq7Maria', '91357')[n % 2]}" for n, row in enumerate(GOOD)],
                             header=f"{HEADER},client"),
    "many categories": table(*[f"50,60,Zq7Maria{n},mild" for n in range(1100)]),
    "a table as text": json.dumps({"Zq7Maria": 58.123457}).encode(),
}  # fmt: skip


class Asked:
    """A federation of tables, whose requests are sent to a node with a damaged table."""

    def __init__(self, folder):
        self.folder = folder
        made = Tables(folder, "multiclass", more=["--rounds", "1"])
        made.conduct()
        self.config, sent = made.config, made.grid.sent
        self.statistics = next(each.content for each in sent if each.metadata.message_type == STATISTICS)
        self.first = next(each.content for each in sent if each.metadata.message_type == "train")
        self.agreement = json.loads(self.first["agreement"]["agreement"])

    def victim(self, place, name, content, **settings):
        """Return the executor of a node with this data in a file of this name, or in a folder if it is a function."""
        node = place / "zq7file-node"
        shutil.copytree(self.folder / "nodes" / NAMES[0], node)
        for file in (*node.glob("audit*"), node / "node.log", *(node / "kept").iterdir()):
            file.unlink(missing_ok=True)
        (node / name).write_bytes(content)
        text = (node / "node.toml").read_text().replace('data = "table.csv"', f'data = "{name}"')
        (node / "node.toml").write_text(text + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        opened = NodeFolder.open(node)
        approve(opened, proposed_plan(opened))
        return Executor(opened, approved_plan(opened))

    def changed(self, **changes):
        """Return the request with another agreement."""
        return with_agreement(self.first, json.dumps({**self.agreement, **changes}).encode())


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return Asked(tmp_path_factory.mktemp("asked") / "federation")


def check(executor, asked, requests=None):
    """Ask for statistics and for training; nothing that was planted is in an error, in the audit log or in a reply."""
    refused = []
    for content, kind in requests or [(asked.statistics, STATISTICS), (asked.first, "train")]:
        reply = ask(executor, asked.config, content, kind)
        refused += [reason(reply)] if reply.has_error() else []
    logged = "".join(str(line) for line in verify(executor.folder.path)[0])
    for secret in PLANTED:
        assert not any(secret.lower() in text.lower() for text in (*refused, logged)), secret
    assert all(re.fullmatch("[a-z-]+: .+", text) for text in refused)
    entries = [line.entry for line in verify(executor.folder.path)[0]]
    said = [entry.decision for entry in entries if entry.what is Event.REQUEST_REFUSED]
    assert said == [f"sent instead of a reply: {text}" for text in refused]
    return refused


@pytest.mark.parametrize("damage", CELLS)
def test_damaged_tables(damage, asked, tmp_path):
    executor = asked.victim(tmp_path, "zq7file.csv", CELLS[damage])
    refused = check(executor, asked)
    tolerated = {"numbers for text", "a column twice", "NUL"}  # the first are numbers as names of categories
    assert refused or damage in tolerated
    if refused:
        assert (executor.folder.path / "node.log").read_text().count("refused (") == len(refused)


def compressed():
    return gzip.compress(table(*GOOD, "Zq7Maria,60,A,mild"))


def parquet_file():
    sink = pyarrow.BufferOutputStream()
    columns = {"age": ["Zq7Maria"] * 4, "weight": [58.123457] * 4, "ward": [91357] * 4, "kind": [["Zq7Maria"]] * 4}
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


FILES = {
    "gzip": ("zq7file.csv.gz", compressed()),
    "incomplete gzip": ("zq7file.csv.gz", compressed()[:-9]),
    "no gzip": ("zq7file.csv.gz", b"Zq7Maria"),
    "parquet": ("zq7file.parquet", parquet_file()),
    "incomplete parquet": ("zq7file.parquet", parquet_file()[:-9]),
    "no parquet": ("zq7file.parquet", b"Zq7Maria"),
    "no npz": ("zq7file.npz", b"Zq7Maria"),
    "no table": ("zq7file.txt", b"Zq7Maria"),
}


@pytest.mark.parametrize("damage", FILES)
def test_damaged_files(damage, asked, tmp_path):
    assert len(check(asked.victim(tmp_path, *FILES[damage]), asked)) == 2


def test_a_file_that_disappears(asked, tmp_path):
    executor = asked.victim(tmp_path, "zq7file.csv", table(*GOOD))
    (executor.folder.path / "zq7file.csv").unlink()
    assert check(executor, asked) == [DATA] * 2


ARRAYS = {
    "labels": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.array(["Zq7Maria"] * 4)},
    "numbers": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.array([91357] * 4)},
    "objects": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.array([{"Zq7Maria": 58.123457}] * 4)},
    "text": {"x": np.array(["Zq7Maria"] * 4), "y": np.zeros(4, int)},
    "shape": {"x": np.zeros((4, 9137), np.float32), "y": np.zeros(4, int)},
    "lengths": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.zeros(91357, int)},
    "infinite": {"x": np.full((4, 1, 8, 8), np.inf, np.float32), "y": np.zeros(4, int)},
    "split": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.zeros(4, int), "split": np.array(["Zq7Maria"] * 4)},
    "clients": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.zeros(4, int),
                "client": np.array(["Zq7Maria", "91357"] * 2)},
    "more": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.zeros(4, int), "Zq7Maria": np.zeros(4)},
    "targets": {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.full(4, 58.123457)},
}  # fmt: skip


@pytest.fixture(scope="module")
def of_arrays(tmp_path_factory):
    """A federation of arrays, and the first request to node north."""
    made = Approved(tmp_path_factory.mktemp("arrays") / "federation", "fedavg", rounds=1)
    grid = made.grid()
    made.conduct(grid)
    return made, grid.contexts[7].run_config, grid.sent[0].content


@pytest.mark.parametrize("damage", ARRAYS)
def test_damaged_arrays(damage, of_arrays, tmp_path):
    made, config, first = of_arrays
    node = tmp_path / "zq7file-node"
    shutil.copytree(made.node("north").path, node)
    np.savez(node / "zq7file.npz", **ARRAYS[damage])
    text = (node / "node.toml").read_text()
    (node / "node.toml").write_text(text.replace('data = "data.npz"', 'data = "zq7file.npz"'))
    folder = NodeFolder.open(node)
    approve(folder, proposed_plan(folder))
    assert reason(ask(Executor(folder, approved_plan(folder)), config, first)) == DATA


def test_a_folder_of_damaged_images(of_arrays, tmp_path):
    made, config, first = of_arrays
    node = tmp_path / "zq7file-node"
    shutil.copytree(made.node("north").path, node)
    (node / "zq7file" / "Zq7Maria").mkdir(parents=True)
    (node / "zq7file" / "Zq7Maria" / "91357.png").write_bytes(b"Zq7Maria")
    text = (node / "node.toml").read_text()
    (node / "node.toml").write_text(text.replace('data = "data.npz"', 'data = "zq7file"'))
    folder = NodeFolder.open(node)
    approve(folder, proposed_plan(folder))
    assert reason(ask(Executor(folder, approved_plan(folder)), config, first)) == DATA


def lies(asked):
    """Return requests with an agreement that would make a node quote its samples."""
    plan = asked.agreement["preprocessing"]
    number, text = plan["numbers"][0], plan["categories"][0]

    def with_rules(numbers=None, categories=None, **changes):
        rules = {
            "numbers": plan["numbers"] if numbers is None else numbers,
            "categories": plan["categories"] if categories is None else categories,
        }
        return asked.changed(preprocessing={**plan, **rules, **changes})

    return {
        "tiny deviation": with_rules([{**number, "deviation": 1e-300}, *plan["numbers"][1:]]),
        "no deviation": with_rules([{**number, "deviation": 0.0}, *plan["numbers"][1:]]),
        "text as numbers": with_rules([*plan["numbers"], {**number, "column": text["column"]}], []),
        "numbers as text": with_rules([plan["numbers"][1]], [*plan["categories"], {**text, "column": "age"}]),
        "other classes": asked.changed(class_names=["Zq7a", "Zq7b"]),
        "one class": asked.changed(class_names=["mild"]),
        "unknown columns": with_rules(inputs=["age", "weight", "ward", "kind"]),
        "other scale": with_rules(scale="none"),
        "images": with_rules(images=[{"column": "ward", "channels": 1, "height": 8, "width": 8}]),
        "not JSON": with_agreement(asked.first, b"{"),
    }


LIES = ("tiny deviation", "no deviation", "text as numbers", "numbers as text", "other classes", "one class",
        "unknown columns", "other scale", "images", "not JSON")  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_false_agreement_returns_no_cell(lie, asked, tmp_path):
    rows = [row.replace("40.5", "58.123457").replace(",60,", ",91357,") for row in GOOD]
    executor = asked.victim(tmp_path, "zq7file.csv", table(*rows))
    (refused,) = check(executor, asked, [(lies(asked)[lie], "train")])
    assert refused.split(":")[0] in ("data", "agreement", "request", "internal")


def test_a_server_cannot_try_another_agreement(asked, tmp_path):
    executor = asked.victim(tmp_path, "zq7file.csv", table(*GOOD))
    assert ask(executor, asked.config, asked.first).has_content()
    (refused,) = check(executor, asked, [(asked.changed(class_names=["mild", "other", "severe"]), "train")])
    assert refused.startswith("agreement-changed: ")


FAILURES = [
    BadInput("Zq7Maria"),
    Diverged("Zq7Maria"),
    ValueError("Zq7Maria"),
    KeyError("Zq7Maria"),
    MemoryError("Zq7Maria"),
    OSError(28, "Zq7Maria", "/zq7file"),
    UnicodeDecodeError("utf-8", b"Zq7Maria", 0, 1, "Zq7Maria"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (flower_client_app, "own_samples"),
        (flower_client_app, "statistics_of_table"),
        (flower_client_app, "save_model"),
        (Node, "reply_to"),
        (NodeFolder, "node_config"),
        (PrivacyGuard, "protect"),
        (PrivacyGuard, "check_budget"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_error_anywhere(owner, method, error, asked, tmp_path, monkeypatch):
    def fail(*arguments, **named):
        raise error

    settings = {"privacy-clip": 1.0} if owner is PrivacyGuard else {}
    executor = asked.victim(tmp_path, "zq7file.csv", table(*GOOD), **settings)
    monkeypatch.setattr(owner, method, fail)
    assert check(executor, asked)


def test_no_file_of_an_honest_server_contains_a_damaged_cell(tmp_path, capsys):
    def damage(row):
        return {**row, "age": "58.123457"} | ({"kind": "mild (Zq7Maria)"} if row["kind"] == "mild" else {})

    def odd_weight(row):
        return {**row, "weight": "91357 (Zq7Maria)" if row["kind"] == "mild" else row["weight"]}

    more = ["--class-names", "mild,severe,rare-0,rare-1,rare-2", "--rounds", "1", "--class-weights", "balanced"]
    made = Tables(tmp_path / "f", "multiclass", least=1, more=more, change={"north": damage, "south": odd_weight})
    made.conduct()
    assert main(["deploy", "status", str(made.folder)]) == 0
    shown = capsys.readouterr().out
    held = {file: file.read_bytes() for file in made.place.path.rglob("*") if file.is_file()}
    for secret in ("Zq7Maria", "58.123457", "91357"):
        assert secret not in shown
        assert not [file.name for file, content in held.items() if secret.encode() in content]
    for name in ("north", "south"):
        assert "Zq7Maria" in (made.folder / "nodes" / name / "node.log").read_text()  # for its owner
