"""Functions that take turns: one runs at a time, and each passes its turn on where it waits."""

import threading
from functools import partial

import torch

from fedrema.engine.turns import Turns, run_in_turns, wait

CPU = torch.device("cpu")


def test_functions_run_one_at_a_time_and_in_turn():
    running, most, order = set(), [], []

    def job(number):
        for step in range(4):
            running.add(number)
            most.append(len(running))
            order.append((step, number))
            running.remove(number)
            wait(CPU)
        return 10 * number

    assert run_in_turns([partial(job, number) for number in range(3)], CPU) == [0, 10, 20]
    assert set(most) == {1}
    assert len(order) == 12
    for step in range(1, 4):  # after the first step, all wait in the order in which they began
        assert [number for at, number in order if at == step] == [number for at, number in order if at == 0]


def test_an_error_of_one_function_is_returned_and_the_others_continue():
    def job(number):
        wait(CPU)
        if number == 1:
            raise ValueError("broken on purpose")
        wait(CPU)
        return number

    first, error, last = run_in_turns([partial(job, number) for number in range(3)], CPU)
    assert (first, last) == (0, 2)
    assert isinstance(error, ValueError)


def test_without_turns_nothing_waits():
    wait(CPU)
    assert run_in_turns([lambda: wait(CPU)], CPU) == [None]


def test_the_thread_that_has_waited_longest_is_next():
    turns, order, threads = Turns(), [], []

    def enter(number):
        with turns:
            order.append(number)

    with turns:
        for number in range(5):
            threads.append(threading.Thread(target=enter, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:
                pass
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]
    with turns:  # free again
        pass
