"""Clipping and noise, compared with values computed by hand; and the account of the privacy budget."""

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("opacus")

from flwr.app import ConfigRecord

from fedrema.deploy.messages import Reply
from fedrema.deploy.privacy import PrivacyGuard, PrivacySettings
from fedrema.deploy.privacy_account import ACCOUNT, Account
from fedrema.deploy.scores import Score
from fedrema.errors import BadInput
from fedrema.runs.checksums import with_checksum
from fedrema.runs.run import Run
from fedrema.simulation.accounting import ORDERS
from tests.deploy.test_flower import CLIENTS, Federated

BEGUN = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.0]])}
TRAINED = {"a": torch.tensor([4.0, 2.0]), "b": torch.tensor([[4.0]])}  # a change of norm 5


def reply(**more):
    score = Score((2, 2), {"accuracy": ((1, 2), (1, 2), (2, 4))})
    return Reply(3, 7, dict(TRAINED), {}, 0.5, score, score, **more)


def test_a_change_is_clipped_to_its_norm(tmp_path):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=2.5), tmp_path / "privacy.json")
    protected = guard.protect(reply(), BEGUN)
    torch.testing.assert_close(protected.params["a"], torch.tensor([2.5, 2.0]))
    torch.testing.assert_close(protected.params["b"], torch.tensor([[2.0]]))
    assert protected.params["a"].dtype == torch.float32


def test_a_small_change_and_no_change_are_not_clipped(tmp_path):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=9.0), tmp_path / "privacy.json")
    torch.testing.assert_close(guard.protect(reply(), BEGUN).params["a"], TRAINED["a"])
    torch.testing.assert_close(guard.protect(reply(), TRAINED).params["a"], TRAINED["a"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["received", "trained"])
def test_a_change_that_is_not_finite_is_never_released(value, where, tmp_path):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=1e-4, privacy_noise=1.0), tmp_path / "privacy.json")
    before, after = {**BEGUN}, {**TRAINED}
    spoilt = torch.tensor([1.0, value])
    (before if where == "received" else after)["a"] = spoilt
    with pytest.raises(BadInput, match="not finite"):
        guard.protect(Reply(1, 5, after), before)
    assert not (tmp_path / "privacy.json").exists()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e200), (torch.float32, 1e38), (torch.float16, 300.0)])
def test_the_norm_does_not_overflow(dtype, size, tmp_path):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=2.0), tmp_path / "privacy.json")
    trained = {"w": torch.tensor([size, -size, size, size], dtype=dtype)}
    released = guard.protect(Reply(1, 5, trained), {"w": torch.zeros(4, dtype=dtype)}).params["w"]
    assert released.tolist() == [1.0, -1.0, 1.0, 1.0]


def test_losses_and_scores_stay_at_the_node(tmp_path):
    protected = PrivacyGuard(PrivacySettings(privacy_clip=1.0), tmp_path / "privacy.json").protect(reply(), BEGUN)
    assert (protected.loss, protected.received, protected.trained) == (None, None, None)
    assert protected.epsilon is None  # without noise, ε is unbounded
    assert (protected.round, protected.count) == (3, 7)


def test_noise_has_the_requested_standard_deviation(tmp_path):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=2.0, privacy_noise=1.5), tmp_path / "privacy.json")
    zeros = {"w": torch.zeros(40_000, dtype=torch.float64)}
    protected = guard.protect(Reply(1, 5, dict(zeros)), zeros)
    spread = float(protected.params["w"].std())
    assert abs(spread - 3.0) < 5 * 3.0 / math.sqrt(2 * 40_000)  # five standard errors
    assert abs(float(protected.params["w"].mean())) < 5 * 3.0 / math.sqrt(40_000)


def by_hand(releases, noise, delta):
    """The smallest bound over Rényi orders: T releases of a Gaussian of z/2 have T·α / (2·(z/2)²)."""
    orders = np.array(ORDERS)
    renyi = releases * orders / (2 * (noise / 2) ** 2)
    return float(min(renyi - (np.log(delta) + np.log(orders)) / (orders - 1) + np.log((orders - 1) / orders)))


@pytest.mark.parametrize("releases", [1, 10])
def test_epsilon_follows_the_formula(releases, tmp_path):
    protection = PrivacySettings(privacy_clip=1.0, privacy_noise=8.0, privacy_delta=1e-5)
    for _ in range(releases):  # a new process each time: the account is on disk
        protected = PrivacyGuard(protection, tmp_path / "privacy.json").protect(reply(), BEGUN)
    assert protected.epsilon == pytest.approx(by_hand(releases, 8.0, 1e-5), rel=1e-6)
    account = json.loads((tmp_path / "privacy.json").read_text())
    assert account == with_checksum({"releases": [4.0] * releases, "last_round": 3, "format": 1}, ACCOUNT)


def test_a_node_stops_before_its_budget_is_exceeded(tmp_path):
    budget = by_hand(3, 8.0, 1e-5) + 0.01
    guard = PrivacyGuard(PrivacySettings(1.0, 8.0, 1e-5, budget), tmp_path / "privacy.json")
    for _ in range(3):
        guard.check_budget()
        guard.protect(reply(), BEGUN)
    with pytest.raises(BadInput, match=r"Its privacy budget is spent: after this round ε would be "):
        guard.check_budget()


def test_extras_that_are_not_protected_are_refused(tmp_path):
    guard = PrivacyGuard(PrivacySettings(privacy_clip=1.0), tmp_path / "privacy.json")
    with pytest.raises(BadInput, match="sends prototypes in addition to parameters"):
        guard.protect(Reply(1, 2, dict(TRAINED), {"prototypes": torch.ones(2)}), BEGUN)
    assert not (tmp_path / "privacy.json").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"privacy_noise": 1.0}, "privacy-noise needs privacy-clip"),
        ({"privacy_clip": 1.0, "privacy_budget": 3.0}, "privacy-budget needs privacy-noise"),
        ({"privacy_clip": -1.0}, "--privacy-clip must be 0 or more"),
        ({"privacy_delta": 1.0}, "privacy-delta must be below 1"),
    ],
)
def test_invalid_privacy_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        PrivacySettings(**settings)


def test_a_federation_with_protected_nodes(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--rounds", "2"], most_noise=2.0)
    settings = {
        "privacy-clip": 0.5,
        "privacy-noise": 4.0,
        "privacy-delta": 1e-5,
        "privacy-budget": by_hand(1, 4.0, 1e-5),
    }
    made.grid.contexts[7].node_config |= {**settings, "privacy-budget": settings["privacy-budget"] + 0.1}
    made.grid.contexts[8].node_config |= {**settings, "privacy-budget": 0.0}
    conductor = made.conductor()
    conductor.conduct()
    for node, message in made.grid.received:
        facts = message.content.get("facts", ConfigRecord({})) if not message.has_error() else {}
        assert not (node in (7, 8) and {"loss", "received-accuracy", "trained-accuracy"} & set(facts))
    first, second = Run(tmp_path / "server").rounds
    assert first["participants"] == list(range(CLIENTS))
    assert first["epsilon"]["0"] == pytest.approx(by_hand(1, 4.0, 1e-5), rel=1e-6)
    assert second["epsilon"]["1"] == pytest.approx(by_hand(2, 4.0, 1e-5), rel=1e-6)
    assert second["rejected"]["0"] == "budget: its privacy budget is spent"
    assert second["participants"] == [1, 2, 3]
    assert first["client_accuracy"][0] is None
    assert first["client_accuracy"][2] is not None
    assert "accuracy" in (tmp_path / "node.log").read_text()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"releases": 3}', '{"releases": [-1]}', '{"releases": ["4"]}']
)
def test_a_damaged_account_of_releases_is_refused(content, tmp_path):
    (tmp_path / "privacy.json").write_text(content)
    with pytest.raises(
        BadInput,
        match=r"privacy\.json .*restore it from a backup: without it, the budget that this node has spent is unknown",
    ):
        Account.read(tmp_path / "privacy.json")


def test_an_edited_account_of_releases_is_refused(tmp_path):
    file = tmp_path / "privacy.json"
    file.write_text(json.dumps(with_checksum({"releases": [4.0, 4.0]}, ACCOUNT)))
    assert Account.read(file).releases == [4.0, 4.0]
    file.write_text(file.read_text().replace("[4.0, 4.0]", "[4.0]"))
    with pytest.raises(BadInput, match="was altered or damaged"):
        Account.read(file)
    file.write_text('{"releases": [4.0]}')  # without a checksum
    with pytest.raises(BadInput, match="was altered or damaged"):
        Account.read(file)


def test_noise_that_the_operator_has_not_allowed_is_rejected(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--rounds", "1"])
    made.grid.contexts[7].node_config |= {"privacy-clip": 0.5, "privacy-noise": 4.0}
    made.conductor().conduct()
    (record,) = Run(tmp_path / "server").rounds
    assert record["participants"] == [1, 2, 3]
    assert "--most-noise 0 allows" in record["rejected"]["0"]


def test_noise_of_all_nodes_is_accepted(tmp_path):
    made = Federated(tmp_path, "fedavg", ["--rounds", "2"])
    for context in made.grid.contexts.values():
        context.node_config |= {"privacy-clip": 0.5, "privacy-noise": 4.0}
    made.conductor().conduct()
    assert [record["participants"] for record in Run(tmp_path / "server").rounds] == [list(range(CLIENTS))] * 2
