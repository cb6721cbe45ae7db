"""The order in which clients see their samples."""

from itertools import chain

import numpy as np
import pytest

from fedrema.core import LocalTraining, Phase
from fedrema.engine import draw_order

KEY = (0, 1, "train", 0)


def order(counts, names=None, epochs=1, batch=100, per_step=1, drop=True, key=KEY):
    names = names or tuple(f"client {row}" for row in range(len(counts)))
    phase = Phase(epochs, lr=0.1, momentum=0.9, batches_per_step=per_step)
    return draw_order(names, list(counts), phase, LocalTraining(batch=batch, drop_incomplete=drop), key)


def seen(drawn, row):
    """Return a client's batches one after another, without padding."""
    return [
        drawn.index[row, step, place, : drawn.sizes[row, step, place]].tolist()
        for step in range(drawn.steps[row])
        for place in range(drawn.index.shape[2])
    ]


def test_the_papers_480_samples_make_four_steps_an_epoch():
    drawn = order([480], epochs=5)
    assert drawn.steps.tolist() == [20]
    assert drawn.index.shape == (1, 20, 1, 100)
    assert (drawn.sizes == 100).all()


def test_an_incomplete_last_batch_can_be_kept():
    drawn = order([480], epochs=2, drop=False)
    assert drawn.sizes[0, :, 0].tolist() == [100, 100, 100, 100, 80] * 2
    assert sorted(chain(*seen(drawn, 0)[:5])) == list(range(480))


@pytest.mark.parametrize("drop", [True, False])
def test_batches_that_divide_the_samples_use_all_of_them(drop):
    assert order([300], drop=drop).sizes[0, :, 0].tolist() == [100, 100, 100]


@pytest.mark.parametrize("drop", [True, False])
def test_fewer_samples_than_a_batch_make_one_step(drop):
    drawn = order([80], epochs=3, drop=drop)
    assert drawn.index.shape == (1, 3, 1, 80)
    for batch in seen(drawn, 0):
        assert sorted(batch) == list(range(80))


def test_a_single_sample_makes_a_step():
    assert seen(order([1], epochs=2), 0) == [[0], [0]]


def test_every_epoch_uses_each_sample_at_most_once_in_a_new_order():
    drawn = order([25], epochs=4, batch=10)
    epochs = [list(chain(*seen(drawn, 0)[start : start + 2])) for start in range(0, 8, 2)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 20
        assert set(epoch) <= set(range(25))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Different samples are dropped in different epochs.
    assert set().union(*epochs) == set(range(25))


def test_the_order_depends_on_the_name_and_not_on_the_row():
    straight = order([30, 30, 12], names=("a", "b", "c"), epochs=2, batch=7)
    turned = order([12, 30, 30], names=("c", "a", "b"), epochs=2, batch=7)
    for row, place in ((0, 1), (1, 2), (2, 0)):
        assert seen(straight, row) == seen(turned, place)
    assert seen(straight, 0) != seen(straight, 1)


def test_the_order_of_a_client_does_not_depend_on_other_clients():
    assert seen(order([30], names=("a",), batch=7), 0) == seen(order([99, 30], names=("z", "a"), batch=7), 1)


def test_equal_keys_give_equal_orders_and_other_keys_give_others():
    first = seen(order([50], batch=50), 0)
    assert seen(order([50], batch=50), 0) == first
    for key in ((1, 1, "train", 0), (0, 2, "train", 0), (0, 1, "adapt", 0), (0, 1, "train", 1)):
        assert seen(order([50], batch=50, key=key), 0) != first


def test_unequal_clients_take_different_numbers_of_steps_and_are_padded():
    drawn = order([25, 4, 10], epochs=2, batch=10)
    assert drawn.steps.tolist() == [4, 2, 2]
    assert drawn.index.shape == (3, 4, 1, 10)
    assert drawn.sizes[:, :, 0].tolist() == [[10, 10, 10, 10], [4, 4, 0, 0], [10, 10, 0, 0]]
    assert (drawn.index[1, :2, 0, 4:] == 0).all()
    assert (drawn.index[1:, 2:] == 0).all()
    for batch in seen(drawn, 1):
        assert sorted(batch) == [0, 1, 2, 3]


def test_orders_are_as_wide_as_the_largest_batch():
    assert order([7, 5], batch=100).index.shape == (2, 1, 1, 7)


def test_two_batches_per_step_are_pairs_of_consecutive_batches():
    single = seen(order([45], epochs=2, batch=10), 0)  # 4 batches an epoch, 8 in all
    pairs = order([45], epochs=2, batch=10, per_step=2)
    assert pairs.steps.tolist() == [4]
    assert seen(pairs, 0) == single


def test_batches_that_do_not_fill_a_step_are_dropped():
    single = seen(order([45], epochs=2, batch=10), 0)
    triples = order([45], epochs=2, batch=10, per_step=3)
    assert triples.steps.tolist() == [2]
    assert seen(triples, 0) == single[:6]


def test_a_client_with_fewer_batches_than_a_step_needs_repeats_them():
    drawn = order([45, 10, 23], batch=10, per_step=3)
    assert drawn.steps.tolist() == [1, 1, 1]
    (only,) = seen(order([45, 10, 23], batch=10), 1)
    assert seen(drawn, 1) == [only, only, only]
    first, second = seen(order([45, 10, 23], batch=10), 2)
    assert seen(drawn, 2) == [first, second, first]


def test_zero_epochs_have_no_steps():
    drawn = order([45, 3], epochs=0)
    assert drawn.steps.tolist() == [0, 0]
    assert drawn.index.shape[:2] == (2, 0)
    assert drawn.sizes.size == 0


def test_indices_are_int64():
    drawn = order([45, 3])
    assert drawn.index.dtype == drawn.sizes.dtype == np.int64
