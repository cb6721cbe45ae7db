"""What an owner approved is a bound: each round once, with one model, and no choice that the plan does not leave."""

import json

import pytest

pytest.importorskip("flwr")

from fedrema.cli import main
from fedrema.deploy.audit import Event, verify
from fedrema.deploy.node import Node
from tests.deploy.executors import Approved
from tests.deploy.messages_to_nodes import ask, parameters, reason, with_agreement, with_facts, with_other_model

OTHER = (
    "repeated: the request for round 1 is not the one that the node has answered before; its owner can permit it with"
    " fedrema deploy approve NODE --repeat-from 1"
)


class Asked:
    """A federation whose node north is asked by hand, as the first request of a real server does."""

    def __init__(self, folder, method="fedavg", **options):
        self.made = Approved(folder, method, **options)
        grid = self.made.grid(lambda node, reply: None)  # no reply arrives: no round is completed
        with pytest.raises(Exception, match="Round 1 needs"):
            self.made.conduct(grid)
        self.config = grid.contexts[7].run_config
        self.first = next(message.content for message in grid.sent if message.content["facts"]["name"] == "north")
        self.home = self.made.node("north").path

    def ask(self, content=None):
        return ask(self.made.executors["north"], self.config, self.first if content is None else content)

    def refusals(self):
        """Return what the audit log says about refused requests."""
        return [line.entry for line in verify(self.home)[0] if line.entry.what is Event.REQUEST_REFUSED]


@pytest.fixture
def asked(tmp_path):
    return Asked(tmp_path / "federation")


def test_the_same_request_is_answered_again_with_the_same_parameters(asked):
    assert parameters(asked.ask()) == parameters(asked.ask())
    assert not asked.refusals()


def test_another_model_in_the_same_round_is_refused_and_logged(asked, monkeypatch):
    monkeypatch.setattr(Node, "reply_to", lambda *arguments: pytest.fail("it was computed"))
    assert reason(asked.ask(with_other_model(asked.first))) == OTHER
    assert reason(asked.ask(with_other_model(with_facts(asked.first, train=False)))) == OTHER
    assert {entry.decision for entry in asked.refusals()} == {f"sent instead of a reply: {OTHER}"}
    assert "refused (repeated): " in asked.made.log("north")


def test_another_state_in_the_same_round_is_refused(asked):
    for facts in ({"last-used-round": 1}, {"late": True}):
        assert reason(asked.ask(with_facts(asked.first, **facts))) == OTHER


@pytest.mark.parametrize("number", [0, -1, -(10**6), 4])
@pytest.mark.parametrize("train", [True, False])
def test_only_approved_rounds_are_answered(number, train, asked):
    number += not train and number > 0  # the result of the last round is scored in the round after it
    answer = reason(asked.ask(with_facts(asked.first, round=number, train=train)))
    assert answer == f"round: the node's owner has approved rounds 1 to 3, and this is round {number}"


def test_a_node_that_is_killed_while_it_answers_remembers_the_request(asked, monkeypatch):
    second = with_facts(asked.first, round=2)
    with monkeypatch.context() as patch:

        def dies(*arguments):
            raise KeyboardInterrupt

        patch.setattr(Node, "reply_to", dies)
        with pytest.raises(KeyboardInterrupt):
            asked.ask(second)
    asked.made.start()
    assert reason(asked.ask(with_other_model(second))).startswith("repeated: the request for round 2 ")
    assert asked.ask(second).has_content()


def test_an_owner_can_permit_a_repetition_once(asked, capsys):
    node, other = str(asked.home), with_other_model(asked.first)
    assert main(["deploy", "approve", node, "--repeat-from", "2"]) == 0
    assert reason(asked.ask(other)) == OTHER
    assert main(["deploy", "approve", node, "--repeat-from", "1"]) == 0
    assert "The server may repeat round 1 and later ones once." in capsys.readouterr().out
    assert asked.ask(other).has_content()
    assert reason(asked.ask(asked.first)) == OTHER
    approved = [line.entry.decision for line in verify(asked.home)[0] if line.entry.what is Event.SETTINGS_APPROVED]
    assert approved[-1].endswith("; the server may repeat round 1 and later ones")


@pytest.mark.parametrize("number", ["-1", "5"])
def test_a_round_that_cannot_be_repeated(number, asked, capsys):
    assert main(["deploy", "approve", str(asked.home), "--repeat-from", number]) == 2
    assert f"--repeat-from must be a round from 1 to 4, got {number}." in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "{}", '{"rounds": {"1": "a"}}'])
def test_a_damaged_memory_is_refused(content, asked):
    (asked.home / "kept" / "answered.json").write_text(content)
    assert reason(asked.ask()).startswith("answered: it cannot record which rounds it has answered")
    assert "answered.json" in asked.made.log("north")
    assert main(["deploy", "approve", str(asked.home), "--repeat-from", "1"]) == 0
    assert asked.ask().has_content()


@pytest.mark.parametrize(
    ("agreement", "what"),
    [
        ({"class_names": list("abcdefghij")}, "the names of the classes"),
        ({"class_names": ["a", "b"]}, "the names of the classes"),
        ({"class_counts": [10**6, 1, 1, 1, 1, 1, 1, 1, 1, 1]}, "the numbers of samples of the classes"),
        ({"centre": 1.0, "scale": 2.0}, "the scale of the target"),
        ({"preprocessing": {"inputs": ["age"], "left_out": {"age": "x"}}}, "preprocessing"),
    ],
)
def test_an_agreement_cannot_change_what_the_plan_fixes(agreement, what, asked):
    asked.made.permit(1)
    content = with_agreement(asked.first, json.dumps(agreement).encode())
    assert reason(asked.ask(content)) == f"agreement: the approved plan does not let the server choose this: {what}"


def test_every_answer_counts_in_the_privacy_account(tmp_path):
    pytest.importorskip("opacus")

    def protect(node):
        with (node / "node.toml").open("a") as config:
            config.write("privacy-clip = 1.0\nprivacy-noise = 2.0\n")

    asked = Asked(tmp_path / "federation", edit=protect)
    account = asked.home / "kept" / "privacy.json"
    before = len(json.loads(account.read_text())["releases"])
    assert parameters(asked.ask()) != parameters(asked.ask())  # the noise is new
    assert len(json.loads(account.read_text())["releases"]) == before + 2


def test_a_node_that_cannot_write_its_audit_log_sends_only_that(asked):
    (asked.home / "audit.jsonl").unlink()
    (asked.home / "audit.jsonl").mkdir()
    answer = "audit: it cannot write its audit log, and sends nothing that is not recorded there"
    assert reason(asked.ask()) == answer
    assert reason(asked.ask(with_facts(asked.first, round=0))) == answer
