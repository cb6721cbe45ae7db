"""Statistics that nodes send before round 1: hostile ones are refused, and arrays of every task need none or agree."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.data.statistics import CategorySummary, NumberSummary, Statistics
from fedrema.deploy.agreement import (
    Agreement,
    Needs,
    NodeStatistics,
    agree,
    read_statistics,
    unusual,
)
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.run_config import Plan, identity_values, read_run_config, run_config
from fedrema.errors import BadInput
from fedrema.runs.execute import build_simulator
from fedrema.runs.run import Run
from tests.deploy.flower_in_process import InProcessGrid

ARGUMENTS = (
    *("--rounds", "2", "--epochs", "1", "--hidden", "6", "--batch", "8", "--lr", "0.05"),
    *("--precision", "float64", "--backend", "loop", "--device", "cpu"),
)
NEEDS = Needs(("age", "ward"), True, True, True, False)


def statistics(age=50.0, wards=("A", "B"), samples=10, **more):
    counts = {ward: samples // len(wards) for ward in wards}
    columns = Statistics(
        samples,
        ("age", "ward"),
        {"age": NumberSummary(samples - 1, age, 9.0 * samples, 1)},
        categories={"ward": CategorySummary(counts, samples - sum(counts.values()))},
    )
    return NodeStatistics(samples, **{"columns": columns, "classes": {"no": 4, "yes": 6}, **more})


def changed(**changes):
    """Return valid statistics as JSON values with some changes, by dotted path."""
    plain = json.loads(statistics().encoded())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = plain
        for parent in parents:
            place = place[parent]
        place[last] = value
    return json.dumps(plain).encode()


def test_valid_statistics_arrive_as_they_were_sent():
    assert read_statistics(statistics().encoded(), NEEDS) == statistics()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("text", "at most"),
        (b"x" * 10**7 + b"x", "at most"),
        (b"{", "cannot be read"),
        (b"[" * 10**5, "cannot be read"),
        (b"[1, 2]", "cannot be read"),
        (changed(samples=0), "of 0 training samples"),
        (changed(samples=10**13), "training samples"),
        (changed(samples=11), "of 10 and of 11"),
        (changed(samples="ten"), "cannot be read"),
        (changed(columns=None), "not those that the federation needs"),
        (changed(target={"count": 10, "mean": 1.0, "m2": 1.0}), "not those that the federation needs"),
        (changed(columns__inputs=["age", "x" * 10**5]), "not valid"),
        (changed(columns__numbers__age__count=5), "not valid"),
        (changed(columns__numbers__age__mean=1e300), "not valid"),
        (changed(columns__numbers__age__m2=-1.0), "not valid"),
        (changed(columns__numbers__age__m2=1e300), "not valid"),
        (changed(columns__numbers__age__missing=-1), "not valid"),
        (changed(columns__numbers__other={"count": 10}), "not valid"),
        (changed(columns__categories__ward__counts={"A": -5, "B": 15}), "not valid"),
        (changed(columns__categories__ward__counts={"": 10}), "not valid"),
        (changed(columns__categories__ward__counts={"A" * 10**5: 10}), "not valid"),
        (changed(columns__categories__ward__counts={str(n): 1 for n in range(2000)}), "not valid"),
        (changed(columns__units={"age": "evil"}), "images or units"),
        (changed(columns__target_numbers={"died": {"count": 10}}), "not valid"),
        (changed(classes={}), "names of classes"),
        (changed(classes={"x" * 1000: 1}), "names of classes"),
        (changed(classes={"yes": 11}), "more than its 10"),
        (changed(classes={"yes": -1}), "more than its 10"),
    ],
    ids=range(28),
)
def test_hostile_statistics_are_refused_in_a_short_sentence(message, why):
    with pytest.raises(BadInput, match=why) as refused:
        read_statistics(message, NEEDS)
    assert len(str(refused.value)) < 300


def test_statistics_that_differ_much_from_the_others_are_refused():
    others = {"a": statistics(40.0), "b": statistics(55.0)}
    assert unusual({**others, "c": statistics(500.0)}) == {}
    assert "times as large" in unusual({**others, "c": statistics(1e50)})["c"]
    many = statistics(wards=tuple(map(str, range(200))), samples=400)
    assert "200 categories at this node" in unusual({**others, "c": many}, most_samples=1000)["c"]
    assert "more than 100 (--most-samples)" in unusual({**others, "c": statistics(samples=10**6)})["c"]
    assert "c" not in unusual({**others, "c": statistics(samples=10**6)}, most_samples=10**7)
    text = statistics()
    as_text = CategorySummary({"old": 10})
    columns = text.columns
    other = NodeStatistics(
        10, Statistics(10, columns.inputs, categories={**columns.categories, "age": as_text}), text.classes
    )
    assert unusual({**others, "c": other}) == {"c": "column 'age' holds text at this node, but numbers at most others"}
    assert set(unusual({"a": statistics(), "c": other})) == {"a", "c"}


def test_a_plan_follows_from_the_statistics():
    plan = Plan("/run", "columns", 0)
    options = parse_settings("fedavg", []).data.table_options
    found = agree({"a": statistics(40.0), "b": statistics(60.0, ("A", "C"))}, NEEDS, plan, options)
    assert found.preprocessing.output_names == ("age", "age is missing", "ward=A", "ward=B", "ward=C", "ward=(other)")
    assert (found.class_names, found.class_counts) == (("no", "yes"), (8, 12))
    assert Agreement.decoded(found.encoded()) == found
    made = found.applied(plan)
    assert (made.shape, made.classes, made.names, made.counts) == ((6,), 2, ("no", "yes"), (8, 12))
    with pytest.raises(BadInput, match="a single class"):
        agree({"a": statistics(classes={"no": 1})}, NEEDS, plan, options)
    three = statistics(classes={"no": 1, "yes": 1, "maybe": 1})
    with pytest.raises(BadInput, match="binary needs two classes"):
        agree({"a": three}, NEEDS, Plan("/run", "columns", 0, task="binary"), options)


def arrays(task, generator, rows=30):
    x = generator.normal(size=(rows, 5)).astype(np.float32)
    quantity = 20 + 5 * x[:, 0] + generator.normal(size=rows)
    y = {
        "multiclass": np.arange(rows) % 3,
        "multilabel": (x[:, :3] > 0).astype(int),
        "ordinal": np.clip((x[:, 0] + 1).astype(int), 0, 3),
        "regression": quantity,
        "count": generator.poisson(np.exp(x[:, 0])),
    }[task]
    return x, y


CLASSES = {"multiclass": 3, "multilabel": 3, "ordinal": 4, "regression": 1, "count": 1}


@pytest.mark.parametrize(
    ("task", "more"),
    [
        *((task, []) for task in CLASSES),
        ("multiclass", ["--class-weights", "balanced"]),
        ("multilabel", ["--class-weights", "balanced", "--metrics", "accuracy"]),
        ("ordinal", ["--class-weights", "balanced"]),
    ],
    ids=str,
)
def test_arrays_of_every_task_give_the_same_models_as_the_simulator(task, more, tmp_path):
    generator = np.random.default_rng(5)
    (tmp_path / "data").mkdir()
    for name in ("a", "b", "c"):
        x, y = arrays(task, generator)
        np.savez(tmp_path / "data" / f"{name}.npz", x=x, y=y)
    arguments = ["--federation", str(tmp_path / "data"), "--task", task, *ARGUMENTS, *more]
    settings = parse_settings("fedavg", arguments)
    plan = Plan(str(tmp_path / "server"), "5", CLASSES[task], task="" if task == "multiclass" else task)
    config = run_config(settings, plan)
    nodes = [
        {"data": str(tmp_path / "data" / f"{name}.npz"), "folder": str(tmp_path / name / "kept")} for name in "abc"
    ]
    grid = InProcessGrid(config, nodes, dict(zip((7, 8, 9), "abc", strict=True)))
    for name in "abc":
        (tmp_path / name / "kept").mkdir(parents=True)
    conductor = Conductor(grid, *read_run_config(config), pause=lambda seconds: None)
    conductor.conduct()
    federation = build_federation(settings.data)
    simulator = build_simulator(settings, federation)
    state = simulator.start()
    records = [result.record for result in simulator.run(state)]
    for name, value in state.params.common.items():
        torch.testing.assert_close(conductor.central.state.params.common[name], value, rtol=0, atol=1e-6)
    run = Run(tmp_path / "server")
    assert run.rounds[0].rejected == {}
    for found, expected in zip(run.rounds, records, strict=True):
        assert {name: metric.value for name, metric in found.metrics.items()} == pytest.approx(
            {name: metric.value for name, metric in expected.metrics.items()}, rel=1e-9
        )
    statistics = [message for message in grid.sent if message.metadata.message_type == "query.statistics"]
    assert len(statistics) == (3 if "balanced" in more or task in ("regression", "count") else 0)


def test_targets_that_do_not_fit_the_task_are_refused_in_one_sentence(tmp_path):
    generator = np.random.default_rng(1)
    for name, task in zip("abc", ("multiclass", "multiclass", "regression"), strict=True):
        x, y = arrays(task, generator)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    settings = parse_settings("fedavg", ["--federation", "(held by the nodes)", "--rounds", "1", "--hidden", "4"])
    config = run_config(settings, Plan(str(tmp_path / "server"), "5", 3))
    grid = InProcessGrid(
        config, [{"data": str(tmp_path / f"{name}.npz")} for name in "abc"], dict(zip((7, 8, 9), "abc", strict=True))
    )
    Conductor(grid, *read_run_config(config), pause=lambda seconds: None).conduct()
    (record,) = Run(tmp_path / "server").rounds
    assert record.participants == [0, 1]
    assert record.rejected["c"] == "data: its data cannot be used in this federation, and its node.log says why"


def test_run_configurations_of_earlier_versions_are_the_same():
    settings = parse_settings("fedavg", ["--rounds", "7"])
    config = run_config(settings, Plan("/run", "1x8x8", 10))
    new = {
        "task",
        "target",
        "target-centre",
        "target-scale",
        "class-counts",
        "class-names",
        "columns",
        "scale",
        "embed",
    }
    new |= {"categories", "image-size", "client-column", "split-column", "regression-loss", "class-weights", "metrics"}
    assert not new & set(config)
    assert not new & set(identity_values(settings, Plan("/run", "1x8x8", 10)))
    assert {"augment", "least-clients", "classes", "sample-shape"} <= set(config)
    assert read_run_config(config)[1] == Plan("/run", "1x8x8", 10)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"task": "guess"}, "task must be one of"),
        ({"task": "binary", "classes": 1}, "classes must be at least 2"),
        ({"target_scale": -1.0}, "target-scale must be"),
        ({"target_centre": float("nan")}, "target-scale must be"),
        ({"class_counts": "[1, 2]"}, "class-counts must be"),
        ({"class_counts": '["1"]'}, "class-counts must be"),
        ({"class_counts": "x"}, "class-counts must be"),
    ],
)
def test_a_plan_with_a_wrong_task_is_refused(values, why):
    with pytest.raises(BadInput, match=why):
        Plan("/run", "1x8x8", **{"classes": 10, **values})
