import re

import numpy as np
import pytest

from fedrema.data import partitions
from fedrema.data.partitions import dirichlet, draw_test_mask, grouped, grouped_counts, iid, quantity, shards
from fedrema.errors import BadInput

LABELS = np.random.default_rng(3).permutation(np.repeat(np.arange(10), 200))


def counts(parts, labels=LABELS, classes=10):
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts])


def test_grouped_assigns_the_papers_600_samples():
    assigned = grouped_counts(classes=10, clients=20, samples=600, s=0.2, groups=5)
    dominant = [(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)]
    for client in range(20):
        expected = [12 + 160 * (label in dominant[client // 4]) for label in range(10)]
        assert assigned[client].tolist() == expected


def test_grouped_assigns_remainders_from_a_label_that_depends_on_the_client():
    assigned = grouped_counts(classes=10, clients=20, samples=40, s=0.1, groups=5)
    # 4 IID samples one by one from label k on, and 36 = 3 x 12 for the dominant labels.
    assert assigned[0].tolist() == [13, 13, 13, 1, 0, 0, 0, 0, 0, 0]
    assert assigned[7].tolist() == [1, 0, 12, 12, 12, 0, 0, 1, 1, 1]
    assert assigned[19].tolist() == [13, 1, 1, 0, 0, 0, 0, 0, 12, 13]


def test_grouped_remainder_of_the_dominant_labels_depends_on_the_client():
    assigned = grouped_counts(classes=10, clients=5, samples=10, s=0, groups=5)
    assert assigned[0, [0, 1, 2]].tolist() == [4, 3, 3]
    assert assigned[1, [2, 3, 4]].tolist() == [3, 4, 3]
    assert assigned[2, [4, 5, 6]].tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    ("clients", "classes", "groups", "dominant"),
    [
        (7, 10, 5, [{0, 1, 2}, {0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]),
        (3, 10, 5, [{0, 1, 2}, {2, 3, 4}, {6, 7, 8}]),
        (5, 7, 5, [{0, 1}, {1, 2}, {2, 3}, {4, 5}, {5, 6}]),
        (2, 4, 1, [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        (2, 3, 2, [{0, 1}, {1, 2}]),
        (4, 2, 4, [{0}, {0}, {1}, {1}]),
    ],
)
def test_grouped_with_other_numbers_of_clients_and_classes(clients, classes, groups, dominant):
    assigned = grouped_counts(classes, clients, samples=24, s=0, groups=groups)
    assert [set(np.flatnonzero(row).tolist()) for row in assigned] == dominant
    assert (assigned.sum(axis=1) == 24).all()


def test_the_number_of_iid_samples_is_not_affected_by_floating_point_rounding():
    # 100 * 0.29 is 28.999999999999996 in floating point.
    assert grouped_counts(29, clients=1, samples=100, s=0.29, groups=29)[0, 5] == 1


@pytest.mark.parametrize("s", [0.0, 0.35, 1.0])
def test_grouped_assigns_the_planned_counts(s):
    parts = grouped(LABELS, 10, 8, 90, s, 5, seed=1)
    assert (counts(parts) == grouped_counts(10, 8, 90, s, 5)).all()


ALL = {
    "grouped": lambda seed: grouped(LABELS, 10, 8, 60, 0.3, 5, seed),
    "dirichlet": lambda seed: dirichlet(LABELS, 10, 8, 60, 0.3, seed),
    "shards": lambda seed: shards(LABELS, 10, 8, 60, 3, seed),
    "iid": lambda seed: iid(LABELS, 8, 60, seed),
    "quantity": lambda seed: quantity(LABELS, 8, 60, 0.3, seed),
}


@pytest.mark.parametrize("name", ALL)
def test_no_sample_is_assigned_twice_and_all_are_assigned(name):
    parts = ALL[name](5)
    everything = np.concatenate(parts)
    assert len(parts) == 8
    assert len(everything) == 8 * 60
    assert len(np.unique(everything)) == len(everything)
    assert name == "quantity" or {len(part) for part in parts} == {60}


@pytest.mark.parametrize("name", ALL)
def test_partitions_depend_on_the_seed_only(name):
    first, again, other = ALL[name](5), ALL[name](5), ALL[name](6)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert set(first[0].tolist()) != set(other[0].tolist())


@pytest.mark.parametrize("name", ["grouped", "shards"])
def test_a_clients_samples_are_shuffled(name):
    labels = LABELS[ALL[name](5)[0]]
    assert not (np.sort(labels) == labels).all()


def test_dirichlet_can_use_the_whole_pool():
    parts = dirichlet(LABELS, 10, 20, 100, 0.05, seed=0)
    assert (counts(parts).sum(axis=0) == 200).all()


def test_dirichlet_alpha_controls_label_skew():
    def largest_share(alpha):
        return counts(dirichlet(LABELS, 10, 10, 60, alpha, seed=0)).max(axis=1).mean() / 60

    assert largest_share(1000.0) < 0.25 < 0.6 < largest_share(0.01)


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 1e8])
def test_dirichlet_accepts_extreme_alpha(alpha):
    assert (counts(dirichlet(LABELS, 10, 20, 100, alpha, seed=0)).sum(axis=1) == 100).all()


def test_shares_that_floats_cannot_represent_become_a_single_class():
    class Broken:
        def dirichlet(self, alpha):
            return np.full(len(alpha), np.nan)

        def integers(self, high):
            return high - 1

    assert partitions._dirichlet_shares(Broken(), 3, 0.1).tolist() == [0, 0, 1]


def test_shards_assign_distinct_classes_and_use_all_classes_equally():
    assigned = counts(shards(LABELS, 10, 15, 61, 2, seed=0))
    assert ((assigned > 0).sum(axis=1) == 2).all()
    assert (np.sort(assigned, axis=1)[:, -2:] == [30, 31]).all()
    assert ((assigned > 0).sum(axis=0) == 3).all()


def test_quantity_skew_has_a_minimum_size():
    sizes = [len(part) for part in quantity(LABELS, 20, 50, 0.1, seed=0)]
    assert sum(sizes) == 1000
    assert min(sizes) >= 5
    assert max(sizes) > 150


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (
            lambda: iid(LABELS, 21, 100, 0),
            "21 clients with 100 samples each need 2100 samples, but the dataset has 2000",
        ),
        (lambda: dirichlet(LABELS, 10, 21, 100, 1, 0), "each need 2100 samples"),
        (lambda: quantity(LABELS, 21, 100, 1, 0), "on average need 2100 samples"),
        (
            lambda: shards(np.repeat([0, 1], [5, 100]), 2, 2, 20, 1, 0),
            "2 clients with 20 samples each from 1 classes need 20 samples of class 0, but the dataset has 5",
        ),
        (
            lambda: shards(LABELS, 10, 2, 20, 11, 0),
            "--classes-per-client 11 is more than the 10 classes of the dataset; 1 to 10",
        ),
    ],
)
def test_partitions_larger_than_the_pool_are_refused(partition, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        partition()


def test_too_few_samples_of_a_label_in_digits_are_named_with_numbers():
    labels = np.repeat(np.arange(10), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    # Label 8 serves two groups: 20 clients * 1.5 of the IID part, 8 clients * 20 of the rest.
    with pytest.raises(BadInput) as caught:
        grouped(labels, 10, 20, 75, 0.2, 5, 0)
    assert str(caught.value) == (
        "20 clients with 75 samples each at s=0.2 need 190 samples of class 8, but the dataset has 174: "
        "lower --samples or --clients."
    )


@pytest.mark.parametrize(
    ("size", "share", "expected"),
    [(600, 0.2, 120), (9, 0.2, 1), (2, 0.2, 1), (2, 0.99, 1), (1, 0.2, 0), (4, 0.1, 1)],
)
def test_the_test_split_has_its_share_and_no_split_is_empty(size, share, expected):
    assert draw_test_mask(size, share, 0, "a").sum() == expected


def test_the_test_split_depends_on_seed_and_name():
    base = draw_test_mask(100, 0.2, 0, "a")
    assert (base == draw_test_mask(100, 0.2, 0, "a")).all()
    assert (base != draw_test_mask(100, 0.2, 1, "a")).any()
    assert (base != draw_test_mask(100, 0.2, 0, "b")).any()
