"""Ten random `kill -9` during a federation of 30 rounds: the result is the one of an undisturbed federation."""

import os
import random
import signal
import time

import pytest
from safetensors import safe_open

from tests.network.federation_of_processes import Processes, command_lines

pytestmark = pytest.mark.network
SEED = int(os.environ.get("FEDREMA_KILL_SEED", "20260101"))
KILLS, ROUNDS = 10, 30
VICTIMS = {
    "server": ("deploy server",),
    "SuperLink": ("flower_superlink",),
    "server's app": ("flwr-serverapp",),
    "node": ("deploy client",),
    "SuperNode": ("flower_supernode",),
    "executor": ("flower_executor",),
}
"""Words of the command lines of the processes that are killed; of a node, a random one."""


def test_ten_random_kills_do_not_change_the_result(tmp_path):
    settings = {"nodes": 2, "rounds": ROUNDS, "least_clients": 2, "wait_seconds": 600.0, "round_seconds": 30.0}
    with Processes(tmp_path / "undisturbed", "ditto", **settings) as network:
        network.start_all()
        assert network.finish(900.0) == 0, network.output("server")
    expected = tensors(network), network.records()
    chance = random.Random(SEED)
    # Every kind of process at least once, in random order.
    kinds = [*VICTIMS, *chance.choices(list(VICTIMS), k=KILLS - len(VICTIMS))]
    chance.shuffle(kinds)
    at = sorted(chance.sample(range(1, ROUNDS - 1), KILLS))
    print(f"seed {SEED} (FEDREMA_KILL_SEED):", list(zip(at, kinds, strict=True)))
    with Processes(tmp_path / "disturbed", "ditto", **settings) as network:
        network.start_all()
        for number, kind in zip(at, kinds, strict=True):
            network.wait(lambda number=number: completed(network) >= number, 600.0)
            time.sleep(chance.uniform(0.0, 2.0))  # anywhere in a round
            killed = kill_one(network, kind, chance)
            print(f"after round {completed(network)}: killed {killed}")
        assert network.finish(900.0) == 0, network.output("server")
        records = network.records()
        found = tensors(network)
    assert found.keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert found[name] == value, name  # bit by bit
    kept = ("round", "participants", "loss", "accuracy", "client_accuracy")
    assert [[record[key] for key in kept] for record in records] == [
        [record[key] for key in kept] for record in expected[1]
    ]


def completed(network):
    """Return the number of records, which survives a restart of the server."""
    return len(network.records())


def tensors(network):
    """Return the bytes of all tensors of the server's checkpoint and of the nodes' last states, by name."""
    files = [network.folder / "server" / "run" / "checkpoint" / "state.safetensors"]
    files += [network.node(name) / "kept" / f"round-{ROUNDS:06}.safetensors" for name in network.names]
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                value = opened.get_tensor(name)
                found[f"{file.relative_to(network.folder)}: {name}"] = (
                    value.dtype,
                    value.shape,
                    value.numpy().tobytes(),
                )
    return found


def kill_one(network, kind, chance):
    """kill -9 one process of a kind, and start what nobody else starts again; return its name."""
    words = (*VICTIMS[kind], f":{network.port + 1}" if kind == "server's app" else str(network.folder))
    victims = network.wait(lambda: sorted(pid for pid, line in command_lines() if all(each in line for each in words)))
    pid = chance.choice(victims)
    line = dict(command_lines()).get(pid, "")
    os.kill(pid, signal.SIGKILL)
    if kind == "server":
        network.processes.pop("server").wait()
        network.start("server")
    if kind == "node":
        (name,) = [name for name in network.names if str(network.node(name)) in line]
        network.processes.pop(name).wait()
        network.start(name)
        return name
    return kind
