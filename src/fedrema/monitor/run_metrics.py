"""Metrics of runs: progress, the latest scores, bytes and the spent privacy budget."""

from collections.abc import Sequence
from pathlib import Path

import fedrema
from fedrema.monitor.metrics import Metric
from fedrema.page.live_runs import LiveRuns
from fedrema.page.reading import DownsampledRun
from fedrema.page.status import status_of

STATES = ("running", "finished", "stopped", "silent")


def version_metric() -> Metric:
    """Return the version of fedrema as a metric."""
    return Metric("fedrema_info", "gauge", "Version of fedrema.").add(1, version=fedrema.__version__)


def metrics_of_runs(live: LiveRuns) -> list[Metric]:
    """Return the metrics of the runs in a folder, as of now."""
    live.refresh()
    with live.lock:
        return run_metrics(live.folder, live.runs)


def run_metrics(folder: Path, runs: Sequence[DownsampledRun]) -> list[Metric]:
    """Return the metrics of runs, which are named by their place in a folder."""
    state = Metric("fedrema_run_state", "gauge", "1 for the state in which a run is, 0 for the others.")
    completed = Metric("fedrema_run_rounds_completed", "gauge", "Number of completed rounds.")
    rounds = Metric("fedrema_run_rounds", "gauge", "Number of rounds of the run when it is finished.")
    updated = Metric("fedrema_run_last_round_timestamp_seconds", "gauge", "When the last round was recorded.")
    took = Metric("fedrema_run_last_round_seconds", "gauge", "Duration of the last round.")
    scores = Metric("fedrema_run_metric", "gauge", "Latest value of a metric over the test samples of all clients.")
    failed = Metric("fedrema_run_failed_clients", "gauge", "Clients that failed in the last round.")
    up = Metric("fedrema_run_bytes_up_total", "counter", "Bytes that clients have sent.")
    down = Metric("fedrema_run_bytes_down_total", "counter", "Bytes that clients have received.")
    epsilon = Metric("fedrema_run_epsilon", "gauge", "Privacy budget that was spent, of the client that spent most.")
    for run in runs:
        labels = {
            "run": str(run.path.relative_to(folder)) if run.path.is_relative_to(folder) else run.path.name,
            "method": run.manifest.method,
            "seed": run.settings.get("seed", ""),
        }
        now = status_of(run)
        for name in STATES:
            state.add(now["state"] == name, **labels, state=name)
        completed.add(now["done"], **labels)
        rounds.add(now["rounds"], **labels)
        updated.add(now["updated"] if now["done"] else None, **labels)
        failed.add(now["failed_count"], **labels)
        summary = run.summary
        up.add(summary.bytes_up or None, **labels)  # 0: not known, see DownsampledRun
        down.add(summary.bytes_down or None, **labels)
        epsilon.add(summary.epsilon if summary.delta is not None else None, **labels)
        if run.rounds:
            took.add(sum(run.rounds[-1].seconds.values()), **labels)
        evaluated = next((record for record in reversed(run.rounds) if record.metrics), None)
        for name, metric in (evaluated.metrics if evaluated is not None else {}).items():
            scores.add(metric.value, **labels, metric=name)
    return [version_metric(), state, completed, rounds, updated, took, scores, failed, up, down, epsilon]
