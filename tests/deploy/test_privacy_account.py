"""The privacy account of a node that trains for a server: it cannot be lost, left out or bypassed."""

import json
import shutil

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("opacus")

from fedrema.deploy.approval import approve, proposed_plan
from fedrema.deploy.messages import Reply
from fedrema.deploy.privacy import PrivacyGuard, PrivacySettings
from fedrema.errors import BadInput
from fedrema.simulation import accounting
from tests.deploy.executors import Approved

NOISE = ("privacy-clip = 0.5", "privacy-noise = 8.0")


class Site:
    """A federation of three nodes; the node north changes its settings, or loses its account."""

    def __init__(self, tmp_path, *lines):
        self.made = Approved(tmp_path / "federation", "fedavg", 4, ("--most-noise", "10"), self.with_noise)
        self.home = self.made.node("north").path
        self.account = self.home / "kept" / "privacy.json"
        self.set(*lines)

    @staticmethod
    def with_noise(node):  # all nodes, because the server rejects unusual noise
        Site.write(node, *NOISE)

    @staticmethod
    def write(node, *lines):
        file = node / "node.toml"
        file.write_text("\n".join([file.read_text().partition("# end")[0], "# end", *lines, ""]))

    def set(self, *lines):
        self.write(self.home, *lines)
        node = self.made.node("north")
        approve(node, proposed_plan(node))
        self.made.start()

    def rounds(self, count):
        """Complete so many further rounds; the other nodes complete them without north if it refuses."""
        done = []

        class Enough(Exception):
            pass

        def stop(node, reply):
            done.append(int(reply.metadata.group_id or 0))
            if len(set(done) - {0}) > count:
                raise Enough
            return reply

        with pytest.raises(Enough):
            self.made.conduct(self.made.grid(spoil=stop))

    @property
    def releases(self):
        return json.loads(self.account.read_text())["releases"]

    def refusals(self, sentence):
        return self.made.log("north").count(sentence)


def test_a_missing_account_of_a_node_that_has_replied_is_refused_until_its_owner_accepts_the_loss(tmp_path):
    site = Site(tmp_path, *NOISE)
    site.rounds(1)
    assert site.releases[0] == 4.0
    site.account.unlink()
    site.made.start()
    site.rounds(1)
    assert site.refusals("Its privacy account (privacy.json) is missing, although the node has replied before")
    assert not site.account.exists()
    site.set(*NOISE, "accept-lost-state = true")
    site.rounds(1)
    assert site.refusals("the privacy account is missing; ε leaves out what is lost (accept-lost-state)") == 1
    assert site.account.exists()


def test_it_is_missed_if_the_server_knows_only_or_the_node_knows_only(tmp_path):
    site = Site(tmp_path, *NOISE)
    site.rounds(1)
    log, head = site.home / "audit.jsonl", site.home / "audit.head"
    saved = log.read_bytes(), head.read_bytes()
    for file in site.account.parent.iterdir():
        file.unlink()
    log.unlink()
    head.unlink()  # a new disk: only the server's request says that a reply was used
    guard = PrivacyGuard(PrivacySettings(0.5, 8.0), site.account)
    with pytest.raises(BadInput, match="is missing, although the node has replied before"):
        guard.begin(used=1)
    assert guard.begin(used=0) == ""
    site.account.unlink()
    log.write_bytes(saved[0])
    head.write_bytes(saved[1])  # a server that lost its own memory, or lies
    with pytest.raises(BadInput, match="is missing, although the node has replied before"):
        PrivacyGuard(PrivacySettings(0.5, 8.0), site.account).begin(used=0)


def test_an_account_from_an_older_backup_is_refused(tmp_path):
    site = Site(tmp_path, *NOISE)
    site.rounds(1)
    shutil.copy(site.account, tmp_path / "backup.json")
    site.rounds(1)
    before = len(site.releases)
    shutil.copy(tmp_path / "backup.json", site.account)
    site.made.start()
    site.rounds(1)
    assert site.refusals("Its privacy account (privacy.json) ends before round")
    assert len(site.releases) < before


def test_releases_without_privacy_clip_are_entered_and_no_budget_can_be_kept_after_them(tmp_path):
    site = Site(tmp_path)  # north sends its updates as they are
    site.rounds(1)
    assert set(site.releases) == {0.0}
    site.set(*NOISE, "privacy-budget = 1000.0")
    sent = len(site.releases)
    site.rounds(1)
    assert site.refusals("Its privacy budget cannot be kept: the node has sent replies without noise before")
    assert len(site.releases) == sent


def test_a_budget_is_not_kept_after_a_release_that_was_clipped_only(tmp_path):
    site = Site(tmp_path, "privacy-clip = 0.5")
    site.rounds(1)
    assert 0.0 in site.releases
    site.set(*NOISE, "privacy-budget = 1000.0")
    site.rounds(1)
    assert site.refusals("Its privacy budget cannot be kept")


@pytest.mark.parametrize(("noise", "releases"), [(8.0, 1), (100.0, 1), (100.0, 20), (1.0, 3)])
def test_epsilon_is_that_of_a_simulation_with_the_same_noise(noise, releases, tmp_path):
    guard = PrivacyGuard(PrivacySettings(1.0, noise), tmp_path / "privacy.json")
    zeros = {"w": torch.zeros(2)}
    for number in range(releases):
        guard.protect(Reply(number + 1, 5, dict(zeros)), zeros)
    expected = accounting.epsilon(releases * accounting.gaussian(noise / 2), 1e-5)
    assert guard.epsilon() == pytest.approx(expected, rel=1e-12)
    if (noise, releases) == (100.0, 1):
        assert guard.epsilon() == pytest.approx(0.0659, abs=1e-4)
