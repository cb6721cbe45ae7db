"""Augmentation of images: each kind by hand, and the same images in both backends."""

import numpy as np
import pytest
import torch

from fedrema.cli.arguments import parse_settings
from fedrema.core import Batch, LocalTraining
from fedrema.core.options import AUGMENTATIONS as NAMES
from fedrema.data import Federation
from fedrema.engine.augmentation import AUGMENTATIONS, augmented, crop, cutout, flip, noise
from fedrema.errors import BadInput
from fedrema.experiments.store import key_of
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.per_fedavg import PerFedAvg
from tests.fixtures import make_federation, make_simulator, network, run_all, snapshot

IMAGES = torch.arange(3 * 2 * 4 * 4, dtype=torch.float64).reshape(3, 2, 4, 4) + 1


def draws(*numbers):
    """Return a function that yields given numbers instead of random ones, and checks their bounds."""
    waiting = list(numbers)

    def draw(count, below):
        drawn = torch.tensor(waiting.pop(0))
        assert len(drawn) == count
        assert 0 <= int(drawn.min()) <= int(drawn.max()) < below
        return drawn

    return draw


def image_federation(counts=(13, 5, 18)) -> Federation:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, sum(counts))
    x = generator.normal(size=(sum(counts), 2, 6, 6)) + y[:, None, None, None]
    return Federation.from_arrays(x.astype(np.float32), y, np.repeat(np.arange(len(counts)), counts), classes=3)


def test_every_name_is_valid_and_implemented():
    assert set(NAMES) == set(AUGMENTATIONS)


def test_flip_mirrors_the_chosen_images():
    flipped = flip(IMAGES, draws([1, 0, 1]))
    assert torch.equal(flipped, torch.stack([IMAGES[0].flip(-1), IMAGES[1], IMAGES[2].flip(-1)]))


def test_crop_shifts_by_up_to_an_eighth_and_zeros_move_in():
    # ⌈4 / 8⌉ = 1: the numbers 0, 1 and 2 are shifts by −1, 0 and 1.
    shifted = crop(IMAGES, draws([0, 1, 2], [1, 2, 1]))
    assert torch.equal(shifted[0, :, 1:], IMAGES[0, :, :-1])
    assert not shifted[0, :, 0].any()
    assert torch.equal(shifted[1, :, :, :-1], IMAGES[1, :, :, 1:])
    assert not shifted[1, :, :, -1].any()
    assert torch.equal(shifted[2, :, :-1], IMAGES[2, :, 1:])
    assert not shifted[2, :, -1].any()


def test_cutout_covers_a_square_of_half_the_height_that_may_leave_the_image():
    # The side is 2: the square begins one pixel before the drawn one.
    cut = cutout(IMAGES, draws([1, 0, 3], [2, 3, 0]))
    covered = [[tuple(place) for place in (image[0] == 0).nonzero().tolist()] for image in cut]
    assert covered == [[(0, 1), (0, 2), (1, 1), (1, 2)], [(0, 2), (0, 3)], [(2, 0), (3, 0)]]
    assert torch.equal(cut[cut != 0], IMAGES[cut != 0])


def test_noise_is_gaussian():
    count = 2 * 100 * 100 * 4
    x = torch.zeros(4, 2, 100, 100, dtype=torch.float64)
    batch = augmented(Batch(x, torch.zeros(4), torch.ones(4), torch.arange(4), torch.tensor(5)), ("noise",))
    assert float(batch.x.mean()) == pytest.approx(0, abs=5 * 0.1 / count**0.5)
    assert float(batch.x.std()) == pytest.approx(0.1, rel=5 / count**0.5)
    assert float((batch.x.abs() < 0.1).double().mean()) == pytest.approx(0.6827, abs=0.01)
    # By hand: u₁ = 2⁻¹ and u₂ = 0 give √(2 ln 2).
    one = noise(torch.zeros(1, 1, 1, 1, dtype=torch.float64), draws([2**23 - 1], [0]))
    assert float(one) == pytest.approx(0.1 * (2 * np.log(2)) ** 0.5, rel=1e-6)


def test_half_of_the_images_are_flipped_and_each_step_changes_others():
    x = torch.arange(2.0).expand(10_000, 1, 1, 2)
    empty = torch.zeros(len(x))
    first, second = (
        augmented(Batch(x, empty, empty, empty, torch.tensor(key)), ("flip",)).x[:, 0, 0, 0] for key in (1, 2)
    )
    for flipped in (first, second, (first == second).double()):
        assert float(flipped.double().mean()) == pytest.approx(0.5, abs=0.025)


def test_without_a_key_nothing_changes():
    batch = Batch(IMAGES, torch.zeros(3), torch.ones(3), torch.arange(3))
    assert augmented(batch, ("flip", "noise")) is batch


@pytest.mark.parametrize("method", [FedAvg, PerFedAvg])
def test_both_backends_train_on_the_same_images(method):
    federation = image_federation()
    local = LocalTraining(epochs=2, batch=4, lr=0.05, drop_incomplete=False, augment="flip,crop,cutout,noise")
    states = [
        run_all(make_simulator(method(), federation, local, network(federation), backend=backend))[0]
        for backend in ("loop", "stacked")
    ]
    looped, stacked = map(snapshot, states)
    assert max(float((looped[name] - stacked[name]).abs().max()) for name in looped) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_each_augmentation_changes_the_result(name):
    federation = image_federation()
    losses = []
    for augment in ("", name):
        local = LocalTraining(epochs=1, batch=4, lr=0.05, augment=augment)
        losses.append(run_all(make_simulator(FedAvg(), federation, local, network(federation)))[1][-1].loss)
    assert losses[0] != losses[1]


def test_an_unknown_augmentation_is_rejected_by_name():
    with pytest.raises(BadInput, match="--augment 'turn' is unknown; valid are flip, crop, cutout, noise"):
        LocalTraining(augment="flip,turn")


def test_samples_that_are_not_images_are_rejected():
    with pytest.raises(BadInput, match=r"--augment flip needs images .*, but a sample has the shape \(6,\)"):
        make_simulator(FedAvg(), make_federation(), LocalTraining(augment="flip"))


def test_keys_of_results_without_augmentation_are_those_from_before_it_existed():
    plain = parse_settings("fedavg", ["--rounds", "2"])
    assert key_of(plain) == "0e5940cf6703e05c"  # computed without the setting
    assert key_of(plain) != key_of(parse_settings("fedavg", ["--rounds", "2", "--augment", "flip"]))
