"""FedReMa against numbers computed by hand from the paper's equations."""

import math

import pytest
import torch

from fedrema.core import Moment, Uploads, average
from fedrema.core.similarity import draw_probes, head_similarity
from fedrema.errors import BadInput
from fedrema.methods.fedrema import FedReMa, maximum_difference_segmentation
from fedrema.models.body_and_head import BodyAndHead, Net

MOMENT = Moment(round=1, rounds=10, seed=0)


@pytest.fixture
def net() -> Net:
    """Two features, two classes, one linear head."""
    module = BodyAndHead(torch.nn.Linear(1, 2), torch.nn.Linear(2, 2)).double()
    return Net(module, torch.zeros(1, 1, dtype=torch.float64))


def uploads(biases, counts=None, clients=None, bodies=None) -> Uploads:
    """Return uploads of heads with zero weights: their logits are their biases, so results can be computed by hand."""
    heads = torch.tensor(biases, dtype=torch.float64)
    k = len(heads)
    body = torch.arange(k, dtype=torch.float64) if bodies is None else torch.tensor(bodies, dtype=torch.float64)
    sizes = torch.ones(k, dtype=torch.float64) if counts is None else torch.tensor(counts, dtype=torch.float64)
    return Uploads(
        clients=torch.arange(k) if clients is None else torch.tensor(clients),
        params={"head.weight": torch.zeros(k, 2, 2, dtype=torch.float64), "head.bias": heads},
        extras={},
        counts=sizes,
        mean=average({"body.weight": body[:, None, None].expand(k, 2, 1)}, sizes),
    )


def rows(similarity):
    relevant, gaps = maximum_difference_segmentation(torch.tensor(similarity, dtype=torch.float64))
    return [set(row.nonzero().flatten().tolist()) for row in relevant], gaps.tolist()


# The first row contains a client's similarities; the other rows only make the matrix square.
def one_row(similarities, **options):
    matrix = torch.tensor([similarities] * len(similarities), dtype=torch.float64)
    relevant, gaps = maximum_difference_segmentation(matrix, **options)
    return set(relevant[0].nonzero().flatten().tolist()), float(gaps[0])


def test_the_client_below_the_largest_gap_is_included_as_in_algorithm_1():
    # sorted 0.1 0.2 0.9 1.0; differences 0.1 0.7 0.1; m points at the 0.2 of client 2
    assert one_row([1.0, 0.9, 0.2, 0.1]) == ({0, 1, 2}, pytest.approx(0.7))


def test_the_released_code_includes_only_clients_above_the_gap():
    assert one_row([1.0, 0.9, 0.2, 0.1], include_below_gap=False) == ({0, 1}, pytest.approx(0.7))


def test_without_the_gap_to_itself_a_client_always_chooses_a_peer():
    # all peers are distant: with the gap to itself, 0.3 → 1.0 is the largest; without, 0.1 → 0.25
    row = [1.0, 0.3, 0.25, 0.1]
    assert one_row(row) == ({0, 1}, pytest.approx(0.7))
    assert one_row(row, include_below_gap=False) == ({0}, pytest.approx(0.7))
    assert one_row(row, gap_to_self=False, include_below_gap=False) == ({0, 1, 2}, pytest.approx(0.15))
    assert one_row(row, gap_to_self=False) == ({0, 1, 2, 3}, pytest.approx(0.15))


def test_two_clear_groups_are_separated():
    near, far = 0.95, 0.1
    matrix = [
        [1.0, near, far, 0.05],
        [near, 1.0, 0.05, far],
        [far, 0.05, 1.0, near],
        [0.05, far, near, 1.0],
    ]
    sets, gaps = rows(matrix)
    assert sets == [{0, 1, 2}, {0, 1, 3}, {0, 2, 3}, {1, 2, 3}]
    assert gaps == pytest.approx([0.85] * 4)
    relevant, _ = maximum_difference_segmentation(torch.tensor(matrix), include_below_gap=False)
    assert relevant.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_of_equal_similarities_below_the_gap_one_is_included():
    # sorted 0.2 (client 2), 0.2 (client 3), 1.0, 1.0: exactly one is directly below the gap
    assert one_row([1.0, 1.0, 0.2, 0.2]) == ({0, 1, 3}, pytest.approx(0.8))


def test_of_equal_gaps_the_lowest_is_used():
    assert one_row([1.0, 0.75, 0.5, 0.25]) == ({0, 1, 2, 3}, pytest.approx(0.25))


def test_with_equal_similarities_all_clients_are_relevant():
    sets, gaps = rows([[1.0] * 3] * 3)
    assert sets == [{0, 1, 2}] * 3
    assert gaps == [0.0] * 3
    sets, gaps = rows([[1.0, 1.0 - 1e-9, 1.0], [1.0 - 1e-9, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert sets == [{0, 1, 2}] * 3
    assert gaps == [0.0] * 3


def test_one_client_is_relevant_to_itself():
    assert rows([[1.0]]) == ([{0}], [0.0])


def test_two_clients_have_one_gap_and_keep_each_other():
    assert rows([[1.0, 0.4], [0.4, 1.0]]) == ([{0, 1}, {0, 1}], pytest.approx([0.6, 0.6]))
    relevant, gaps = maximum_difference_segmentation(torch.tensor([[1.0, 0.4], [0.4, 1.0]]), gap_to_self=False)
    assert relevant.all()
    assert gaps.tolist() == [0, 0]


def test_similarity_is_the_cosine_of_soft_predictions(net):
    sent = uploads([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    probes = draw_probes(net, MOMENT, count=1, high=1.0)
    similarity = head_similarity(net, sent.params, probes, temperature=0.5)
    # p = softmax(b / 0.5): (e², 1)/(e²+1), its mirror, and (e, 1)/(e+1)
    high, low = math.exp(2) / (math.exp(2) + 1), 1 / (math.exp(2) + 1)
    middle, rest = math.e / (math.e + 1), 1 / (math.e + 1)
    mirrored = 2 * high * low / (high**2 + low**2)
    close = (high * middle + low * rest) / math.sqrt((high**2 + low**2) * (middle**2 + rest**2))
    assert similarity[0, 1] == pytest.approx(mirrored)
    assert similarity[0, 2] == pytest.approx(close)
    assert similarity.diagonal().tolist() == pytest.approx([1, 1, 1])


def test_peers_can_have_another_temperature_and_probes_of_each_row(net):
    sent = uploads([[1.0, 0.0], [0.0, 1.0]])
    probes = draw_probes(net, MOMENT, count=1, high=0.5, names=("a", "b"))
    assert probes.shape == (2, 1, 2)
    assert probes.max() < 0.5
    similarity = head_similarity(net, sent.params, probes, temperature=0.5, peer_temperature=1.0)
    sharp, soft = math.exp(2), math.e
    own = torch.tensor([sharp, 1.0]) / math.hypot(sharp, 1)
    itself = torch.tensor([soft, 1.0]) / math.hypot(soft, 1)
    assert float(similarity[0, 0]) == pytest.approx(float(own @ itself), rel=1e-6)
    assert float(similarity[0, 1]) == pytest.approx(float(own @ itself.flip(0)), rel=1e-6)


def test_each_row_answers_its_own_probe(net):
    generator = torch.Generator().manual_seed(1)
    heads = {
        "head.weight": torch.randn(3, 2, 2, generator=generator, dtype=torch.float64),
        "head.bias": torch.randn(3, 2, generator=generator, dtype=torch.float64),
    }
    probes = draw_probes(net, MOMENT, count=2, high=1.0, names=("a", "b", "c"))
    similarity = head_similarity(net, heads, probes, temperature=0.5, peer_temperature=1.0)
    for i in range(3):
        for j in range(3):
            cosines = []
            for probe in probes[i]:
                own = torch.softmax((heads["head.weight"][i] @ probe + heads["head.bias"][i]) / 0.5, 0)
                peer = torch.softmax(heads["head.weight"][j] @ probe + heads["head.bias"][j], 0)
                cosines.append(float(own @ peer / own.norm() / peer.norm()))
            assert float(similarity[i, j]) == pytest.approx(sum(cosines) / 2)


def test_bodies_are_averaged_by_sample_counts_and_heads_over_relevant_peers(net):
    # Clients 0 and 1 prefer class 0, client 2 class 1; row 0 of S: 1, a bit less, far → A_0 = {0, 1} and client 2
    # is below the gap and therefore in; with include_below_gap=False it is not.
    method = FedReMa(include_below_gap=False)
    sent = uploads([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0]], counts=[1, 3, 6], bodies=[1.0, 2.0, 5.0])
    answer = method.aggregate(net, method.server(net, 3), sent, MOMENT)
    assert answer.shared["body.weight"].flatten().tolist() == pytest.approx([(1 + 6 + 30) / 10] * 2)  # Eq. 6
    expected = [[(1 * 1.0 + 3 * 0.9) / 4, 0.0], [(1 * 1.0 + 3 * 0.9) / 4, 0.0], [0.0, 1.0]]  # Eq. 7
    assert answer.personal["head.bias"].tolist() == [pytest.approx(row) for row in expected]
    assert answer.trace["set_sizes"].tolist() == [2, 2, 1]
    assert set(answer.shared) == {"body.weight"}


def test_the_set_of_algorithm_1_includes_the_client_below_the_gap(net):
    method = FedReMa()
    sent = uploads([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0]], counts=[1, 3, 6])
    answer = method.aggregate(net, method.server(net, 3), sent, MOMENT)
    everyone = [(1.0 + 2.7) / 10, 6 / 10]
    assert answer.personal["head.bias"][0].tolist() == pytest.approx(everyone)
    # Client 2 has different similarities to all others: the most similar, client 1, is below its gap.
    assert answer.personal["head.bias"][2].tolist() == pytest.approx([2.7 / 9, 6 / 9])


def test_weights_can_be_uniform(net):
    method = FedReMa(include_below_gap=False, weigh="uniform")
    sent = uploads([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0]], counts=[1, 3, 6])
    answer = method.aggregate(net, method.server(net, 3), sent, MOMENT)
    assert answer.personal["head.bias"][0].tolist() == pytest.approx([0.95, 0.0])


def groups_apart(distance):
    """Return uploads of two pairs of clients whose logits differ by `distance`."""
    return [[distance, 0.0], [distance * 0.99, 0.0], [0.0, distance], [0.0, distance * 0.99]]


def gap_of(net, method, distance):
    return method.aggregate(net, method.server(net, 4), uploads(groups_apart(distance)), MOMENT).trace["mean_gap"]


def critical_rounds(net, method, distances):
    """Return for each round whether it was critical, and the final state."""
    state, critical = method.server(net, 4), []
    for distance in distances:
        answer = method.aggregate(net, state, uploads(groups_apart(distance)), MOMENT)
        state = answer.state
        critical.append(answer.trace["critical"])
    return critical, state


def test_the_period_ends_when_the_gap_falls_from_a_peak_in_round_one(net):
    method = FedReMa()
    assert gap_of(net, method, 0.2) < 0.5 * gap_of(net, method, 1.0)
    critical, state = critical_rounds(net, method, [1.0, 0.2, 1.0, 2.0])
    # The round that ends the period still uses MDS; it never starts again, however large the gap.
    assert critical == [True, True, False, False]
    assert state["critical"] is False


def test_a_later_peak_raises_the_threshold(net):
    method = FedReMa()
    first, peak, low = (gap_of(net, method, distance) for distance in (0.4, 1.5, 0.5))
    assert low > first  # would have stayed critical against the first round's gap
    assert low / peak < 0.5
    critical, state = critical_rounds(net, method, [0.4, 1.5, 0.5, 0.4])
    assert critical == [True, True, True, False]
    assert state["peak"] == pytest.approx(peak)


def test_the_period_ends_at_exactly_delta_unless_configured_otherwise(net):
    peak, low = gap_of(net, FedReMa(), 1.0), gap_of(net, FedReMa(), 0.5)
    boundary = low / peak
    assert critical_rounds(net, FedReMa(delta=boundary), [1.0, 0.5, 0.5])[0] == [
        True,
        True,
        False,
    ]  # > δ fails at equality
    assert critical_rounds(net, FedReMa(delta=boundary, end_at_delta=False), [1.0, 0.5, 0.5])[0] == [True, True, True]
    assert critical_rounds(net, FedReMa(delta=boundary - 1e-9), [1.0, 0.5, 0.5])[0] == [True, True, True]


def test_delta_zero_never_ends_the_period_and_delta_one_ends_it_immediately(net):
    assert all(critical_rounds(net, FedReMa(delta=0.0), [1.0, 0.01, 0.001])[0])
    assert critical_rounds(net, FedReMa(delta=1.0), [1.0, 1.0])[0] == [True, False]


def test_the_dependency_map_counts_choices_and_gives_the_weights_after_the_period(net):
    method = FedReMa(include_below_gap=False)
    state = method.server(net, 4)
    # Round 1: pairs (0, 1) and (2, 3). Round 2: pairs (0, 2) and (1, 3), nearer to each other, which ends the period.
    first = method.aggregate(net, state, uploads(groups_apart(2.0)), MOMENT)
    other = [[0.2, 0.0], [0.0, 0.2], [0.198, 0.0], [0.0, 0.198]]
    second = method.aggregate(net, first.state, uploads(other), MOMENT)
    assert second.state["dependencies"].tolist() == [[2, 1, 1, 0], [1, 2, 0, 1], [1, 0, 2, 1], [0, 1, 1, 2]]
    assert second.state["critical"] is False
    sent = uploads([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 5.0]], counts=[1, 50, 7, 9])
    third = method.aggregate(net, second.state, sent, MOMENT)
    expected = [[(2 * 1 + 3) / 4, 1 / 4], [1 / 4, (2 + 5) / 4], [(1 + 2 * 3) / 4, 5 / 4], [3 / 4, (1 + 2 * 5) / 4]]
    assert third.personal["head.bias"].tolist() == [pytest.approx(row) for row in expected]  # Eq. 10: no sample counts
    assert third.state["dependencies"].tolist() == second.state["dependencies"].tolist()
    assert "mean_gap" not in third.trace


def ended(net, clients=4):
    state = FedReMa().server(net, clients)
    counts = torch.tensor([[2.0, 1, 0, 0], [1, 2, 0, 0], [0, 0, 2, 1], [0, 0, 1, 2]])
    return {**state, "critical": False, "peak": 0.5, "dependencies": counts}


def test_after_the_period_absent_peers_are_left_out_and_the_rest_renormalised(net):
    sent = uploads([[1.0, 0.0], [4.0, 0.0], [0.0, 3.0]], clients=[0, 1, 3])
    answer = FedReMa().aggregate(net, ended(net), sent, MOMENT)
    expected = [[(2 * 1 + 4) / 3, 0], [(1 + 2 * 4) / 3, 0], [0, 3]]
    assert answer.personal["head.bias"].tolist() == [pytest.approx(row) for row in expected]


def test_a_client_that_first_appears_after_the_period_is_matched_once(net):
    state = ended(net)
    state["dependencies"] = state["dependencies"].clone()
    state["dependencies"][3] = 0
    state["dependencies"][:, 3] = 0
    method = FedReMa(include_below_gap=False)
    sent = uploads([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0], [0.0, 0.9]])
    answer = method.aggregate(net, state, sent, MOMENT)
    assert answer.state["dependencies"][3].tolist() == [0, 0, 1, 1]
    assert answer.state["dependencies"][2].tolist() == [0, 0, 2, 0]  # the other rows are unchanged
    assert answer.personal["head.bias"][3].tolist() == pytest.approx([0, 0.95])
    again = method.aggregate(net, answer.state, uploads([[0.0, 1.0], [0.9, 0.0], [1.0, 0.0], [0.0, 0.9]]), MOMENT)
    assert torch.equal(again.state["dependencies"], answer.state["dependencies"])


def test_fewer_than_two_participants_keep_their_own_head(net):
    for state in (FedReMa().server(net, 4), ended(net)):
        answer = FedReMa().aggregate(net, state, uploads([[1.0, 2.0]], clients=[2]), MOMENT)
        assert answer.personal["head.bias"].tolist() == [[1.0, 2.0]]
        assert torch.equal(answer.state["dependencies"], state["dependencies"])
        assert answer.state["critical"] == state["critical"]


def test_identical_heads_are_averaged_over_all_clients_and_do_not_end_the_period(net):
    same = uploads([[1.0, 0.0]] * 3)
    answer = FedReMa().aggregate(net, FedReMa().server(net, 3), same, MOMENT)
    assert answer.trace["set_sizes"].tolist() == [3, 3, 3]
    assert answer.state["critical"] is True
    assert answer.trace["gap_ratio"] == 1.0


def test_the_mean_gap_is_over_participants(net):
    method = FedReMa()
    state = method.server(net, 8)
    answer = method.aggregate(net, state, uploads(groups_apart(1.0), clients=[1, 3, 5, 7]), MOMENT)
    assert answer.trace["mean_gap"] == pytest.approx(gap_of(net, method, 1.0))
    assert answer.state["dependencies"][0].sum() == 0
    assert answer.state["dependencies"][1, 1] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": 1.5}, "--delta must be in [0, 1], got 1.5"),
        ({"probes": 0}, "--probes must be at least 1, got 0"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"peer_temperature": -1.0}, "--peer-temperature must be above 0"),
        ({"probe_high": float("inf")}, "--probe-high must be above 0"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(BadInput) as caught:
        FedReMa(**settings)
    assert words in str(caught.value)


def by_sorting(row, itself, include_below_gap):
    """Return the relevant peers of one row by a literal implementation of Algorithm 1."""
    order = sorted(range(len(row)), key=lambda client: (row[client], client))
    differences = [row[order[place + 1]] - row[order[place]] for place in range(len(row) - 1)]
    largest = differences.index(max(differences))
    return set(order[largest if include_below_gap else largest + 1 :]) | {itself}


@pytest.mark.parametrize("include_below_gap", [True, False])
def test_sets_equal_those_of_a_literal_implementation_also_with_ties_and_in_blocks(include_below_gap):
    generator = torch.Generator().manual_seed(0)
    # Few different values, so that there are many ties.
    similarity = torch.randint(0, 6, (40, 40), generator=generator).double() / 7
    similarity.fill_diagonal_(1)
    expected = [by_sorting(row, place, include_below_gap) for place, row in enumerate(similarity.tolist())]
    whole, gaps = maximum_difference_segmentation(similarity, include_below_gap=include_below_gap)
    assert [set(row.nonzero().flatten().tolist()) for row in whole] == expected
    parts = [
        maximum_difference_segmentation(similarity[first : first + 16], True, include_below_gap, first)
        for first in (0, 16, 32)
    ]
    assert torch.equal(torch.cat([sets for sets, _ in parts]), whole)
    assert torch.equal(torch.cat([found for _, found in parts]), gaps)


def test_matching_in_blocks_equals_matching_all_at_once(net, monkeypatch):
    biases = torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    sent = uploads(biases, counts=[1 + client % 7 for client in range(300)])
    method = FedReMa()
    whole = method.aggregate(net, method.server(net, 300), sent, MOMENT)
    monkeypatch.setattr("fedrema.core.similarity._rows_per_block", lambda numbers: 64)
    monkeypatch.setattr("fedrema.core.aggregation.ROWS_PER_BLOCK", 50)
    blocks = method.aggregate(net, method.server(net, 300), sent, MOMENT)
    assert torch.equal(blocks.trace["sets"], whole.trace["sets"])
    assert torch.allclose(blocks.personal["head.bias"], whole.personal["head.bias"], atol=1e-12)
    # Compared with the mean over the set of each client.
    for client in (0, 17, 299):
        members = whole.trace["sets"][client]
        weights = sent.counts * members
        expected = (weights @ sent.params["head.bias"]) / weights.sum()
        assert torch.allclose(whole.personal["head.bias"][client], expected, atol=1e-12)
    after = method.aggregate(net, {**whole.state, "critical": False}, sent, MOMENT)
    members = whole.trace["sets"][5].double()
    expected = members @ sent.params["head.bias"] / members.sum()
    assert torch.allclose(after.personal["head.bias"][5], expected, atol=1e-12)
    assert whole.state["dependencies"].dtype is torch.int16
