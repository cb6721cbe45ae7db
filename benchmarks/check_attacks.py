"""How attackers affect honest clients, and whether FedReMa's matching chooses them as peers (CPU, 15 minutes).

python benchmarks/check_attacks.py                     # prints the tables of docs/attacks.md
python benchmarks/check_attacks.py --figure docs/figures/attacks.png

Each seed has its own attackers. Without an attack (`none`), the same clients are left out of the scores, and the same
share is computed, so that columns are comparable. The share of attackers among the peers of honest clients is the
weight that an honest client's new head gives to the heads of attackers, relative to the weight of all other clients'
heads, averaged over honest clients and rounds. Clients that choose no peers are left out.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import fedrema
from fedrema.core import Simulation
from fedrema.reporting.tables import final_of_clients, markdown_lines
from fedrema.runs.run import Run
from fedrema.simulation.attacks import Attackers

METHODS = ("fedavg", "fedrema", "fedpac")
ATTACKS = ("none", "label-flip", "scale", "noise", "counts", "free-ride")
DEFENCES = ("none", "median", "trimmed-mean", "krum", "norm-bound")
SHARE = 0.2
"""Of 20 clients, 4 are attackers."""


@dataclass(frozen=True)
class Result:
    """What one run showed."""

    accuracy: float
    """Final accuracy of the honest clients."""
    peers: float | None
    """Share of attackers among the peers of honest clients; None for methods without peers."""


def result_of(run: Run) -> Result:
    """Return accuracy and share of attackers of a run."""
    drawn = Simulation(attack="noise", attackers=SHARE, seed=run.settings["seed"])  # the same for every attack
    attackers = Attackers.drawn(run.names, drawn).rows.tolist()
    assert run.summary.attackers in ([], attackers)
    honest = [row for row in range(len(run.names)) if row not in attackers]
    clients = final_of_clients(run)  # all clients have the same number of test samples
    return Result(float(np.mean([clients[row] for row in honest])), attackers_among_peers(run, attackers, honest))


def attackers_among_peers(run: Run, attackers: list[int], honest: list[int]) -> float | None:
    """Return the mean over rounds and honest clients of the weight of attackers' heads among those of peers."""
    shares: list[float] = []
    for matrices in run.relations().values():
        weights = mixing_weights(matrices)
        if weights is None:
            return None
        np.fill_diagonal(weights, 0.0)
        peers = weights[honest]
        totals = peers.sum(axis=1)
        shares += (peers[:, attackers].sum(axis=1)[totals > 0] / totals[totals > 0]).tolist()
    return float(np.mean(shares)) if shares else None


def mixing_weights(matrices: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return with which weights heads were mixed in a round; None for methods that do not mix them.

    FedReMa uses the chosen sets in its critical period, and the dependency map afterwards.
    """
    for name in ("weights", "sets", "G"):
        if name in matrices and not np.isnan(matrices[name]).all():
            return np.nan_to_num(matrices[name]).astype(float)
    return None


def run_all(cells: Sequence[tuple[str, str, str]], seeds: int, rounds: int) -> dict[tuple[str, str, str], list[Result]]:
    """Run methods × attacks × defences; returns their results by seed."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for (method, attack, defence), seed in itertools.product(cells, range(seeds)):
            attacked = {"attackers": SHARE} if attack != "none" else {}
            run = fedrema.run(
                method,
                dataset="digits",
                rounds=rounds,
                seed=seed,
                attack=attack,
                defence=defence,
                record="relations",
                quiet=True,
                out=Path(folder) / f"{method}-{attack}-{defence}-{seed}",
                **attacked,
            )
            result = result_of(run)
            found.setdefault((method, attack, defence), []).append(result)
            print(f"# {method} {attack} {defence} seed {seed}: {result}", flush=True)
    return found


def accuracy_text(results: Sequence[Result]) -> str:
    """Return the mean accuracy in percent, with the standard deviation over seeds."""
    values = [100 * each.accuracy for each in results]
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else "")


def peers_text(results: Sequence[Result]) -> str:
    """Return the mean share of attackers among peers in percent, with the standard deviation over seeds."""
    values = [100 * each.peers for each in results if each.peers is not None]
    if not values:
        return "–"
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else "")


def accuracy_table(found: dict[tuple[str, str, str], list[Result]]) -> str:
    """Return the accuracies of honest clients: a row per method and defence, a column per attack."""
    rows = []
    for method, defence in itertools.product(METHODS, DEFENCES):
        cells = [found.get((method, attack, defence), []) for attack in ATTACKS]
        if any(cells):
            rows.append([method, defence, *(accuracy_text(each) if each else "–" for each in cells)])
    return "\n".join(markdown_lines(["method", "defence", *ATTACKS], rows, texts=2))


def peers_table(found: dict[tuple[str, str, str], list[Result]]) -> str:
    """Return the share of attackers among the peers of honest clients, without a defence."""
    rows = [
        [method, *(peers_text(found.get((method, attack, "none"), [])) for attack in ATTACKS)] for method in METHODS[1:]
    ]
    return "\n".join(markdown_lines(["method", *ATTACKS], rows))


def draw(found: dict[tuple[str, str, str], list[Result]], file: Path) -> None:
    """Draw the accuracies without a defence, by attack and method."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    width = 0.8 / len(METHODS)
    for place, method in enumerate(METHODS):
        means = [100 * np.mean([each.accuracy for each in found[method, attack, "none"]]) for attack in ATTACKS]
        axes.bar(np.arange(len(ATTACKS)) + place * width, means, width, label=method)
    axes.set_xticks(np.arange(len(ATTACKS)) + width, ATTACKS)
    axes.set_ylabel("accuracy of honest clients (%)")
    figure.legend(ncols=len(METHODS), loc="outside upper center")
    figure.savefig(file, dpi=120)


def main(arguments: argparse.Namespace) -> None:
    """Run everything and print the tables."""
    cells = [
        (method, attack, defence)
        for method, attack, defence in itertools.product(METHODS, ATTACKS, DEFENCES)
        if not arguments.quick or (attack in ("scale", "none") and defence in ("none", "median"))
    ]
    found = run_all(cells, 1 if arguments.quick else arguments.seeds, 2 if arguments.quick else arguments.rounds)
    print(accuracy_table(found))
    print()
    print(peers_table(found))
    if arguments.figure and not arguments.quick:
        draw(found, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    parser.add_argument("--seeds", type=int, default=5, help="training seeds 0, 1, …")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each run")
    parser.add_argument("--figure", type=Path, help="draw the accuracies without a defence to this file")
    main(parser.parse_args())
