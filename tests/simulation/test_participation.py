"""Participants are drawn with the numbers of each client's own keyed generator, and the cost of absent clients."""

import math

import numpy as np
import pytest

from fedrema.base.random import numpy_generator
from fedrema.core import Simulation
from fedrema.simulation.keyed_draws import KeyedDraws
from fedrema.simulation.participation import Participation, draw_participants

NAMES = (*(f"client {number}" for number in range(60)), "ä", "", "0", "with\x1fseparator", "Z")


@pytest.mark.parametrize("parts", [(0,), (3, 17), (2**40, "round", -5)])
def test_numbers_are_those_of_the_keyed_generators(parts):
    found = KeyedDraws(NAMES, "purpose").uniform(*parts)
    expected = [numpy_generator(*parts, name, "purpose").random(4) for name in NAMES]
    assert np.array_equal(found, expected)


def test_without_names_there_are_no_numbers():
    assert KeyedDraws([], "purpose").uniform(0).shape == (0, 4)


def draws(seed: int, number: int, row: int) -> np.ndarray:
    return numpy_generator(seed, number, NAMES[row], "participation").random(2)


def expected_choice(settings: Simulation, joins: list[int], number: int) -> tuple[list[int], list[int]]:
    """Choose one client after the other, with a generator for each."""
    joined = [row for row in range(len(NAMES)) if joins[row] <= number]
    wanted = max(1, round(settings.participation * len(joined)))
    chosen = sorted(sorted(joined, key=lambda row: (draws(settings.seed, number, row)[0], NAMES[row]))[:wanted])
    failed = [row for row in chosen if draws(settings.seed, number, row)[1] < settings.dropout]
    return [row for row in chosen if row not in failed], failed


@pytest.mark.parametrize(
    "given",
    [
        {"participation": 0.2},
        {"participation": 0.001},
        {"dropout": 0.4},
        {"participation": 0.5, "dropout": 0.3, "late": 0.4, "late_round": 4},
    ],
)
def test_the_participants_are_those_of_one_draw_per_client(given):
    settings = Simulation(seed=5, **given)
    found = Participation(NAMES, settings)
    late = sorted(range(len(NAMES)), key=lambda row: numpy_generator(5, NAMES[row], "late").random())
    late = late[: math.floor(settings.late * len(NAMES))]
    assert found.joins == [settings.late_round if row in late else 1 for row in range(len(NAMES))]
    seen: set[int] = set()
    for number in range(1, 8):
        joined = [row for row, joins in enumerate(found.joins) if joins <= number]
        assert found.joined(number) == joined
        assert found.joined_count(number) == len(joined)
        assert found.waiting_clients(number).tolist() == sorted(set(late) & set(joined) - seen)
        assert found.choose(number) == expected_choice(settings, found.joins, number)
        seen |= set(found.choose(number)[0])
    assert found.choose(1) == expected_choice(settings, found.joins, 1)  # no longer remembered


def test_a_caller_may_change_the_lists():
    found = Participation(NAMES, Simulation(participation=0.2))
    expected = found.choose(1)
    found.choose(1)[0].clear()
    found.joined(1).clear()
    assert found.choose(1) == expected
    assert found.joined(1) == list(range(len(NAMES)))


def test_participants_of_a_deployment():
    names = sorted(NAMES)
    by_draw = sorted(names, key=lambda name: numpy_generator(2, 9, name, "participation").random())
    assert draw_participants(2, 9, names, 0.1) == by_draw[:6]
    assert draw_participants(2, 9, names, 0.1, least=8) == by_draw[:8]
    assert draw_participants(2, 9, names, 0.1, least=1000) == names
    assert draw_participants(2, 9, [], 0.5) == []
