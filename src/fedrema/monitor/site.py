"""What the owner of a node sees: the node's own results, traffic and audit log; nothing about other nodes."""

import dataclasses
import threading
import time
from typing import Any

from fedrema.deploy.audit import Event, Line, described
from fedrema.deploy.audit_follower import AuditFollower, SiteTotals, seconds_of
from fedrema.deploy.connection import Cause, classify
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node_results import NodeResult, read_results
from fedrema.deploy.privacy import PrivacyGuard
from fedrema.errors import FedremaError
from fedrema.monitor.metrics import Metric
from fedrema.monitor.run_metrics import version_metric
from fedrema.tasks import find_metric

SECONDS_BETWEEN_READS = 1.0
SHOWN_LINES = 200
"""How many lines of the audit log the page shows."""
SHOWN_ROUNDS = 500
LARGEST_TAIL = 100_000
"""Bytes of the SuperNode's log that are read."""


class SiteMonitor:
    """Reads a node's folder at most every `SECONDS_BETWEEN_READS`; safe to use from several threads."""

    def __init__(self, folder: NodeFolder) -> None:
        self.folder, self.audit = folder, AuditFollower(folder.path, SHOWN_LINES)
        self.lock = threading.Lock()
        self.results: list[NodeResult] = []
        self.spent: tuple[int, float | None] = (0, None)
        """When the privacy account was last changed, and the ε that follows from it."""
        self.read_at = -SECONDS_BETWEEN_READS

    def refresh(self) -> None:
        """Read the results and the audit log, unless that was done a moment ago."""
        if time.monotonic() - self.read_at < SECONDS_BETWEEN_READS:
            return
        self.results = read_results(self.folder.path)
        self.audit.refresh()
        account = self.folder.kept / "privacy.json"
        changed = account.stat().st_mtime_ns if account.is_file() else 0
        if self.folder.privacy.privacy_clip and changed != self.spent[0]:
            self.spent = changed, self._epsilon()
        self.read_at = time.monotonic()

    def view(self) -> dict[str, Any]:
        """Return what the page shows, as JSON values."""
        with self.lock:
            self.refresh()
            totals = self._totals()
            metric = find_metric(next((each.metric for each in reversed(self.results) if each.metric), "accuracy"))
            return {
                "name": self.folder.name,
                "server": self.folder.config.server,
                "connection": self._connection(),
                "metric": {"name": metric.name, "title": metric.title, "percent": metric.percent},
                "results": [dataclasses.asdict(each) for each in self.results[-SHOWN_ROUNDS:]],
                "rounds": len(self.results),
                "bytes_up": totals.bytes_up,
                "bytes_down": totals.bytes_down,
                "refused": totals.failed,
                "failures": [{"time": at, "round": number, "reason": why} for at, number, why in totals.failures],
                "last_reply": totals.last_message,
                "noise": bool(self.folder.privacy.privacy_clip),
                "epsilon": self.spent[1],
                "budget": self.folder.privacy.privacy_budget or None,
                "audit": {
                    "lines": self.audit.end.line,
                    "problem": self.audit.problem,
                    "latest": [described(line) for line in reversed(self.audit.latest)],
                },
            }

    def metrics(self) -> list[Metric]:
        """Return the metrics of this node."""
        with self.lock:
            self.refresh()
            name, totals = self.folder.name, self._totals()
            last = self.results[-1] if self.results else None
            rounds = Metric("fedrema_site_rounds", "gauge", "Number of rounds for which there are results.")
            latest = Metric("fedrema_site_last_round", "gauge", "The last round for which there are results.")
            score = Metric("fedrema_site_metric", "gauge", "Latest value of a metric of the received model.")
            loss = Metric("fedrema_site_loss", "gauge", "Training loss of the last round.")
            reply = Metric("fedrema_site_last_reply_timestamp_seconds", "gauge", "When the last reply was sent.")
            refused = Metric("fedrema_site_refused_requests_total", "counter", "Requests that this node refused.")
            up = Metric("fedrema_site_bytes_up_total", "counter", "Bytes that this node has sent.")
            down = Metric("fedrema_site_bytes_down_total", "counter", "Bytes that this node has received.")
            epsilon = Metric("fedrema_site_epsilon", "gauge", "Privacy budget that this node has spent.")
            audit = Metric("fedrema_audit_log_intact", "gauge", "Whether the audit log is complete and unchanged.")
            lines = Metric("fedrema_audit_log_lines", "gauge", "Number of lines of the audit log.")
            for metric, value in (last.metrics if last is not None else {}).items():
                score.add(value, node=name, metric=metric)
            return [
                version_metric(),
                rounds.add(len(self.results), node=name),
                latest.add(last.round if last is not None else None, node=name),
                score,
                loss.add(last.loss if last is not None else None, node=name),
                reply.add(totals.last_message, node=name),
                refused.add(totals.failed, node=name),
                up.add(totals.bytes_up, node=name),
                down.add(totals.bytes_down, node=name),
                epsilon.add(self.spent[1], node=name),
                audit.add(not self.audit.problem),
                lines.add(self.audit.end.line),
            ]

    def _totals(self) -> SiteTotals:
        return self.audit.sites.get(self.folder.name, SiteTotals())

    def _epsilon(self) -> float | None:
        try:
            return PrivacyGuard(self.folder.privacy, self.folder.kept / "privacy.json").epsilon()
        except FedremaError:  # the account is damaged, or Opacus is not installed
            return None

    def _connection(self) -> dict[str, Any]:
        """Return whether the node was started, and whether its last process has connected."""
        events = (Event.STARTED, Event.STOPPED)
        last: Line | None = next((line for line in reversed(self.audit.latest) if line.entry.what in events), None)
        if last is not None and last.entry.what is Event.STOPPED:
            return {"state": "stopped", "since": seconds_of(last.time), "problem": last.entry.decision}
        found = classify(self._supernode_log())
        if found.cause is Cause.CONNECTED:
            return {"state": "connected", "since": None, "problem": ""}
        started = found.cause is not Cause.STARTING or last is not None
        return {"state": "not connected" if started else "not started", "since": None, "problem": str(found)}

    def _supernode_log(self) -> list[str]:
        try:
            with (self.folder.state / "supernode.log").open("rb") as stream:
                stream.seek(max(0, stream.seek(0, 2) - LARGEST_TAIL))
                return stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
