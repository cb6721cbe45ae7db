"""Time per round against the number of clients, with 50 participants: a round must not get slower with absent clients.

python benchmarks/check_overhead.py                          FedAvg and FedReMa, 100, 1,000 and 10,000 clients
python benchmarks/check_overhead.py --methods scaffold       other methods
python benchmarks/check_overhead.py --clients 10000 --profile    where the time goes, by cProfile
python benchmarks/check_overhead.py --late 0.3 --dropout 0.1     with late clients and failures

Every client has 10 generated samples with 8 features and a small network. Rounds are not evaluated, because an
evaluation includes all clients. "choose" is the time to draw the participants, once per round; it is part of "round".
Each number is the fastest of several rounds.
"""

import argparse
import cProfile
import pstats
import time

import numpy as np

from fedrema.core import LocalTraining, Simulation
from fedrema.data import Federation
from fedrema.methods import find_method
from fedrema.models.networks import Network, build_net
from fedrema.simulation.simulator import Simulator

PARTICIPANTS = 50
WARM_UP = 3


def federation_of(clients: int) -> Federation:
    generator = np.random.default_rng(0)
    client = np.repeat(np.arange(clients), 10)
    x = generator.normal(size=(len(client), 8)).astype(np.float32)
    return Federation.from_arrays(x, generator.integers(0, 4, len(client)), client, classes=4, test_share=0.2)


def simulator_of(method: str, clients: int, asked: argparse.Namespace) -> Simulator:
    federation = federation_of(clients)
    settings = Simulation(
        rounds=10**6,
        participation=PARTICIPANTS / clients,
        evaluate_every=10**6,
        record="none",
        device=asked.device,
        late=asked.late,
        late_round=2,
        dropout=asked.dropout,
    )
    net = build_net(Network(net="mlp", hidden=8), federation.sample_shape, federation.classes, seed=0)
    return Simulator(find_method(method)(), net, federation, LocalTraining(epochs=1, batch=10), settings)


def measure(simulator: Simulator, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the fastest round, of its parts, and of drawing participants."""
    state = simulator.start()
    found: dict[str, list[float]] = {}
    for number in range(1, WARM_UP + rounds + 1):
        started = time.perf_counter()
        record = simulator.run_round(state).record
        seconds = {**record.seconds, "round": time.perf_counter() - started}
        started = time.perf_counter()
        simulator.participation.choose(number + 10**5)  # a round that has not been drawn yet
        seconds["choose"] = time.perf_counter() - started
        if number > WARM_UP:
            for part, value in seconds.items():
                found.setdefault(part, []).append(1000 * value)
    return {part: min(values) for part, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedrema"])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    parts = ("round", "train", "aggregate", "other", "choose")
    print("method      clients" + "".join(f"{part:>11}" for part in parts) + "   ms")
    for method in asked.methods:
        for clients in asked.clients:
            simulator = simulator_of(method, clients, asked)
            profiler = cProfile.Profile()
            if asked.profile:
                profiler.enable()
            found = measure(simulator, asked.rounds)
            profiler.disable()
            print(f"{method:10} {clients:8,}" + "".join(f"{found[part]:11.2f}" for part in parts), flush=True)
            if asked.profile:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
