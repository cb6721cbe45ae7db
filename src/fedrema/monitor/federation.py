"""What the operator of a federation sees: the nodes, their failures and traffic, rejected keys and the certificate."""

import dataclasses
import threading
import time
from typing import Any

from fedrema.deploy.audit_follower import AuditFollower, SiteTotals
from fedrema.deploy.folder import ServerFolder
from fedrema.deploy.status import FederationStatus, NodeStatus, read_status
from fedrema.errors import FedremaError
from fedrema.monitor.metrics import Metric
from fedrema.monitor.run_metrics import version_metric
from fedrema.tasks import find_metric

SECONDS_BETWEEN_READS = 1.5
"""The SuperLink is asked at most this often, however many browsers are open."""
STATES = ("online", "offline")


class FederationMonitor:
    """Reads the status of a federation at most every `SECONDS_BETWEEN_READS`; safe to use from several threads."""

    def __init__(self, folder: ServerFolder) -> None:
        self.folder, self.audit = folder, AuditFollower(folder.path)
        self.lock = threading.Lock()
        self.status: FederationStatus | None = None
        self.error = ""
        """Why the status cannot be read; empty if it can."""
        self.read_at = -SECONDS_BETWEEN_READS

    def refresh(self) -> None:
        """Read the status and the audit log, unless that was done a moment ago."""
        if time.monotonic() - self.read_at < SECONDS_BETWEEN_READS:
            return
        try:
            self.status, self.error = read_status(ServerFolder.open(self.folder.path)), ""
        except (FedremaError, OSError) as error:
            # Without the path of the folder: other users may see the page.
            self.error = str(error).replace(f"{self.folder.path}/", "")
        self.audit.refresh()
        self.read_at = time.monotonic()

    def view(self) -> dict[str, Any]:
        """Return what the page shows, as JSON values."""
        with self.lock:
            self.refresh()
            status = self.status
            found: dict[str, Any] = {
                "error": self.error,
                "audit": {"lines": self.audit.end.line, "problem": self.audit.problem},
            }
            if status is None:
                return found
            metric = find_metric(status.metric or "accuracy")
            totals = {member.name: self.audit.sites.get(member.name, SiteTotals()) for member in status.members}
            return found | {
                "state": status.state,
                "method": status.method,
                "round": status.round,
                "rounds": status.rounds,
                "value": status.value,
                "metric": {"name": metric.name, "title": metric.title, "percent": metric.percent},
                "last_round_time": status.last_round_time,
                "certificate_days": status.certificate_days,
                "nodes": [_node(member, totals[member.name]) for member in status.members],
                "rejected_keys": [dataclasses.asdict(key) for key in status.rejected_keys],
            }

    def metrics(self) -> list[Metric]:
        """Return the metrics of the federation and of its nodes."""
        with self.lock:
            self.refresh()
            readable = Metric("fedrema_federation_readable", "gauge", "Whether the status could be read.")
            audit = Metric("fedrema_audit_log_intact", "gauge", "Whether the audit log is complete and unchanged.")
            lines = Metric("fedrema_audit_log_lines", "gauge", "Number of lines of the audit log.")
            found = [version_metric(), readable.add(not self.error), audit.add(not self.audit.problem)]
            found.append(lines.add(self.audit.end.line))
            if self.status is not None and not self.error:
                found += _federation_metrics(self.status) + _node_metrics(self.status, self.audit.sites)
            return found


def last_seen(member: NodeStatus, totals: SiteTotals) -> float | None:
    """Return when something was last heard from a node, in seconds since 1970."""
    return max((each for each in (member.last_seen, totals.last_message) if each is not None), default=None)


def _node(member: NodeStatus, totals: SiteTotals) -> dict[str, Any]:
    return {
        **dataclasses.asdict(member),
        "last_seen": last_seen(member, totals),
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "failed": totals.failed,
        "clipped": totals.clipped,
        "failures": [{"time": at, "round": number, "reason": why} for at, number, why in totals.failures],
    }


def _federation_metrics(status: FederationStatus) -> list[Metric]:
    completed = Metric("fedrema_federation_rounds_completed", "gauge", "Last completed round.")
    rounds = Metric("fedrema_federation_rounds", "gauge", "Number of rounds of the federation.")
    running = Metric("fedrema_federation_running", "gauge", "Whether the server executes rounds.")
    score = Metric("fedrema_federation_metric", "gauge", "Latest value of the primary metric over all nodes.")
    latest = Metric("fedrema_federation_last_round_timestamp_seconds", "gauge", "When the last round was completed.")
    nodes = Metric("fedrema_federation_nodes", "gauge", "Number of nodes with a registered key or past rounds.")
    online = Metric("fedrema_federation_nodes_online", "gauge", "Number of nodes that are connected.")
    keys = Metric("fedrema_federation_rejected_keys", "gauge", "Number of keys that could not connect recently.")
    expiry = Metric(
        "fedrema_certificate_expiry_seconds", "gauge", "Seconds until the server's certificate expires; below 0: since."
    )
    return [
        completed.add(status.round),
        rounds.add(status.rounds),
        running.add(status.state.startswith("running")),
        score.add(status.value, metric=status.metric),
        latest.add(status.last_round_time),
        nodes.add(len(status.members)),
        online.add(sum(member.state == "online" for member in status.members)),
        keys.add(len(status.rejected_keys)),
        expiry.add(status.certificate_expires - time.time()),
    ]


def _node_metrics(status: FederationStatus, sites: dict[str, SiteTotals]) -> list[Metric]:
    online = Metric("fedrema_node_online", "gauge", "Whether a node is connected.")
    seen = Metric("fedrema_node_last_seen_timestamp_seconds", "gauge", "When something was last heard from a node.")
    used = Metric("fedrema_node_rounds_total", "counter", "Rounds in which the reply of a node was used.")
    last = Metric("fedrema_node_last_round", "gauge", "Last round in which the reply of a node was used.")
    failed = Metric("fedrema_node_failed_replies_total", "counter", "Replies that were rejected or missing.")
    clipped = Metric("fedrema_node_clipped_replies_total", "counter", "Replies that were clipped.")
    up = Metric("fedrema_node_bytes_up_total", "counter", "Bytes that a node has sent.")
    down = Metric("fedrema_node_bytes_down_total", "counter", "Bytes that were sent to a node.")
    score = Metric("fedrema_node_metric", "gauge", "Latest value of the primary metric on a node.")
    epsilon = Metric("fedrema_node_epsilon", "gauge", "Privacy budget that a node has spent.")
    for member in status.members:
        name, totals = member.name, sites.get(member.name, SiteTotals())
        online.add(member.state == "online" if member.state != "unknown" else None, node=name)
        seen.add(last_seen(member, totals), node=name)
        used.add(member.rounds_used, node=name)
        last.add(member.last_round or None, node=name)
        failed.add(totals.failed, node=name)
        clipped.add(totals.clipped, node=name)
        up.add(totals.bytes_up, node=name)
        down.add(totals.bytes_down, node=name)
        score.add(member.value, node=name, metric=status.metric)
        epsilon.add(member.epsilon, node=name)
    return [online, seen, used, last, failed, clipped, up, down, score, epsilon]
