"""FedSelect: selections and the rounds around them, against numbers computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.errors import BadInput
from fedrema.methods.fedselect import FedSelect
from tests.fixtures import BACKENDS, tensor
from tests.methods.by_hand import LR, assert_same, begun, local, logits, slopes


def test_the_most_changed_of_the_shared_entries_become_personal():
    mask = tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    change = tensor([[9.0, 0.1, 0.5], [0.3, 0.4, 0.2]])
    # Five are shared; the authors keep round(0.75 · 5) = 4 of them: the one that changed by 0.5 becomes personal.
    assert FedSelect().selection(mask, change).tolist() == [[1, 0, 1], [0, 0, 0]]
    assert FedSelect(select_share=0.0).selection(mask, change).tolist() == mask.tolist()
    assert FedSelect(select_share=1.0).selection(mask, change).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert FedSelect(most_personal=0.1).selection(mask, change).tolist() == mask.tolist()  # a sixth is personal


@pytest.mark.parametrize(("shared", "personal"), [(2, 0), (3, 1), (5, 1), (6, 2), (7, 2), (10, 2), (14, 4), (100, 25)])
def test_as_many_become_personal_as_in_the_authors_code(shared, personal):
    # They sort n changes and select all from index round(0.75 n) on; NumPy rounds halves to even numbers.
    change = torch.arange(1.0, shared + 1, dtype=torch.float64)[None]
    mask = FedSelect().selection(torch.zeros_like(change), change)
    assert mask.sum() == personal == shared - np.round(0.75 * shared)
    assert mask[0, shared - personal :].all()


def test_a_client_that_has_not_trained_since_the_last_selection_selects_nothing():
    mask = tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert FedSelect().selection(mask, torch.zeros_like(mask)).tolist() == mask.tolist()


def test_the_first_selection_follows_the_training_of_the_fourth_round():
    # The authors count rounds from 0 and select after training where the number is 3, 6, …
    simulator, state, _, _ = begun(FedSelect(), "stacked", local(), rounds=9)
    personal = [result.record["trace"]["personal_share"] for result in simulator.run(state)]
    grows = [number for number in range(2, 10) if personal[number - 1] > personal[number - 2]]
    assert personal[0] == 0
    assert grows == [5, 8]  # used in local training from the round after it


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_around_a_selection_equal_a_calculation_by_hand(backend):
    every, epochs = 2, 2
    method = FedSelect(select_every=every)
    simulator, state, w, data = begun(method, backend, local(epochs, momentum=0.9), rounds=6)  # momentum is not used
    weights = ("body.weight", "head.weight")
    masks = [{name: np.zeros_like(value) for name, value in w.items()} for _ in data]
    own, selected = [dict(w) for _ in data], [dict(w) for _ in data]
    for number in range(1, 7):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            model = {name: np.where(masks[row][name] > 0, own[row][name], w[name]) for name in w}
            if number > 2 and (number - 2) % every == 0:
                for name in weights:
                    change = np.abs(own[row][name] - selected[row][name])
                    shared = np.argwhere(masks[row][name] == 0)
                    most = sorted(shared.tolist(), key=lambda place: -change[tuple(place)])
                    for place in most[: len(shared) - round(0.75 * len(shared))]:
                        masks[row][name][tuple(place)] = 1
                selected[row] = own[row]
            for _ in range(epochs):
                for personal in (True, False):
                    slope = slopes(model, x, y)
                    for name in w:
                        moving = masks[row][name] if personal else 1 - masks[row][name]
                        model = {**model, name: model[name] - LR * moving * slope[name]}
            trained.append(model)
        own = trained
        counts = [len(y) for _, y in data]
        for name in w:
            total = sum(n * (1 - mask[name]) for n, mask in zip(counts, masks, strict=True))
            value = sum(n * (1 - mask[name]) * m[name] for n, mask, m in zip(counts, masks, own, strict=True))
            w = {**w, name: np.where(total > 0, value / np.maximum(total, 1), w[name])}
    assert sum(mask[name].sum() for mask in masks for name in weights) > 4
    assert_same(state.params.common, w)
    for row, (x, _) in enumerate(data):
        memory = {name: value[row] for name, value in state.memory.items()}
        assert_same(memory, masks[row], "mask.")
        assert_same(memory, own[row], "own.")
        client = simulator.cohort(state, torch.arange(2)).one(row)
        found = method.predict(simulator.net, client, torch.from_numpy(x))
        assert found.numpy() == pytest.approx(logits(own[row], x), abs=1e-12)


def test_personal_entries_do_not_leave_their_client():
    simulator, state, _, _ = begun(FedSelect(select_every=1), "loop", local(), rounds=3)
    for _ in range(2):
        simulator.run_round(state)
    cohort = simulator.begin(simulator.cohort(state, torch.arange(2)), simulator.moment(3))
    trained = simulator.local_training(cohort, simulator.moment(3))[0].params.own
    from dataclasses import replace

    from fedrema.engine import ClientTensors

    ended, _ = simulator.end(
        replace(cohort, params=ClientTensors(trained), received=cohort.params), simulator.moment(3)
    )
    for name, mask in ended.memory.own.items():
        if name.startswith("mask."):
            assert (ended.params.own[name.removeprefix("mask.")][mask > 0] == 0).all()


def test_invalid_settings_are_refused():
    with pytest.raises(BadInput, match=r"--select-share must be in \[0, 1\], got 2"):
        FedSelect(select_share=2)
