"""Hostile replies: none stops the server or damages the other clients' models, and honest replies are accepted."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord

from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.deploy.flower_records import read_reply, reply_record
from fedrema.deploy.node import Node
from fedrema.deploy.registry import Registry
from fedrema.deploy.scores import Score
from fedrema.deploy.server import CentralServer
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.trained_clients import dummy_federation
from tests.fixtures import make_federation
from tests.quick import quick_arguments

ARGUMENTS = [
    *("--hidden", "8", "--rounds", "6", "--epochs", "2", "--batch", "10", "--lr", "0.05"),
    *("--backend", "loop", "--device", "cpu", "--seed", "3"),
]
HOSTILE = 1
"""The row of the hostile node."""


class Federated:
    """Nodes and a server in this process; what nodes send passes through Flower's records."""

    def __init__(self, nodes, method="fedrema", counts=None, more=(), **limits):
        self.settings = parse_settings(method, [*ARGUMENTS, *quick_arguments(method), *more])
        counts = counts or (60, 50, 70, 55, 45, 65, 75, 40)[:nodes]
        federation = make_federation(counts=counts, names=[f"n{row}" for row in range(len(counts))])
        if "--dataset" in more:
            federation = build_federation(self.settings.data)
        self.nodes = [Node(self.settings, federation.only(row)) for row in range(len(counts))]
        self.central = CentralServer(
            self.settings, dummy_federation(federation.sample_shape, federation.task), len(counts), **limits
        )
        for node in self.nodes:
            self.central.registry.row(node.name)
        self.records = []

    def round(self, attack=lambda content: None, absent=()):
        """Run a round; `attack` changes the content of the hostile node's reply."""
        replies, unreadable = {}, {}
        for row, node in enumerate(self.nodes):
            if row in absent:
                continue
            content = reply_record(node.reply_to(self.central.request(node.name)))
            if row == HOSTILE:
                attack(content)
            try:
                replies[node.name] = read_reply(content, self.central.expected)
            except BadInput as error:
                unreadable[node.name] = str(error)
        record = self.central.complete_round(replies)
        record.nodes.rejected.update(unreadable)
        self.records.append(record)
        return record

    def accuracy(self, row=0):
        """Return a node's accuracy with the model that it receives."""
        node = self.nodes[row]
        score = node.reply_to(self.central.request(node.name, train=False)).received
        return score.value("accuracy")


def arrays(content, group="params"):
    return {name: array.numpy() for name, array in content[group].items()}


def put(content, group, values):
    content[group] = ArrayRecord({name: Array(value) for name, value in values.items()})


def with_array(change, group="params", which=0):
    """Return an attack that changes one array as it is serialised."""

    def attack(content):
        items = dict(content[group].items())
        name = list(items)[which]
        items[name] = change(items[name])
        content[group] = ArrayRecord(items)

    return attack


def with_values(change, group="params", chosen=lambda name: True):
    """Return an attack that changes the values of some arrays."""

    def attack(content):
        values = arrays(content, group)
        put(content, group, {name: change(value) if chosen(name) else value for name, value in values.items()})

    return attack


def with_facts(**changes):
    """Return an attack that changes facts; None removes one."""

    def attack(content):
        facts = {**content["facts"], **{name.replace("_", "-"): value for name, value in changes.items()}}
        content["facts"] = ConfigRecord({name: value for name, value in facts.items() if value is not None})

    return attack


def score(name, total, correct=(0, 0)):
    """Return the facts of a score with these numbers of correct predictions and of test samples, by half."""
    pairs = [*zip(correct, total, strict=True), (sum(correct), sum(total))]
    return {f"{name}_total": list(total), f"{name}_accuracy": [float(number) for pair in pairs for number in pair]}


def declaring(shape, array):
    """Return an array whose header describes another shape than the one it declares."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": np.dtype(array.dtype).str, "fortran_order": False, "shape": shape}
    )
    return Array(array.dtype, array.shape, array.stype, header.getvalue() + array.data[128:])


def filled(value):
    return lambda found: np.full_like(found, value)


def in_head(name):
    return name.startswith("head")


UNREADABLE = {
    "count 1e300": (with_facts(count=1e300), "count must be a whole number"),
    "count 2^63": (with_facts(count=2**63), "count must be a whole number"),
    "no count": (with_facts(count=None), "count must be a whole number"),
    "count of text": (with_facts(count="9" * 10**6), "count must be a whole number"),
    "count true": (with_facts(count=True), "count must be a whole number"),
    "round 1.5": (with_facts(round=1.5), "round must be a whole number"),
    "loss NaN": (with_facts(loss=float("nan")), "loss must be a number"),
    "loss 1e308": (with_facts(loss=1e308), "loss must be a number"),
    "epsilon a list": (with_facts(epsilon=[1.0]), "epsilon must be a number"),
    "score over 2^62": (with_facts(received_total=[2**62, 2**62]), "score must be a whole number"),
    "score of three": (with_facts(received_total=[3, 3, 3]), "a pair of numbers"),
    "score of one number": (with_facts(received_accuracy=3), "six numbers"),
    "score of four numbers": (with_facts(received_accuracy=[3.0] * 4), "six numbers"),
    "half a score": (with_facts(trained_accuracy=None), "six numbers"),
    "score without samples": (with_facts(trained_total=None), "a pair of numbers"),
    "negative score": (with_facts(**score("received", (5, 5), (-1, 0))), "score must be a whole number"),
    "half a prediction": (with_facts(**score("received", (5, 5), (0.5, 0))), "score must be a whole number"),
    "score NaN": (with_facts(**score("received", (5, 5), (float("nan"), 0))), "score must be a whole number"),
    "more right than asked": (with_facts(**score("received", (5, 5), (10**6, 10**6))), "correct predictions of"),
    "score over other samples": (with_facts(received_total=[5, 4]), "samples instead of"),
    "halves that do not add up": (
        with_facts(received_total=[5, 5], received_accuracy=[1.0, 5.0, 1.0, 5.0, 3.0, 10.0]),
        "3 in all, but 2 in both halves",
    ),
    "unknown metric": (with_facts(received_auc=[0.0] * 6), "'received-auc' is not expected"),
    "unknown fact": (with_facts(evil="x" * 10**6), "'evil' is not expected"),
    "10^13 elements": (with_array(lambda array: declaring((10**13,), array)), "does not describe"),
    "10^13 elements declared": (
        with_array(lambda array: Array(array.dtype, (10**13,), array.stype, array.data)),
        "has shape",
    ),
    "malformed header": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, array.data[:10] + b"(" * 118)),
        "takes",
    ),
    "malformed header of the right length": (
        with_array(
            lambda array: Array(array.dtype, array.shape, array.stype, array.data[:10] + b"(" * 118 + array.data[128:])
        ),
        "cannot be read",
    ),
    "no header": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, bytes(len(array.data)))),
        "cannot be read",
    ),
    "objects": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, _objects(array))),
        "takes|describe",
    ),
    "another type": (with_array(lambda array: Array(array.numpy().astype(np.float16))), "torch.float16 instead of"),
    "another order": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, _by_column(array)), which=2),
        "does not describe",
    ),
    "another serialisation": (
        with_array(lambda array: Array(array.dtype, array.shape, "pickle", array.data)),
        "serialised as 'pickle'",
    ),
    "too long": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, array.data + bytes(10**6))),
        "takes",
    ),
    "a little too long": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, array.data + bytes(8))),
        "does not describe",
    ),
    "cut off": (
        with_array(lambda array: Array(array.dtype, array.shape, array.stype, array.data[:-1])),
        "describe|takes",
    ),
    "empty": (with_array(lambda array: Array(array.dtype, array.shape, array.stype, b"")), "takes 0 bytes"),
    "no parameters": (lambda content: content.pop("params"), "no 'params'"),
    "other records": (lambda content: content.update({"params": ConfigRecord({})}), "no 'params'"),
    "no facts": (lambda content: content.pop("facts"), "no facts"),
    "other names": (
        lambda content: put(content, "params", {**arrays(content), "y" * 10**6: np.zeros(1)}),
        "is not expected",
    ),
}


def _objects(array):
    buffer = io.BytesIO()
    np.save(buffer, np.array([None] * int(np.prod(array.shape)), dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _by_column(array):
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(array.numpy()))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def good():
    """A server, and what a node sends it."""
    made = Federated(2)
    return made.central, made.nodes[0].reply_to(made.central.request("n0"))


@pytest.mark.parametrize("attack", UNREADABLE)
def test_a_reply_that_cannot_be_decoded_is_refused_in_a_short_sentence(attack, good):
    central, reply = good
    content = reply_record(reply)
    change, why = UNREADABLE[attack]
    change(content)
    with pytest.raises(BadInput, match=why) as refused:
        read_reply(content, central.expected)
    assert len(str(refused.value)) < 400


def test_an_honest_reply_arrives_as_it_was_sent(good):
    central, reply = good
    found = read_reply(reply_record(reply), central.expected)
    assert dataclasses.replace(found, params={}, extras={}) == dataclasses.replace(reply, params={}, extras={})
    assert found.params.keys() == reply.params.keys()
    assert all(torch.equal(found.params[name], value) for name, value in reply.params.items())
    with pytest.raises(BadInput, match="is not expected"):  # a reply with scores only has no tensors
        read_reply(reply_record(reply), central.expected.without_training())


def reversed_update(central, factor):
    """Return an attack that multiplies the change of the received model."""

    def attack(content):
        began = {name: value.numpy() for name, value in central.state.params.common.items()}
        began |= {name: value[HOSTILE].numpy() for name, value in central.state.params.own.items()}
        values = arrays(content)
        put(content, "params", {name: began[name] + factor * (values[name] - began[name]) for name in values})

    return attack


REJECTED = {
    "head 3e38": ("fedrema", with_values(filled(3e38), chosen=in_head), "implausibly large"),
    "heads 1e30": ("fedrema", with_values(filled(1e30), chosen=in_head), "implausibly large"),
    "heads 1000": (
        "fedrema",
        with_values(filled(1000.0), chosen=in_head),
        "its personal parameters is implausibly large",
    ),
    "shared 100": ("fedavg", with_values(filled(100.0)), "change of its shared parameters is .* times the usual"),
    "extras 1e30": ("fedproto", with_values(filled(1e30), "extras"), "implausibly large"),
    "means 1e4": (
        "fedproto",
        with_values(filled(1e4), "extras", "means".__eq__),
        "norm of its 'means' is implausibly large",
    ),
    "means × 100": ("fedpac", with_values(lambda value: 100 * value, "extras", "means".__eq__), "norm of its 'means'"),
    "count 1e9": ("fedrema", with_facts(count=10**9), "1000000000 training samples, more than 10 times the median"),
    "tests 1e9": (
        "fedrema",
        with_facts(**score("received", (10**9, 10**9)), **score("trained", (10**9, 10**9))),
        "2000000000 test samples, more than 10 times the median",
    ),
    "uneven halves": (
        "fedrema",
        with_facts(**score("received", (30, 0)), **score("trained", (30, 0))),
        "halves of its score",
    ),
    "a large trained score": (
        "fedrema",
        with_facts(received_total=None, received_accuracy=None, **score("trained", (10**9, 10**9))),
        "2000000000 test samples",
    ),
    "two numbers of tests": (
        "fedrema",
        with_facts(**score("trained", (30, 30))),
        "different numbers of test samples",
    ),
    "negative counts": (
        "fedproto",
        with_values(lambda value: -value, "extras", "label_counts".__eq__),
        "numbers of samples in 'label_counts'",
    ),
    "many counts": (
        "fedproto",
        with_values(lambda value: 2 * value, "extras", "label_counts".__eq__),
        "numbers of samples in 'label_counts'",
    ),
    "negative variances": (
        "fedavg --net mlp-bn",
        with_values(lambda value: -value, chosen=lambda name: name.endswith("running_var")),
        "variances in .* are below 0",
    ),
    "another round": ("fedrema", with_facts(round=77), "for round 77"),
    "NaN": ("fedrema", with_values(filled(np.nan)), "not finite"),
}


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("attack", REJECTED)
def test_the_others_learn_as_if_the_hostile_node_were_absent(attack, nodes):
    settings, change, why = REJECTED[attack]
    method, *more = settings.split()
    made, absent = (Federated(nodes, method, more=more) for _ in range(2))
    for _ in range(2):  # also in its first round
        record = made.round(change)
        assert list(record["rejected"]) == ["n1"]
        assert re.search(why, record["rejected"]["n1"])
        assert absent.round(absent=[HOSTILE])["participants"] == record["participants"]
    for name, value in absent.central.state.params.merged().items():
        assert torch.equal(made.central.state.params.merged()[name], value), name
    assert made.accuracy() == absent.accuracy()


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    "changed",
    [
        {"count": 10**9},
        {"count": 41},
        score("received", (2**38, 2**38), (2**38, 0)),
        score("trained", (2**38, 2**38)),
    ],
    ids=str,
)
def test_counts_stay_as_they_were_when_a_node_joined(changed, nodes):
    made, absent = Federated(nodes), Federated(nodes)
    made.round()
    absent.round()
    record = made.round(with_facts(**changed))
    absent.round(absent=[HOSTILE])
    assert "but it joined with" in record["rejected"]["n1"]
    assert made.accuracy() == absent.accuracy()


@pytest.mark.parametrize("begins", [1, 3])
@pytest.mark.parametrize("method", ["fedavg", "fedrema"])
@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.slow), 8])
def test_updates_multiplied_by_minus_20_do_not_damage_the_others_models(nodes, method, begins):
    made, absent = Federated(nodes, method), Federated(nodes, method)
    for number in range(1, 7):
        attack = reversed_update(made.central, -20.0) if number >= begins else lambda content: None
        made.round(attack)
        absent.round(absent=[HOSTILE] if number >= begins else [])
    others = [row for row in range(nodes) if row != HOSTILE]
    found, expected = (np.mean([each.accuracy(row) for row in others]) for each in (made, absent))
    assert found >= expected - 0.1
    hit = [record for record in made.records if "n1" in {**record["rejected"], **record["clipped"]}]
    assert [record["round"] for record in hit] == list(range(begins, 7))


def test_the_final_scores_are_bounded_as_well():
    made = Federated(3)
    made.round()
    scores = {node.name: node.reply_to(made.central.request(node.name, train=False)).received for node in made.nodes}
    honest = made.central.metrics({name: score for name, score in scores.items() if name != "n1"})
    for asked in ((2**62, 2**62), (10**9, 10**9), (3, 3)):
        assert (
            made.central.metrics(
                {**scores, "n1": Score(asked, {"accuracy": ((0, asked[0]), (0, asked[1]), (0, sum(asked)))})}
            )
            == honest
        )


def test_a_moderate_excess_is_clipped_at_first_and_rejected_when_it_is_repeated():
    made = Federated(3, "fedavg")
    made.round()
    for _ in range(4):
        before = {name: value.clone() for name, value in made.central.state.params.common.items()}
        history = made.central.registry.norms
        usual = max(history.recent["the change of its shared parameters"])
        made.round(shifted_by(before, 7 * usual))
    found = [(sorted(record["clipped"]), sorted(record["rejected"])) for record in made.records[1:]]
    assert found == [(["n1"], []), (["n1"], []), ([], ["n1"]), ([], ["n1"])]
    assert "scaled down" in made.records[1]["clipped"]["n1"]
    assert "it was clipped 2 times in the last 20 rounds" in made.records[3]["rejected"]["n1"]


def shifted_by(before, length):
    """Return an attack that sends a change of the given norm."""
    numel = sum(value.numel() for value in before.values())

    def attack(content):
        put(
            content, "params", {name: value.numpy() + np.float32(length / numel**0.5) for name, value in before.items()}
        )

    return attack


def test_a_clipped_change_has_the_usual_norm():
    made = Federated(3, "fedavg", counts=(50, 50, 50))
    made.round()
    before = {name: value.clone() for name, value in made.central.state.params.common.items()}
    rest = Federated(3, "fedavg", counts=(50, 50, 50))
    rest.round()
    rest.round(absent=[HOSTILE])
    sent = 8 * made.central.registry.norms.recent["the change of its shared parameters"][0]
    why = made.round(shifted_by(before, sent))["clipped"]["n1"]
    usual = sent / float(why.split(" is ")[1].split(" times")[0])
    # The mean of three equally large nodes: the others' two thirds, and a third of what was clipped.
    shift = {
        name: 3 * (value - before[name]) - 2 * (rest.central.state.params.common[name] - before[name])
        for name, value in made.central.state.params.common.items()
    }
    assert sum(float(value.square().sum()) for value in shift.values()) ** 0.5 == pytest.approx(usual, rel=1e-2)


def test_a_reply_that_makes_the_aggregate_fail_is_found_and_left_out(monkeypatch):
    made, absent = Federated(3, "fedavg"), Federated(3, "fedavg")
    method = type(made.central.method)
    whole = method.aggregate

    def fragile(self, net, state, uploads, moment):
        answer = whole(self, net, state, uploads, moment)
        if "n1" in uploads.names:
            answer = dataclasses.replace(answer, shared={name: value / 0 for name, value in answer.shared.items()})
        return answer

    monkeypatch.setattr(method, "aggregate", fragile)
    record = made.round()
    absent.round(absent=[HOSTILE])
    assert record["participants"] == [0, 2]
    assert "aggregation fails if its reply is included" in record["rejected"]["n1"]
    assert made.accuracy() == absent.accuracy()


def test_an_aggregate_that_fails_without_any_reply_raises_and_changes_nothing(monkeypatch):
    made = Federated(3, "fedavg")
    before = {name: value.clone() for name, value in made.central.state.params.common.items()}

    def broken(self, net, state, uploads, moment):
        raise TypeError("a mistake in the method")

    monkeypatch.setattr(type(made.central.method), "aggregate", broken)
    with pytest.raises(TypeError, match="a mistake in the method"):
        made.round()
    assert made.central.round == 0
    assert all(torch.equal(value, before[name]) for name, value in made.central.state.params.common.items())


def test_more_samples_than_usual_are_accepted_where_the_operator_allows_them():
    honest = Federated(3, counts=(20, 600, 30))
    assert "more than 10 times the median" in honest.round()["rejected"]["n1"]
    allowed = Federated(3, counts=(20, 600, 30), most_samples=1000)
    assert allowed.round()["rejected"] == {}
    hostile = Federated(3, counts=(20, 600, 30), most_samples=1000).round(with_facts(count=1001))
    assert "more than --most-samples 1000" in hostile["rejected"]["n1"]


@pytest.mark.parametrize(
    "counts",
    [*(pytest.param(counts, marks=pytest.mark.slow) for counts in ((40, 14), (20, 80, 45))), (12, 30, 90, 24, 60)],
    ids=len,
)
@pytest.mark.parametrize("method", [*registry(), "fedbn --net mlp-bn"])
def test_no_check_triggers_in_an_honest_run(method, counts):
    name, *more = method.split()
    made = Federated(0, name, counts, more)
    late = len(counts) - 1
    for number in range(1, 7):
        made.round(absent=[late] if late > 1 and number < 4 else [])
    assert [(record["rejected"], record["clipped"]) for record in made.records] == [({}, {})] * 6


@pytest.mark.parametrize("method", ["creff", "fedpac"])
def test_no_check_triggers_while_an_honest_node_is_alone(method):
    # The extras of these methods grow many times over in the first rounds.
    made = Federated(2, method, more=["--dataset", "digits", "--clients", "2", "--hidden", "16", "--epochs", "5"])
    for number in range(1, 6):
        made.round(absent=[HOSTILE] if number < 4 else [])
    assert [(record["rejected"], record["clipped"]) for record in made.records] == [({}, {})] * 5


def test_a_hostile_node_that_is_alone_in_a_round_is_compared_with_the_rounds_before():
    made = Federated(2, "fedavg")
    for _ in range(3):
        made.round()
    record = made.round(reversed_update(made.central, -50.0), absent=[0])
    assert record["participants"] == []
    assert "change of its shared parameters is implausibly large" in record["rejected"]["n1"]


def test_the_registry_survives_a_checkpoint():
    made = Federated(3)
    for _ in range(2):
        made.round(reversed_update(made.central, 9.0))
    registry = made.central.registry
    assert registry.norms.recent
    assert Registry.read(json.loads(json.dumps(registry.plain()))) == registry
    assert Registry.read({"names": ["a"], "last_used_round": {"a": 3}}) == Registry(["a"], {"a": 3})
