"""How well every client is served: accuracies, their worst tenth, and the honest figure that does not peek."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def tally(predicted: Tensor, truth: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Count right answers and questions: [k, 2] each, for the two halves of every client's test samples.

    `predicted` [k, n] is -1 where there is no sample. Test samples lie in random order, so every second one makes
    a fair half.
    """
    real = predicted >= 0
    right = (predicted == truth) & real
    counts = [every[:, start::2].sum(1) for every in (right, real) for start in (0, 1)]
    found = torch.stack(counts, dim=1).cpu().numpy()  # all at once: on a GPU every look is waited for
    return found[:, :2], found[:, 2:]


def together(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Put the counts of several groups of clients into one."""
    correct, asked = zip(*parts, strict=True)
    return np.concatenate(correct), np.concatenate(asked)


def share(correct: Any, asked: Any) -> float | None:
    """Return an accuracy; None where nothing was asked."""
    return float(correct / asked) if asked else None


def accuracy_record(correct: np.ndarray, asked: np.ndarray, clients: list[int], everyone: int) -> dict[str, Any]:
    """Return a round's accuracies: over all samples, per client (None: absent or without test samples), worst tenth."""
    per_client: list[float | None] = [None] * everyone
    for row, right, total in zip(clients, correct.sum(axis=1), asked.sum(axis=1), strict=True):
        per_client[row] = share(right, total)
    scored = sorted(value for value in per_client if value is not None)
    worst = scored[: math.ceil(len(scored) / 10)]
    return {
        "accuracy": share(correct.sum(), asked.sum()),
        "half_accuracy": [share(correct[:, half].sum(), asked[:, half].sum()) for half in (0, 1)],
        "worst_tenth": float(np.mean(worst)) if worst else None,
        "client_accuracy": per_client,
    }


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Boil the records of a run down to its headline numbers.

    best_accuracy peeks: its round is chosen by the very samples that score it, as papers do. honest_accuracy chooses
    the round on one half of each client's test samples, scores it on the other half, swaps, and averages.
    final_accuracy is the mean of the last five scored rounds.
    """
    scored = [record for record in rounds if record.get("accuracy") is not None]
    seconds = (
        {part: sum(record["seconds"][part] for record in rounds) for part in rounds[0]["seconds"]} if rounds else {}
    )
    summary: dict[str, Any] = {"rounds": len(rounds)}
    if scored:
        best = max(scored, key=lambda record: record["accuracy"])
        last = scored[-5:]
        summary |= {
            "best_accuracy": best["accuracy"],
            "best_round": best["round"],
            "final_accuracy": float(np.mean([record["accuracy"] for record in last])),
            "honest_accuracy": _honest(scored),
            "worst_tenth": float(np.mean([record["worst_tenth"] for record in last])),
        }
        trained = [record["trained_accuracy"] for record in last if record.get("trained_accuracy") is not None]
        if trained:
            summary["final_trained_accuracy"] = float(np.mean(trained))
        beside = {name for record in scored for name in record.get("beside", {})}
        for name in sorted(beside):
            values = [record["beside"][name] for record in scored]
            summary |= {f"best_{name}_accuracy": max(values), f"final_{name}_accuracy": float(np.mean(values[-5:]))}
    traces = [record["trace"] for record in rounds if "critical" in record.get("trace", {})]
    if traces:
        summary["critical_rounds"] = sum(bool(trace["critical"]) for trace in traces)
    return {
        **summary,
        "seconds": seconds,
        "bytes_up": sum(record.get("bytes_up", 0) for record in rounds),
        "bytes_down": sum(record.get("bytes_down", 0) for record in rounds),
    }


def _honest(scored: Sequence[dict[str, Any]]) -> float | None:
    halves = [record["half_accuracy"] for record in scored if None not in record["half_accuracy"]]
    if not halves:
        return None
    chosen = [max(halves, key=lambda pair: pair[choosing])[1 - choosing] for choosing in (0, 1)]
    return float(np.mean(chosen))
