"""Secure aggregation over Flower's messages, in process: equal to the simulator, dropouts, refusals, hostile nodes."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.core import Role
from fedrema.data import build_federation
from fedrema.deploy.approval import approve, approved_plan, proposed_plan
from fedrema.deploy.audit import verify
from fedrema.deploy.flower_records import FACTS, MASK, MASKED, SECURE, SHARE, UNMASK, VECTOR
from fedrema.deploy.flower_secure_node import SecureNode
from fedrema.errors import BadInput
from fedrema.runs.execute import build_simulator
from tests.deploy.executors import NAMES, SETTINGS, Approved
from tests.deploy.test_flower import Federated

ON = ("--secure-aggregation", "--secure-least", "2", "--secure-threshold", "0.5")


def simulated(method="fedavg", rounds=3, missing=None, more=()):
    """Return the simulator's state after all rounds; `missing` are the rows without uploads, by round."""
    settings = parse_settings(
        method, ["--clients", "3", "--rounds", str(rounds), *SETTINGS, "--secure-aggregation", *more]
    )
    simulator = build_simulator(settings, build_federation(settings.data))
    if missing is not None:
        simulator.participation.choose = lambda number: (
            [row for row in range(3) if row not in missing.get(number, ())],
            list(missing.get(number, ())),
        )
    state = simulator.start()
    return state, [each.record for each in simulator.run(state)], simulator


def assert_same(conductor, state):
    """Check that shared parameters have the same bits."""
    for name, value in state.params.common.items():
        assert torch.equal(conductor.central.state.params.common[name], value), name


def asked(message_or_reply):
    return message_or_reply.metadata.message_type


def dropping(stage, name, number, times=1):
    """Return a function that drops a node's answers to a stage of a round, so many times."""
    dropped = []

    def spoil(node, reply):
        if asked(reply) == stage and NAMES[node - 7] == name and reply.metadata.group_id == str(number):
            dropped.append(reply)
            if len(dropped) <= times:
                return None
        return reply

    return spoil


@pytest.mark.parametrize(
    ("method", "more"),
    [("fedavg", ()), ("fedbn", ("--net", "mlp-bn", "--secure-bits", "32", "--secure-samples", "1000")),
     ("scaffold", ()), ("fedrema", ()), ("fedprior", ())],
)  # fmt: skip
def test_the_result_has_the_same_bits_as_the_simulators_and_nothing_unmasked_leaves(method, more, tmp_path):
    made = Approved(tmp_path / "federation", method, 2, ("--secure-aggregation", *more))
    grid = made.grid()
    conductor = made.conduct(grid)
    state, records, simulator = simulated(method, 2, more=more)
    assert_same(conductor, state)
    found = conductor.run.directory.rounds()
    for one, other in zip(found, records, strict=True):
        assert (one.secure_sum, one.bytes_up) == (other.secure_sum, other.bytes_up)
        assert one.nodes.rejected == one.nodes.clipped == {}
    roles, coverage = simulator.roles(state.params), simulator.coverage(state)
    shared = {name for name, role in roles.items() if role is Role.SHARED}
    for _, reply in grid.received:
        sent = {name for record in reply.content.array_records.values() for name in record}
        assert not sent & shared
        assert sent <= {*coverage.params, *coverage.extras, VECTOR}
        facts = reply.content.config_records.get(FACTS, {})
        if coverage.hides_counts:
            assert not facts.get("count") or asked(reply) != MessageType.TRAIN or not sent
    kinds = [line.entry.what.value for line in verify(made.node("north").path)[0]]
    for sent in ("encrypted shares sent", "masked parameters sent", "shares to unmask the sum sent"):
        assert kinds.count(sent) == 2


def test_clipped_values_are_logged_on_the_node_and_counted_in_the_record(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1, (*ON, "--secure-range", "0.001"))
    conductor = made.conduct()
    (record,) = conductor.run.directory.rounds()
    assert record.secure_sum.clipped_clients == 3
    assert "values changed by more than 0.001 and were clipped (--secure-range)" in made.log("south")
    assert_same(conductor, simulated(rounds=1, more=("--secure-range", "0.001"))[0])


def test_sample_counts_are_hidden_where_the_method_needs_only_their_sum(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1, ON)
    grid = made.grid()
    conductor = made.conduct(grid)
    counts = [
        reply.content.config_records[FACTS]["count"]
        for _, reply in grid.received
        if reply.metadata.group_id == "1" and asked(reply) == MessageType.TRAIN
    ]
    assert counts == [0, 0, 0]
    assert conductor.central.registry.train_counts == dict.fromkeys(NAMES, 0)
    assert conductor.run.directory.rounds()[0].secure_sum.samples == 60


@pytest.mark.parametrize("stage", [SHARE, MASK])
def test_a_node_that_fails_between_stages_is_missing_in_the_sum(stage, tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 2, ON)
    conductor = made.conduct(made.grid(dropping(stage, "south", 1)))
    assert_same(conductor, simulated(rounds=2, missing={1: (1,)})[0])
    records = conductor.run.directory.rounds()
    assert [record["participants"] for record in records] == [[0, 2], [0, 1, 2]]
    assert records[0]["rejected"] == {"south": "no reply within 300 s"}


def test_a_node_that_fails_before_unmasking_is_in_the_sum(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1, ON)
    conductor = made.conduct(made.grid(dropping(UNMASK, "south", 1)))
    assert_same(conductor, simulated(rounds=1)[0])
    assert conductor.run.directory.rounds()[0]["participants"] == [0, 1, 2]


def test_below_the_threshold_a_round_changes_nothing_and_is_repeated(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 2, ("--secure-aggregation", "--wait-seconds", "600"))
    conductor = made.conduct(made.grid(dropping(MASK, "south", 2)))  # the sum needs three nodes
    assert_same(conductor, simulated(rounds=2)[0])
    (record,) = conductor.run.directory.rounds()[1:]
    assert record["participants"] == [0, 1, 2]
    (attempt,) = record.nodes.attempts
    assert attempt["south"] == "no reply within 300 s"
    made = Approved(tmp_path / "stuck", "fedavg", 2, ("--secure-aggregation",))
    with pytest.raises(BadInput, match="Round 2 needs 3 usable replies"):
        made.conduct(made.grid(dropping(MASK, "south", 2, times=99)))


def test_a_node_that_was_restarted_between_stages_counts_as_missing(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 2, ON)

    def restart(node, reply):
        if asked(reply) == SHARE and NAMES[node - 7] == "west" and reply.metadata.group_id == "2":
            made.executors["west"].secure = SecureNode(made.node("west"), made.executors["west"].plan)
        return reply

    conductor = made.conduct(made.grid(restart))
    assert_same(conductor, simulated(rounds=2, missing={2: (2,)})[0])
    assert "it was restarted, or has not trained for it" in made.log("west")
    assert "it was restarted" in conductor.run.directory.rounds()[1]["rejected"]["west"]


def test_a_server_that_is_killed_after_unmasking_repeats_the_round_with_the_same_nodes_only(tmp_path, monkeypatch):
    made = Approved(tmp_path / "federation", "fedavg", 2, ON)
    with monkeypatch.context() as patch:

        def dies(self, record):
            raise KeyboardInterrupt

        patch.setattr("fedrema.deploy.run_state.RunState.save_round", dies)
        with pytest.raises(KeyboardInterrupt):
            made.conduct()
    with pytest.raises(BadInput, match="unmasked: round 1 was unmasked before for a sum over other nodes"):
        made.conduct(made.grid(dropping(MASK, "west", 1, times=99)))
    conductor = made.conduct()
    assert_same(conductor, simulated(rounds=2)[0])
    assert json.loads((made.node("north").kept / "unmasked.json").read_text()).keys() == {"1", "2"}


def with_vector(change, name="south", number=2):
    """Return a function that changes a node's masked parameters in a round."""

    def spoil(node, reply):
        if asked(reply) == MASK and NAMES[node - 7] == name and reply.metadata.group_id == str(number):
            vector = reply.content.array_records[MASKED][VECTOR].numpy()
            reply.content[MASKED] = ArrayRecord({VECTOR: Array(change(vector))})
        return reply

    return spoil


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda vector: vector[:-1], "'vector' has shape"),
        (lambda vector: vector.astype(np.float64), "'vector' holds torch.float64"),
    ],
)
def test_malformed_masked_parameters_are_rejected(change, why, tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1, ON)
    conductor = made.conduct(made.grid(with_vector(change, number=1)))
    assert why in conductor.run.directory.rounds()[0]["rejected"]["south"]
    assert_same(conductor, simulated(rounds=1, missing={1: (1,)})[0])


def test_an_unusually_large_sum_is_scaled_down_and_recorded(tmp_path):
    def add(vector):
        changed = vector.copy()
        changed[:-3] += np.uint64(2**33)  # 128 samples' worth of a change by 1, in every parameter
        return changed

    made = Approved(tmp_path / "federation", "fedavg", 2, ON)
    conductor = made.conduct(made.grid(with_vector(add)))
    (why,) = conductor.run.directory.rounds()[1].nodes.clipped.items()
    assert why[0] == "the sum"
    assert "the change of its shared parameters is implausibly large" in why[1]
    before = simulated(rounds=1)[0].params.common
    norms = conductor.central.registry.norms
    (group,) = norms.recent
    after = conductor.central.state.params.common
    change = torch.cat([(after[name] - before[name]).reshape(-1) for name in before]).norm()
    assert float(change) == pytest.approx(norms.recent[group][-1], rel=1e-6)


def without_keys(node, reply):
    if asked(reply) == MessageType.TRAIN and NAMES[node - 7] == "south" and reply.metadata.group_id == "1":
        reply.content[SECURE] = ConfigRecord({SECURE: b"none"})
    return reply


def test_a_reply_without_keys_is_rejected(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1, ON)
    conductor = made.conduct(made.grid(without_keys))
    assert "cannot be read" in conductor.run.directory.rounds()[0]["rejected"]["south"]
    assert conductor.run.directory.rounds()[0]["participants"] == [0, 2]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secure-aggregation": False}, "not approved secure-aggregation = False"),
        ({"secure-least": 3}, "has no secure-least|not approved secure-least = 3"),
        ({"secure-threshold": 0.9}, "not approved secure-threshold = 0.9"),
        ({"secure-range": 1e6}, "not approved any secure-range"),
    ],
)
def test_a_node_that_approved_secure_aggregation_answers_nothing_else(changes, why, tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1, ON)
    with pytest.raises(BadInput, match=why):
        made.conduct(made.grid(**changes))
    assert why.split("|")[-1].split(" = ")[0] in made.log("north")


def stage_message(kind, number=1, name="north"):
    content = RecordDict({FACTS: ConfigRecord({"name": name, "round": number}), SECURE: ConfigRecord({SECURE: b"?"})})
    message = Message(content, 7, kind, ttl=9.0)
    message.metadata.__dict__["_message_id"] = "1"
    return message


def test_stages_without_a_contribution_or_without_approval_are_refused(tmp_path):
    made = Approved(tmp_path / "secure", "fedavg", 1, ON)
    context = made.grid().contexts[7]
    reply = made.executors["north"].reply_to(stage_message(UNMASK), context)
    assert "has no contribution to this sum" in reply.error.reason
    reply = made.executors["north"].reply_to(stage_message(UNMASK, name="south"), context)
    assert "the server calls this node 'south'" in reply.error.reason
    plain = Approved(tmp_path / "plain", "fedavg", 1)
    reply = plain.executors["north"].reply_to(stage_message(MASK), plain.grid().contexts[7])
    assert "not approved messages of the type query.mask" in reply.error.reason


def test_without_the_executor_of_a_node_nothing_is_sent(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--secure-aggregation"], wait_seconds=0.0)
    with pytest.raises(BadInput, match="needs a node that fedrema deploy client runs"):
        made.conductor().conduct()


def test_the_keys_of_the_peers_are_placed_and_approved(tmp_path, capsys):
    made = Approved(tmp_path / "federation", "fedavg", 1, ON)
    assert sorted(file.name for file in made.node("north").peers.iterdir()) == ["south.pub", "west.pub"]
    assert main(["deploy", "approve", str(made.node("north").path), "--show"]) == 0
    shown = capsys.readouterr().out
    assert "only under masks, for sums over at least 2 nodes" in shown
    assert "south SHA256:" in shown
    assert main(["deploy", "add", str(made.folder), "east"]) == 0
    assert sorted(file.name for file in made.node("east").peers.iterdir()) == ["north.pub", "south.pub", "west.pub"]
    with pytest.raises(BadInput, match="the setting for 'peers' has changed since the plan was approved"):
        approved_plan(made.node("north"))
    node = made.node("north")
    approve(node, proposed_plan(node))
    assert approved_plan(node).node["peers"].startswith("east SHA256:")


def test_a_federation_without_secure_aggregation_has_no_peers(tmp_path):
    made = Approved(tmp_path / "federation", "fedavg", 1)
    assert not made.node("north").peers.exists()
    assert not any(name.startswith("secure") for name in made.place.run_config())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fedproto", "--secure-aggregation"), "clients of FedProto send none"),
        (("fedavg", "--secure-least", "5"), "--secure-least has no effect without --secure-aggregation"),
        (("fedavg", "--secure-aggregation", "--secure-threshold", "0.4"), "must be at least 0.5 and below 1, got 0.4"),
        (("fedavg", "--secure-aggregation", "--secure-neighbours", "3"), "must be an even number up to 1000, got 3"),
        (("fedavg", "--secure-aggregation", "--secure-least", "1"), "--secure-least must be at least 2, got 1"),
        (
            ("fedavg", "--secure-aggregation", "--secure-least", "4"),
            "needs at least as many nodes, but --nodes names 3",
        ),
    ],
)
def test_what_does_not_work_is_refused_in_one_sentence(words, sentence, tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "made"), *words, "--deal", "--nodes", "3"]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_noise_of_the_nodes_is_added_before_masking(tmp_path):
    pytest.importorskip("opacus")

    def private(node):
        with (node / "node.toml").open("a") as file:
            file.write("privacy-clip = 0.5\nprivacy-noise = 0.1\n")

    made = Approved(tmp_path / "federation", "fedavg", 1, ON, private)
    conductor = made.conduct()
    (record,) = conductor.run.directory.rounds()
    assert record["participants"] == [0, 1, 2]
    assert all(value > 0 for value in record.nodes.epsilon.values())
    with pytest.raises(AssertionError):
        assert_same(conductor, simulated(rounds=1)[0])
