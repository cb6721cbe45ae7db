"""Make the data of the figures in docs/how-fedrema-works.md: `python tools/make_explainer.py`.

Runs FedReMa on the clients of the demonstration with a critical period that never ends: rounds before the end of the
period do not depend on δ, so that this one run shows where the period ends with any δ.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedrema
from fedrema.core.similarity import maximum_difference_segmentation
from fedrema.runs.run import Run

DATA = Path(__file__).parents[1] / "docs" / "figures" / "fedrema-steps.json"
ROUNDS = 40
SCALE = 100_000
"""Similarities are stored as whole numbers of this unit."""


def train(folder: str) -> Run:
    """Run FedReMa on the digits of the demonstration."""
    settings = {"delta": 0.0, "end_at_delta": False, "rounds": ROUNDS, "record": "relations", "threads": 1}
    return fedrema.run("fedrema", **settings, out=f"{folder}/run")


def content(run: Run) -> dict[str, object]:
    """Return what the figures need: the similarities of all pairs of clients in each round, and the groups."""
    pairs = np.triu_indices(len(run.names), 1)
    stored = [
        np.round(relations["S"][pairs] * SCALE).astype(int).tolist() for _, relations in sorted(run.relations().items())
    ]
    data: dict[str, object] = {"scale": SCALE, "clients": len(run.names), "group": group_size(run), "rounds": stored}
    check(run, data)
    return data


def group_size(run: Run) -> int:
    """Return the number of clients that have the same dominant classes."""
    return len(run.names) // int(run.settings["groups"])


def similarities(data: dict[str, object], number: int) -> torch.Tensor:
    """Return the similarities of a round [K, K] as the page computes with them; 1 is the first round."""
    matrix = np.eye(data["clients"])
    pairs = np.triu_indices(data["clients"], 1)
    matrix[pairs] = np.array(data["rounds"][number - 1]) / data["scale"]
    return torch.from_numpy(np.maximum(matrix, matrix.T))


def check(run: Run, data: dict[str, object]) -> None:
    """Check that the stored digits suffice for the same peers and gaps as in the run."""
    for record in run.rounds:
        chosen, gaps = maximum_difference_segmentation(similarities(data, record.round))
        recorded = torch.from_numpy(run.relations()[record.round]["sets"]) > 0
        if not torch.equal(chosen, recorded) or abs(float(gaps.mean()) - record.trace["mean_gap"]) > 2 / SCALE:
            raise SystemExit(f"Round {record.round} cannot be computed from {SCALE} steps of similarity.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        DATA.write_text(json.dumps(content(train(folder)), separators=(",", ":")) + "\n")
