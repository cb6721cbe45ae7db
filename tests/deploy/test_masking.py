"""The protocol of secure aggregation without a network: exact sums, dropouts, tampering, replays and refusals."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedrema.core.fixed_point import WORDS, FixedPoint, QuantisedSum
from fedrema.deploy.flower_secrets import KeyPair, commitment, is_seed_of, joined, mask, new_seed, pair_mask, split
from fedrema.deploy.masking import MaskingSession, Neighbourhood, Rules, SumId, UnmaskedRounds
from fedrema.deploy.run_config import Plan
from fedrema.deploy.tls import is_signed_by, make_node_key, read_public_key, signature
from fedrema.deploy.unmasking import MaskedSum, neighbourhoods
from fedrema.errors import BadInput

BEFORE = {"w": torch.zeros(5, dtype=torch.float64)}
WIDE = FixedPoint()
RULES = Rules(0.5, 0, 3, "a federation")
NAMES = ("a", "b", "c", "d")


def contribution(row, fixed=WIDE):
    """Return n = row + 1 samples whose parameters changed by 1, 2, … halves."""
    made = QuantisedSum(fixed, BEFORE)
    made.add({"w": torch.arange(5, dtype=torch.float64)[None] * (row + 1) / 2}, torch.tensor([row + 1]))
    return made


def expected(names, fixed=WIDE):
    """Return Σ n_k · change_k as whole numbers, by hand."""
    weights = sum((NAMES.index(name) + 1) ** 2 for name in names)  # n · n / 2 · (0, 1, 2, 3, 4)
    return [int(weights * step * fixed.scale / 2) for step in range(5)]


def keys_of(folder, names):
    """Return the public keys of nodes, and functions that sign with their private ones."""
    for name in names:
        if not (folder / f"{name}.key").exists():
            (folder / f"{name}.pub").write_bytes(make_node_key(folder / f"{name}.key"))
    peers = {name: read_public_key(folder / f"{name}.pub") for name in names}
    return peers, {name: lambda text, file=folder / f"{name}.key": signature(file, text)[1] for name in names}


class Federation:
    """Nodes and a server that exchange plain values."""

    def __init__(
        self, folder, names=NAMES, rules=RULES, number=1, fixed=WIDE, peers=None, sign=None, session=b"1", model=b"1"
    ):
        self.folder = folder
        if peers is None:
            peers, sign = keys_of(folder, names)
        self.nodes = {
            name: MaskingSession(
                name,
                SumId(number, session, model),
                rules,
                contribution(NAMES.index(name) if name in NAMES else 0, fixed),
                sign[name],
                peers,
                UnmaskedRounds(folder / f"{name}.json"),
            )
            for name in names
        }
        keys = {name: node.keys for name, node in self.nodes.items()}
        self.server = MaskedSum(rules, QuantisedSum(fixed, BEFORE), keys)

    def share(self, *absent):
        for name, node in self.nodes.items():
            if name not in absent:
                self.server.add_encrypted(name, node.share(self.server.neighbourhood(name)))

    def mask(self, *absent):
        for name in sorted(self.server.encrypted):
            if name not in absent:
                self.server.add_vector(name, self.nodes[name].mask(self.server.encrypted_for(name)))

    def unmask(self, *absent):
        for name in self.server.survivors:
            if name not in absent:
                self.server.add_shares(name, self.nodes[name].unmask(self.server.survivors))

    def all_stages(self):
        self.share()
        self.mask()
        self.unmask()
        return self.server.unmasked()


@pytest.mark.parametrize("fixed", [FixedPoint(), FixedPoint(32, 10.0, 1000)], ids=["64 bits", "32 bits"])
def test_masks_cancel_exactly(fixed, tmp_path):
    made = Federation(tmp_path, fixed=fixed)
    found = made.all_stages()
    assert found.totals["w"].tolist() == expected(NAMES, fixed)
    assert (found.samples, found.clients) == (1 + 2 + 3 + 4, 4)
    for name, vector in made.server.vectors.items():  # no single contribution is visible
        assert vector.dtype == WORDS[fixed.bits]
        assert not set(vector.tolist()) & set(contribution(NAMES.index(name), fixed).vector().tolist())


@pytest.mark.parametrize(
    ("absent", "in_sum"),
    [
        ({"share": ("b",)}, ("a", "c", "d")),
        ({"mask": ("b",)}, ("a", "c", "d")),
        ({"unmask": ("b",)}, NAMES),
        ({"share": ("a",), "unmask": ()}, ("b", "c", "d")),
        ({"mask": ("d",), "unmask": ()}, ("a", "b", "c")),
    ],
)
def test_the_sum_is_that_of_the_survivors(absent, in_sum, tmp_path):
    made = Federation(tmp_path)
    for stage in ("share", "mask", "unmask"):
        getattr(made, stage)(*absent.get(stage, ()))
    found = made.server.unmasked()
    assert made.server.survivors == sorted(in_sum)
    assert found.totals["w"].tolist() == expected(in_sum)


def test_with_too_few_shares_there_is_no_sum(tmp_path):
    made = Federation(tmp_path)
    made.share()
    made.mask()
    made.unmask("a", "b")  # two of three that are needed
    with pytest.raises(BadInput, match=r"'a' cannot be unmasked: too few correct shares .* \(2, and 3 are needed\)"):
        made.server.unmasked()


def test_a_node_refuses_to_mask_or_to_unmask_with_too_few_others(tmp_path):
    made = Federation(tmp_path)
    made.share("c", "d")
    with pytest.raises(BadInput, match="Only 2 of at least 3 holders of shares are left"):
        made.mask()
    other = Federation(tmp_path)
    other.share()
    other.mask()
    with pytest.raises(BadInput, match="Only 2 of at least 3 holders of shares are in the sum"):
        other.nodes["a"].unmask(["a", "b"])
    with pytest.raises(BadInput, match="The server counts 'x', which has not announced keys for this sum"):
        other.nodes["b"].unmask(["a", "b", "x", "y"])
    with pytest.raises(BadInput, match="names nodes of the sum twice, or leaves this one out"):
        other.nodes["c"].unmask(["a", "b", "d"])


def test_a_node_never_reveals_both_shares_of_a_neighbour(tmp_path):
    made = Federation(tmp_path)
    made.share()
    made.mask()
    node = made.nodes["a"]
    revealed = node.unmask(["a", "b", "c"])  # as if d had failed
    assert set(revealed) == set(NAMES)
    with pytest.raises(BadInput, match="'unmasked' of round 1 was answered before"):
        node.unmask(list(NAMES))
    # Every other node answers one of both questions as well, and more than half of them are needed for each.
    other = [made.nodes[name].unmask(list(NAMES))["d"] for name in ("b", "c", "d")]
    public = made.nodes["d"].keys.mask_key
    with pytest.raises(BadInput, match="too few correct shares"):
        joined({"a": revealed["d"]}, 3, lambda secret: KeyPair.is_secret_of(public, secret))
    seed = joined(dict(enumerate(other)), 3, lambda secret: is_seed_of(made.nodes["d"].keys.commitment, secret))
    assert len(seed) == 32


def test_stages_out_of_order_and_replays_are_refused(tmp_path):
    made = Federation(tmp_path)
    node = made.nodes["a"]
    with pytest.raises(BadInput, match="'masked' of round 1 was answered before, or it is not its turn"):
        node.mask({})
    with pytest.raises(BadInput, match="'unmasked' of round 1"):
        node.unmask(list(NAMES))
    made.share()
    with pytest.raises(BadInput, match="'shared' of round 1"):
        node.share(made.server.neighbourhood("a"))
    made.mask()
    with pytest.raises(BadInput, match="'masked' of round 1"):
        node.mask(made.server.encrypted_for("a"))


def test_after_an_error_a_stage_cannot_be_tried_again(tmp_path):
    made = Federation(tmp_path)
    with pytest.raises(BadInput, match="1 nodes are too few"):
        made.nodes["a"].share(Neighbourhood(1, [made.nodes["a"].keys]))
    with pytest.raises(BadInput, match="answered before"):
        made.nodes["a"].share(made.server.neighbourhood("a"))


def test_a_round_is_unmasked_for_one_set_of_nodes_only_also_after_a_restart(tmp_path):
    Federation(tmp_path).all_stages()
    again = Federation(tmp_path)  # the server repeats the round, with new keys
    assert again.all_stages().totals["w"].tolist() == expected(NAMES)
    other = Federation(tmp_path)
    other.share()
    other.mask("d")
    with pytest.raises(BadInput, match=r"Round 1 was unmasked before for a sum over other nodes.* delete a\.json"):
        other.nodes["a"].unmask(other.server.survivors)
    assert Federation(tmp_path, number=2).all_stages().clients == 4


@pytest.mark.parametrize("place", [4, 20, -1])
def test_a_tampered_share_is_recognised_and_left_out(place, tmp_path):
    made = Federation(tmp_path)
    made.share()
    made.mask()
    made.unmask()
    share = bytearray(made.server.shares["a"]["b"])
    share[place] ^= 1
    made.server.shares["a"]["b"] = bytes(share)
    assert made.server.unmasked().totals["w"].tolist() == expected(NAMES)  # three correct ones are enough
    made.server.shares["a"]["c"] = b"no share"
    with pytest.raises(BadInput, match="node 'a' cannot be unmasked"):
        made.server.unmasked()


def test_tampered_and_exchanged_ciphertexts_are_refused(tmp_path):
    made = Federation(tmp_path)
    made.share()
    for_a = made.server.encrypted_for("a")
    with pytest.raises(BadInput, match="not encrypted for this node"):
        made.nodes["a"].mask({**for_a, "b": for_a["b"][:-4] + b"AAAA"})
    for_b = made.server.encrypted_for("b")
    with pytest.raises(BadInput, match="not encrypted for this node"):
        made.nodes["b"].mask({**for_b, "a": for_b["c"]})
    with pytest.raises(BadInput, match="shares of 'x', which is not a neighbour"):
        made.nodes["c"].mask({**made.server.encrypted_for("c"), "x": b""})
    with pytest.raises(BadInput, match="shares for other nodes than its neighbours"):
        made.server.add_encrypted("a", {"b": b""})
    with pytest.raises(BadInput, match="too long"):
        made.server.add_encrypted("a", dict.fromkeys("bcd", bytes(5000)))
    with pytest.raises(BadInput, match="revealed shares of other nodes"):
        made.server.add_shares("a", {"x": b""})


def test_a_wrong_contribution_or_a_withheld_ciphertext_is_noticed(tmp_path):
    made = Federation(tmp_path)
    made.share()
    made.server.add_vector(
        "a", made.nodes["a"].mask({k: v for k, v in made.server.encrypted_for("a").items() if k != "b"})
    )
    for name in ("b", "c", "d"):
        made.server.add_vector(name, made.nodes[name].mask(made.server.encrypted_for(name)))
    made.unmask()
    with pytest.raises(BadInput, match="not one of these clients' contributions"):
        made.server.unmasked()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda given: Neighbourhood(4, given.keys[:3]), "names 3 holders of shares among 4 nodes, not 4"),
        (lambda given: Neighbourhood(2, given.keys[:2]), "2 nodes are too few for a sum: the owner has approved 3"),
        (lambda given: Neighbourhood(4, given.keys[1:] + given.keys[1:2]), "names 4 holders"),
        (
            lambda given: Neighbourhood(4, [*given.keys[1:], msgspec.structs.replace(given.keys[0], commitment=b"")]),
            "names other keys for this node",
        ),
        (
            lambda given: Neighbourhood(
                4, [*given.keys[:3], msgspec.structs.replace(given.keys[3], mask_key=given.keys[2].mask_key)]
            ),
            "Two nodes announce the same key",
        ),
    ],
)
def test_a_node_refuses_an_invalid_neighbourhood(change, sentence, tmp_path):
    made = Federation(tmp_path)
    with pytest.raises(BadInput, match=sentence):
        made.nodes["a"].share(change(made.server.neighbourhood("a")))


def test_a_signed_key_that_cannot_be_read_is_refused(tmp_path):
    made = Federation(tmp_path)
    given, (_, sign) = made.server.neighbourhood("a"), keys_of(tmp_path, NAMES)
    keys = msgspec.structs.replace(given.keys[3], share_key=b"none")
    signed = sign["d"](keys.signed_text(RULES.federation, made.nodes["d"].sum_id))
    with pytest.raises(BadInput, match="a public key that cannot be read"):
        made.nodes["a"].share(Neighbourhood(4, [*given.keys[:3], msgspec.structs.replace(keys, signature=signed)]))


def test_too_many_samples_are_refused_before_anything_is_sent(tmp_path):
    made = Federation(tmp_path, fixed=FixedPoint(samples=15))
    with pytest.raises(BadInput, match="--secure-samples 15 is too small: 4 clients participate, and one has 4"):
        made.nodes["d"].share(made.server.neighbourhood("d"))


@pytest.fixture
def signed(tmp_path):
    """Return the public keys of all nodes, and functions that sign with their private ones."""
    peers, sign = keys_of(tmp_path, (*NAMES, "x"))
    return {name: peers[name] for name in NAMES}, sign


def test_with_the_peers_keys_the_server_cannot_invent_nodes(signed, tmp_path):
    peers, sign = signed
    assert Federation(tmp_path, peers=peers, sign=sign).all_stages().clients == 4
    stranger = Federation(tmp_path, ("a", "b", "x"), peers=peers, sign=sign)
    with pytest.raises(BadInput, match="no key of node 'x' in this node's folder peers"):
        stranger.nodes["a"].share(stranger.server.neighbourhood("a"))
    forged = Federation(tmp_path, peers=peers, sign={**sign, "b": sign["x"]})
    with pytest.raises(BadInput, match="keys of node 'b' are not signed by it for this sum"):
        forged.nodes["a"].share(forged.server.neighbourhood("a"))


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"rules": dataclasses.replace(RULES, federation="another")},
        {"session": b"2"},  # an earlier attempt at the same round
        {"model": b"2"},
    ],
)
def test_signatures_are_for_one_sum_of_one_federation_and_for_one_model(change, signed, tmp_path):
    peers, sign = signed
    now, before = Federation(tmp_path, peers=peers, sign=sign), Federation(tmp_path, peers=peers, sign=sign, **change)
    given = now.server.neighbourhood("a")
    old = [before.nodes["b"].keys if each.name == "b" else each for each in given.keys]
    with pytest.raises(BadInput, match="keys of node 'b' are not signed by it for this sum"):
        now.nodes["a"].share(Neighbourhood(4, old))
    assert is_signed_by(peers["b"], before.nodes["b"].keys.signed_text(
        before.nodes["b"].rules.federation, before.nodes["b"].sum_id), before.nodes["b"].keys.signature)  # fmt: skip


def test_with_many_nodes_each_has_a_few_neighbours(tmp_path):
    names = tuple(f"n{number}" for number in range(9))
    rules = dataclasses.replace(RULES, neighbours=4)
    made = Federation(tmp_path, names, rules)
    assert {len(holders) for holders in made.server.holders.values()} == {5}
    made.share()
    made.mask("n3")
    made.unmask("n5")
    found = made.server.unmasked()
    assert found.clients == 8
    assert found.totals["w"].tolist() == [8 * total for total in expected(("a",))]


def test_with_few_neighbours_only_those_count_whose_shares_arrived(tmp_path):
    names = tuple(f"n{number}" for number in range(9))
    made = Federation(tmp_path, names, dataclasses.replace(RULES, neighbours=4, least=5))
    made.share()
    lost = next(iter(made.server.holders["n0"] - {"n0"}))
    made.mask(lost)
    with pytest.raises(BadInput, match="Only 4 of at least 5 holders of shares are in the sum"):
        made.nodes["n0"].unmask([*(name for name in names if name != lost), "ghost 1", "ghost 2"])


@pytest.mark.parametrize("holders", range(3, 41))
def test_by_default_more_than_two_thirds_of_the_holders_are_needed_and_not_more(holders):
    rules = dataclasses.replace(RULES, threshold=Plan("/run", "1x8x8", 10).secure_threshold)
    assert rules.needed(holders) == 2 * holders // 3 + 1


def test_a_sum_cannot_need_more_nodes_than_a_node_can_count():
    Plan("/run", "1x8x8", 10, secure_least=33)
    with pytest.raises(BadInput, match=r"secure-least 34 must be at most secure-neighbours \+ 1"):
        Plan("/run", "1x8x8", 10, secure_least=34)
    with pytest.raises(BadInput, match="a node counts itself and its 4 neighbours"):
        Plan("/run", "1x8x8", 10, secure_least=6, secure_neighbours=4)


@pytest.mark.parametrize(
    "absent",
    [
        {},
        {"share": ("n0",), "mask": ("n1",)},
        {"share": ("n5", "n6")},
        {"mask": ("n0", "n6")},
        {"unmask": ("n2", "n3")},
        {"mask": ("n4",), "unmask": ("n2",)},
    ],
)
def test_with_the_default_threshold_two_of_seven_nodes_may_fail_at_any_stage(absent, tmp_path):
    names = tuple(f"n{number}" for number in range(7))
    threshold = Plan("/run", "1x8x8", 10).secure_threshold
    made = Federation(tmp_path, names, dataclasses.replace(RULES, threshold=threshold))
    for stage in ("share", "mask", "unmask"):
        getattr(made, stage)(*absent.get(stage, ()))
    missing = {*absent.get("share", ()), *absent.get("mask", ())}
    found = made.server.unmasked()
    assert found.clients == 7 - len(missing)
    assert found.totals["w"].tolist() == [found.clients * total for total in expected(("a",))]


def test_neighbours_are_mutual():
    found = neighbourhoods([str(number) for number in range(50)], 33)
    assert all(name in found[other] for name, others in found.items() for other in others)
    assert {len(each) for each in found.values()} == {33}


@pytest.mark.parametrize(("holders", "needed"), [(3, 2), (4, 3), (5, 3), (33, 17)])
def test_more_than_half_of_the_shares_are_needed(holders, needed):
    assert RULES.needed(holders) == needed


def test_masks_are_uniform_and_follow_from_the_key():
    key = new_seed()
    drawn = mask(key, 100_000, WORDS[32])
    assert np.array_equal(drawn, mask(key, 100_000, WORDS[32]))
    assert not np.array_equal(drawn, mask(new_seed(), 100_000, WORDS[32]))
    assert abs(drawn.mean() / 2**32 - 0.5) < 0.01  # ten standard deviations
    one, other = KeyPair(), KeyPair()
    same = [pair_mask(mine.common_key(theirs.public), 4, WORDS[64]) for mine, theirs in ((one, other), (other, one))]
    assert np.array_equal(*same)
    assert commitment(key) != key


def test_keys_survive_sharing():
    key = KeyPair()
    shares = dict(enumerate(split(key.secret, 2, 3)))
    assert (
        KeyPair.from_secret(joined(shares, 2, lambda secret: KeyPair.is_secret_of(key.public, secret))).public
        == key.public
    )


@pytest.mark.parametrize("wrong", [(0,), (8,), (0, 1, 4)])
def test_wrong_shares_are_left_out_wherever_they_are(wrong):
    seed = new_seed()
    shares = dict(enumerate(split(seed, 5, 9)))
    for place in wrong:
        shares[place] = shares[place][:-1] + bytes([shares[place][-1] ^ 1])
    assert joined(shares, 5, lambda secret: is_seed_of(commitment(seed), secret)) == seed
