"""Peak memory with many clients: python benchmarks/check_scale.py. Fails where a federation needs more than 8 GB.

Each federation runs in its own process, on generated data, with --memory 8.
"""

import json
import resource
import subprocess
import sys
import time

import numpy as np

LIMIT = 8.0
SCENARIOS = [
    # method, network, clients, samples each, shape of a sample, hidden units
    ("fedavg", "cnn", 1000, 60, (1, 28, 28)),
    ("fedrema", "cnn", 1000, 60, (1, 28, 28)),
    ("moon", "cnn", 1000, 60, (1, 28, 28)),
    ("fedper", "cnn", 1000, 60, (1, 28, 28)),
    ("fedavg", "mlp", 10_000, 60, (64,)),
    ("fedrema", "mlp", 10_000, 60, (64,)),
]


def measure(method: str, network: str, clients: int, samples: int, shape: tuple[int, ...]) -> dict[str, object]:
    """Run two rounds of one epoch; return seconds per round and peak gigabytes."""
    import fedrema

    generator = np.random.default_rng(0)
    client = np.repeat(np.arange(clients), samples)
    y = (client % 5 * 2 + generator.integers(0, 2, len(client))) % 10  # five groups of clients, two classes each
    x = generator.integers(0, 256, (len(client), *shape), dtype=np.uint8)
    federation = fedrema.Federation.from_arrays(x, y, client, classes=10, test_share=0.2)
    ends = [time.perf_counter()]
    fedrema.run(
        method,
        federation=federation,
        net=network,
        out="runs/scale",
        on_round=lambda _: ends.append(time.perf_counter()),
        rounds=2,
        epochs=1,
        batch=100,
        memory=LIMIT,
        overwrite=True,
        quiet=True,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 10**6 * 1.024
    return {
        "seconds": round(ends[-1] - ends[-2], 1),
        "gigabytes": round(peak, 2),
        "version": fedrema.__version__,
    }


def main(arguments: list[str]) -> int:
    """Print a line per scenario; --quick shrinks them, to check that the script runs."""
    if arguments and arguments[0] == "one":
        print(json.dumps(measure(*json.loads(arguments[1]))))
        return 0
    worst = 0.0
    for method, network, clients, samples, shape in SCENARIOS:
        clients = 40 if "--quick" in arguments else clients
        asked = json.dumps([method, network, clients, samples, shape])
        ended = subprocess.run([sys.executable, __file__, "one", asked], check=True, capture_output=True, text=True)
        found = json.loads(ended.stdout.splitlines()[-1])
        worst = max(worst, found["gigabytes"])
        what = f"{method:8} {network:4} {clients:6,} clients"
        print(f"{what}: {found['seconds']:7.1f} s a round, {found['gigabytes']:.2f} GB", flush=True)
    print(f"largest: {worst:.2f} GB of {LIMIT:g}")
    return 1 if worst > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
