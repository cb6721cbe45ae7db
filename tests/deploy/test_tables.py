"""Nodes with tables: they agree on preprocessing before round 1, and compute the same models as the simulator."""

import json

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord

from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.deploy.folder import ServerFolder
from fedrema.errors import BadInput
from fedrema.runs.execute import build_simulator
from fedrema.runs.run import Run
from fedrema.tasks import TASKS
from tests.deploy.tables import COLUMNS, NAMES, SETTINGS, TARGETS, Tables, write_table


def simulated(made, method="fedavg", more=()):
    task = ["--task", made.task, "--target", TARGETS[made.task], "--columns", COLUMNS]
    settings = parse_settings(method, ["--federation", str(made.tables), *task, *SETTINGS, *more])
    federation = build_federation(settings.data)
    simulator = build_simulator(settings.for_columns(federation), federation)
    state = simulator.start()
    return federation, state, [result.record for result in simulator.run(state)]


def assert_same(made, conductor, method="fedavg", more=()):
    federation, state, records = simulated(made, method, more)
    central = conductor.central
    assert central.state.params.common.keys() == state.params.common.keys()
    for name, value in state.params.common.items():
        torch.testing.assert_close(central.state.params.common[name], value, rtol=0, atol=1e-6)
    for name, value in central.state.params.own.items():
        torch.testing.assert_close(value[: len(federation)], state.params.own[name], rtol=0, atol=1e-6)
    run = Run(made.place.run)
    assert run.finished
    assert [record.rejected for record in run.rounds] == [{}] * 3
    for found, expected in zip(run.rounds, records, strict=True):
        assert list(found.metrics) == list(expected.metrics)
        for name, metric in expected.metrics.items():
            assert found.metrics[name].value == pytest.approx(metric.value, rel=1e-9)
            assert found.metrics[name].clients == pytest.approx(metric.clients, rel=1e-9)
    assert run.manifest.federation.task.name == federation.task.name
    assert tuple(run.manifest.federation.class_names) == federation.class_names
    assert run.manifest.federation.sample_shape == federation.sample_shape
    return federation, run


@pytest.mark.parametrize("task", TASKS)
def test_every_task_computes_the_same_models_as_the_simulator(task, tmp_path):
    made = Tables(tmp_path / "f", task)
    federation, run = assert_same(made, made.conduct())
    assert run.manifest.federation.preprocessing == federation.preprocessing
    assert "weight is missing" in federation.preprocessing.output_names
    assert "ward=only-1" in federation.preprocessing.output_names


@pytest.mark.parametrize(
    ("task", "method", "more"),
    [
        ("binary", "fedrema", ["--class-weights", "balanced", "--metrics", "log_loss,f1"]),
        ("multilabel", "fedper", ["--class-weights", "balanced"]),
        ("regression", "fedrema", ["--scale", "site", "--regression-loss", "huber"]),
        ("binary", "ditto", ["--scale", "none"]),
        ("multiclass", "fedavg", ["--categories", "embed"]),
    ],
)
def test_settings_of_tables_have_the_same_effect_as_in_the_simulator(task, method, more, tmp_path):
    made = Tables(tmp_path / "f", task, method, more)
    assert_same(made, made.conduct(), method, more)


def rarely(row, seen={}):  # noqa: B006  # counts rows over calls
    """Return a row in which one patient in twenty dies."""
    seen["rows"] = seen.get("rows", 0) + 1
    return row | {"died": int(seen["rows"] % 20 == 1)}


@pytest.mark.parametrize("scale", ["federation", "site"])
def test_a_plan_with_a_rare_class_stratifies_splits_as_the_simulator_does(scale, tmp_path):
    more = ["--scale", scale]
    made = Tables(tmp_path / "f", "binary", more=[*more, "--rare-classes"], change=dict.fromkeys(NAMES, rarely))
    federation, run = assert_same(made, made.conduct(), more=more)
    assert [int(federation.y[(federation.client == row) & federation.test].sum()) for row in range(3)] == [1, 1, 1]
    assert run.metric == run.summary.primary == "log_loss"


def test_a_rare_class_in_the_example_is_part_of_the_plan(tmp_path, capsys):
    for name, change in (("common", lambda row: row), ("rare", rarely)):
        write_table(tmp_path / f"{name}.csv", 0, "binary", change=change)
        arguments = ["--example", str(tmp_path / f"{name}.csv"), "--target", "died", "--task", "binary"]
        assert main(["deploy", "init", str(tmp_path / name), "fedavg", "--nodes", "3", *arguments]) == 0
        assert ServerFolder.open(tmp_path / name).run_config().get("rare-classes", False) == (name == "rare")
    arguments = ["--columns", "a", "--target", "y", "--task", "count", "--rare-classes"]
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", "--nodes", "3", *arguments]) == 2
    assert "rare-classes is for the tasks binary and multiclass, not for count" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "more"), [("regression", []), ("multiclass", ["--categories", "embed"])])
def test_tables_that_are_dealt_for_a_trial_give_the_same_models(task, more, tmp_path):
    made = Tables(tmp_path / "f", task, more=more)
    described = ["--federation", str(made.tables), "--columns", COLUMNS, "--target", TARGETS[task], "--task", task]
    arguments = ["--deal", "--nodes", ",".join(NAMES), "--least-clients", "3", *described, *SETTINGS, *more]
    assert main(["deploy", "init", str(tmp_path / "g"), "fedavg", *arguments]) == 0
    made.folder, made.place = tmp_path / "g", ServerFolder.open(tmp_path / "g")
    assert_same(made, made.conduct(), more=more)
    asked = {message.metadata.message_type for message in made.grid.sent}
    assert asked == {"train"}  # everything is known in advance


def test_columns_target_and_task_can_come_from_an_example(tmp_path, capsys):
    write_table(tmp_path / "example.csv", 0, "regression", rows=5)
    arguments = ["--nodes", "3", "--example", str(tmp_path / "example.csv"), "--target", "cost"]
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", *arguments]) == 0
    config = ServerFolder.open(tmp_path / "f").run_config()
    assert {name: config[name] for name in ("columns", "target", "task", "sample-shape", "classes")} == {
        "columns": COLUMNS,
        "target": "cost",
        "task": "regression",
        "sample-shape": "columns",
        "classes": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--columns", "a,b", "--task", "regression"], "--target must name the column"),
        (["--columns", "a,b", "--target", "y"], "--task must say what the nodes predict"),
        (["--columns", "a,b", "--target", "y,z", "--task", "binary"], "--task binary needs one --target"),
        (["--columns", "a", "--target", "y", "--task", "count", "--classes", "3"], "has no classes"),
        (["--columns", "a", "--target", "y", "--sample-shape", "3"], "--sample-shape is for arrays"),
        (["--sample-shape", "3", "--task", "regression", "--classes", "3"], "has no classes"),
        (["--sample-shape", "3"], "--sample-shape and --classes must describe"),
        (["--sample-shape", "3", "--task", "ordinal", "--classes", "1"], "classes must be at least 2"),
    ],
)
def test_incomplete_descriptions_are_refused_in_one_sentence(arguments, why, tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", "--nodes", "3", *arguments]) == 2
    printed = capsys.readouterr().err
    assert why in printed
    assert printed.count("\n") == 1


def test_the_models_on_the_server_are_exported_if_nodes_choose_their_batches(tmp_path, capsys):
    made = Tables(tmp_path / "f", "count", more=["--rounds", "1", "--batch", "0"])
    made.conduct()
    assert main(["export", str(made.place.run)]) == 0
    assert sorted(file.name for file in (made.place.run / "models").glob("*.safetensors")) == [
        f"{name}.safetensors" for name in NAMES
    ]


def test_with_the_scale_of_each_site_no_mean_leaves_a_node(tmp_path):
    made = Tables(tmp_path / "f", "binary", more=["--scale", "site"])
    made.conduct()
    sent = [json.loads(reply.content["facts"]["statistics"]) for _, reply in made.grid.received[:3]]
    for statistics in sent:
        numbers = statistics["columns"]["numbers"]
        assert {name: (each["mean"], each["m2"] / each["count"]) for name, each in numbers.items()} == {
            "age": (0.0, 1.0),
            "weight": (0.0, 1.0),
        }
        assert set(statistics["classes"].values()) == {0}  # counts are not needed
        assert statistics["target"] is None
    log = (made.folder / "nodes" / "north" / "node.log").read_text()
    assert "round 0: sent statistics of 32 training samples: count of age" in log


def test_a_restarted_server_uses_the_saved_agreement(tmp_path):
    made = Tables(tmp_path / "f", "regression", least=2)
    first = made.conductor()
    agreement = first._agree()
    made.conduct(rounds=1)
    # Nodes that changed their data later, or joined later, use what was agreed.
    again = made.conductor()
    again._agree = None  # never called
    again.conduct()
    assert again.agreement == agreement
    assert Run(made.place.run).rounds[-1].round == 3
    # Before the first checkpoint, the agreement is in a file of its own, which a copy of the checkpoint replaces.
    file = made.folder / "server" / "run.agreed.json"
    assert json.loads(file.read_text())["agreement"]["scale"] == agreement.scale
    file.unlink()
    last = made.conductor(rounds=4)
    last._agree = None
    last.conduct()
    assert Run(made.place.run).rounds[-1].round == 4


def test_a_node_with_other_columns_does_not_participate(tmp_path):
    def without_age(row):
        return {name: value for name, value in row.items() if name != "age"}

    made = Tables(tmp_path / "f", "binary", least=2, change={"south": without_age})
    made.conduct()
    records = Run(made.place.run).rounds
    why = "Column 'age' is missing in its table; the federation's are age, weight, ward, died."
    sent = "column-missing: its table has no column age"
    assert all(record.rejected["south"] == sent for record in records)
    assert [record.participants for record in records] == [[0, 1]] * 3
    log = (made.folder / "nodes" / "south" / "node.log").read_text()
    assert f"refused (column-missing): {why}" in log
    assert f"round 1: refused (column-missing): {why}" in log


def test_a_node_with_an_additional_column_does_not_participate(tmp_path, capsys):
    made = Tables(tmp_path / "f", "binary", least=2, change={"north": lambda row: {**row, "name": "x"}})
    made.conduct()
    assert main(["deploy", "status", str(made.folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its table has a column that the federation does not have" in shown
    assert "additional column 'name'" in (made.folder / "nodes" / "north" / "node.log").read_text()


def test_a_node_joins_after_the_agreement(tmp_path):
    made = Tables(tmp_path / "f", "multiclass", least=2)
    conductor = made.conductor(rounds=1)
    made.grid.offline.add(9)
    conductor.conduct()
    later = made.conductor()
    later.conduct()
    records = Run(made.place.run).rounds
    # "rare-2" is a class that only the late node has.
    assert records[1].rejected["south"].startswith("data: ")
    log = (made.folder / "nodes" / "south" / "node.log").read_text()
    assert "'rare-2'" in log
    assert "the classes are mild, rare-0, rare-1, severe" in log


@pytest.mark.parametrize("sent", [b"{}", b"x" * 1000, 5, None], ids=str)
def test_hostile_statistics_affect_no_other_node(sent, tmp_path, caplog):
    def spoil(node, reply):
        if node == 9 and reply.metadata.message_type == "query.statistics":
            reply.content["facts"] = ConfigRecord({} if sent is None else {"statistics": sent})
        return reply

    made, absent = Tables(tmp_path / "f", "binary", least=2), Tables(tmp_path / "g", "binary", least=2)
    agreement = made.conduct(spoil).agreement
    assert "before round 1: no usable statistics from node south: its statistics" in caplog.text
    conductor = absent.conductor()
    absent.grid.offline.add(9)
    assert conductor._agree() == agreement
    assert Run(made.place.run).rounds[0].participants == [0, 1, 2]


def test_a_server_without_enough_usable_statistics_says_why_it_stops(tmp_path):
    made = Tables(tmp_path / "f", "binary", change={"south": lambda row: {**row, "name": "x"}}, wait=0.1)
    with pytest.raises(BadInput, match=r"needs 3 usable replies .* south: column-added: its table has a column"):
        made.conduct()


def test_statistics_are_releases_without_noise_in_the_privacy_account(tmp_path):
    made = Tables(tmp_path / "f", "binary")
    made.conduct()
    account = json.loads((made.folder / "nodes" / "east" / "kept" / "privacy.json").read_text())
    assert account["releases"] == [0.0] * 5  # statistics, three rounds, and the scores of the last model


def test_a_node_that_adds_noise_sends_no_statistics(tmp_path):
    pytest.importorskip("opacus")
    made = Tables(tmp_path / "f", "regression", least=2, more=["--most-noise", "100"])
    with (made.folder / "nodes" / "north" / "node.toml").open("a") as config:
        config.write("privacy-clip = 1.0\nprivacy-noise = 1.0\n")
    made.conduct()
    sent = [
        node for node, reply in made.grid.received if not reply.has_error() and "statistics" in reply.content["facts"]
    ]
    assert sent == [7, 9]
    assert Run(made.place.run).rounds[0].participants == [0, 1, 2]  # with what the others agreed on


def test_a_node_writes_a_model_that_predicts_from_raw_rows(tmp_path, capsys):
    made = Tables(tmp_path / "f", "regression")
    made.conduct()
    node = made.folder / "nodes" / "north"
    assert main(["deploy", "model", str(node)]) == 0
    data, out = str(node / "table.csv"), str(tmp_path / "found.csv")
    assert main(["predict", str(node / "model"), data, "--client", "north", "--out", out]) == 0
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 41
    assert main(["export", str(made.place.run)]) == 0
    capsys.readouterr()
