"""Class prototypes against numbers computed by hand."""

import pytest
import torch

from fedrema.core import Batch, Uploads
from fedrema.methods.shared.prototypes import alignment, class_means, global_prototypes, initial_prototypes


def numbers(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def batch_of(labels, mask=None) -> Batch:
    count = len(labels)
    real = torch.ones(count, dtype=torch.float64) if mask is None else torch.tensor(mask, dtype=torch.float64)
    return Batch(torch.zeros(count, 1), torch.tensor(labels), real, torch.arange(count))


def sent(means, counts) -> Uploads:
    """Return the uploads of several clients, without model parameters."""
    means, counts = torch.tensor(means, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)
    return Uploads(torch.arange(len(means)), {}, {"means": means, "label_counts": counts}, counts.sum(dim=1))


def test_class_means_and_counts_ignore_padding_and_missing_classes():
    # Padding has label 0 and large features: neither may affect a mean or a count.
    values = numbers([1, 2], [3, 6], [5, 7], [1000, -1000], [2, 1])
    means, counts = class_means(values, batch_of([0, 0, 2, 0, 2], [1, 1, 1, 0, 1]), classes=4)
    assert means.tolist() == [[2, 4], [0, 0], [3.5, 4], [0, 0]]
    assert counts.tolist() == [2, 0, 2, 0]
    assert means.dtype == counts.dtype == torch.float64


def test_a_client_with_only_padding_has_no_class():
    means, counts = class_means(numbers([5, 5], [6, 6]), batch_of([0, 1], [0, 0]), classes=2)
    assert means.tolist() == [[0, 0], [0, 0]]
    assert counts.tolist() == [0, 0]


def test_class_means_under_vmap_equal_those_of_each_client():
    values = torch.arange(24, dtype=torch.float64).reshape(2, 4, 3)
    labels = torch.tensor([[0, 1, 1, 0], [2, 2, 2, 0]])
    mask = numbers([1, 1, 1, 1], [1, 1, 1, 0])
    means, counts = torch.func.vmap(
        lambda value, label, real: class_means(value, Batch(value, label, real, label), classes=3)
    )(values, labels, mask)
    assert counts.tolist() == [[2, 2, 0], [0, 0, 3]]
    assert means[0].tolist() == [[4.5, 5.5, 6.5], [4.5, 5.5, 6.5], [0, 0, 0]]
    assert means[1].tolist() == [[0, 0, 0], [0, 0, 0], [15, 16, 17]]


MEANS = [[[1, 2], [10, 10], [0, 0], [0, 0]], [[5, 6], [0, 0], [7, 9], [0, 0]]]
COUNTS = [[3, 4, 0, 0], [1, 0, 2, 0]]


def test_global_prototypes_are_weighted_by_samples():
    found = global_prototypes(initial_prototypes(4, 2), sent(MEANS, COUNTS), "samples")
    # class 0: (3·(1, 2) + 1·(5, 6)) / 4; classes 1 and 2 are held by one client each
    assert found["prototypes"].tolist() == [[2, 3], [10, 10], [7, 9], [0, 0]]
    assert found["known"].tolist() == [1, 1, 1, 0]


def test_global_prototypes_can_be_unweighted_means():
    found = global_prototypes(initial_prototypes(4, 2), sent(MEANS, COUNTS), "uniform")
    assert found["prototypes"].tolist() == [[3, 4], [10, 10], [7, 9], [0, 0]]
    assert found["known"].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("weigh", ["samples", "uniform"])
def test_a_class_without_uploads_keeps_its_prototype_or_stays_unknown(weigh):
    first = global_prototypes(initial_prototypes(4, 2), sent(MEANS, COUNTS), weigh)
    later = global_prototypes(first, sent([[[-1, -1], [0, 0], [0, 0], [0, 0]]], [[2, 0, 0, 0]]), weigh)
    assert later["prototypes"].tolist() == [[-1, -1], [10, 10], [7, 9], [0, 0]]
    assert later["known"].tolist() == [1, 1, 1, 0]
    assert first["prototypes"][0].tolist() != [-1, -1]  # the server's old tensor is not changed


def test_a_prototype_at_the_origin_is_known():
    found = global_prototypes(initial_prototypes(2, 2), sent([[[0, 0], [0, 0]]], [[1, 0]]), "samples")
    assert found["known"].tolist() == [1, 0]


def test_alignment_is_the_mean_square_per_feature_over_real_samples():
    features = numbers([1, 2], [3, 3], [0, 0], [100, 100])
    prototypes, known = numbers([0, 0], [1, 5], [50, 50]), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    # ½(1² + 2²) = 2.5 and ½(2² + 2²) = 4; class 2 has no prototype and the last sample is padding.
    found = alignment(features, batch_of([0, 1, 2, 0], [1, 1, 1, 0]), prototypes, known)
    # The sample without a prototype adds nothing but is one of the three that the mean is over.
    assert float(found) == pytest.approx((2.5 + 4) / 3, rel=1e-15)


def test_the_gradient_of_alignment_is_zero_for_padding_and_unknown_classes():
    features = numbers([1, 2], [3, 3], [0, 0], [100, 100]).requires_grad_()
    prototypes, known = numbers([0, 0], [1, 5], [50, 50]), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    alignment(features, batch_of([0, 1, 2, 0], [1, 1, 1, 0]), prototypes, known).backward()
    # The derivative of (1/3)(1/2)‖h − c̄‖² is (h − c̄)/3.
    expected = [[1 / 3, 2 / 3], [2 / 3, -2 / 3], [0, 0], [0, 0]]
    assert features.grad.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize(("labels", "mask"), [([2, 2], [1, 1]), ([0, 1], [0, 0])])
def test_alignment_without_known_or_real_samples_is_zero(labels, mask):
    known = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    assert float(alignment(numbers([1, 2], [3, 4]), batch_of(labels, mask), torch.zeros(3, 2).double(), known)) == 0
