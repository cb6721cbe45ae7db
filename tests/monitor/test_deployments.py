"""The pages of an operator and of a site, and their metrics, from the folders of a real federation."""

import json
import shutil

import pytest

pytest.importorskip("flwr")

from prometheus_client import parser

from fedrema.deploy.audit import AuditLog, Entry, Event
from fedrema.deploy.audit_follower import AuditFollower
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.node_results import FILE, read_results
from fedrema.errors import BadInput
from fedrema.monitor import watch
from fedrema.monitor.federation import FederationMonitor
from fedrema.monitor.metrics import Metric, exposition
from fedrema.monitor.run_metrics import metrics_of_runs
from fedrema.monitor.site import SiteMonitor
from fedrema.monitor.watch import Protection, monitor_app
from fedrema.page.live_runs import LiveRuns
from fedrema.runs.run import Run
from tests.deploy.test_more_rounds import NAMES, Control, created
from tests.monitor.test_access import Browser
from tests.reporting.folders import write_run

NASTY = '"}\n# <script>alert(1)</script>\\ \u2028'


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = created(tmp_path_factory.mktemp("trained") / "f", "--rounds", "2")
    Control(place).start(place.app, {"folder": str(place.run)})
    return place


@pytest.fixture
def place(trained, tmp_path):
    shutil.copytree(trained.path.parent, tmp_path / "f")
    return ServerFolder.open(tmp_path / "f")


def parsed(metrics):
    """Return the samples of metrics as Prometheus' own parser reads them."""
    text = exposition(metrics)
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {(each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples}


def test_the_operator_sees_nodes_failures_traffic_and_the_certificate(place):
    reason = f"round 2 failed: {NASTY}"
    AuditLog(place.path, "server").append(Entry(Event.REPLY_REJECTED, "south", round=2, decision=reason))
    (place.keys / "east.pub").write_bytes((place.keys / "north.pub").read_bytes())
    view = FederationMonitor(place).view()
    assert (view["state"], view["round"], view["rounds"], view["error"]) == ("finished", 2, 2, "")
    assert view["audit"]["problem"] == ""
    north, south, _, east = view["nodes"]
    assert (north["name"], north["last_round"], north["rounds_used"], north["failed"]) == ("north", 2, 2, 0)
    assert north["bytes_up"] > 1000
    assert north["bytes_down"] > 1000
    assert north["last_seen"] == pytest.approx(place.run.stat().st_mtime, abs=3600)
    assert (south["failed"], south["failures"][0]["round"]) == (1, 2)
    assert "\n" not in south["failures"][0]["reason"]
    assert (east["name"], east["rounds_used"], east["last_seen"]) == ("east", 0, None)
    assert json.dumps(view)
    (place.path / "server.crt").write_text("nonsense")
    broken = FederationMonitor(place).view()
    assert broken["error"].startswith("server.crt holds no certificate")
    assert str(place.path) not in json.dumps(broken)


def test_metrics_of_a_federation(place):
    found = parsed(FederationMonitor(place).metrics())
    assert found[("fedrema_federation_rounds_completed",)] == 2
    assert 820 * 86_400 < found[("fedrema_certificate_expiry_seconds",)] < 826 * 86_400
    assert found[("fedrema_audit_log_intact",)] == 1
    assert found[("fedrema_federation_nodes",)] == 3
    record = Run(place.run).rounds[-1]
    assert found[("fedrema_federation_metric", ("metric", "accuracy"))] == pytest.approx(record.accuracy)
    for row, name in enumerate(NAMES):
        assert found[("fedrema_node_rounds_total", ("node", name))] == 2
        value = found[("fedrema_node_metric", ("metric", "accuracy"), ("node", name))]
        assert value == pytest.approx(record.client_accuracy[row])
        assert found[("fedrema_node_bytes_up_total", ("node", name))] > 1000


@pytest.mark.parametrize("way", ["sent", "received"])
def test_traffic_contains_the_stages_of_secure_aggregation(way, tmp_path):
    log = AuditLog(tmp_path, "north")
    for size, what in enumerate(("encrypted shares", "masked parameters", "shares to unmask the sum", "reply"), 1):
        log.append(Entry(Event(f"{what} {way}"), "north", round=1, bytes=10**size))
        log.append(Entry(Event.REQUEST_SENT if way == "received" else Event.REQUEST_RECEIVED, "north", bytes=size))
    follower = AuditFollower(tmp_path)
    follower.refresh()
    assert (follower.sites["north"].bytes_up, follower.sites["north"].bytes_down) == (11_110, 10)


def test_a_site_sees_its_own_results_and_nothing_about_others(place):
    folder = NodeFolder.open(place.path.parent / "nodes" / "south")
    view = SiteMonitor(folder).view()
    assert [each["round"] for each in view["results"]] == [1, 2, 3]
    assert view["results"][-1]["received"] == pytest.approx(Run(place.run).rounds[-1].client_accuracy[1])
    assert view["results"][-1]["trained"] is None  # after the last round, nodes only score the model
    assert view["audit"]["problem"] == ""
    assert "reply sent in round 2" in " ".join(view["audit"]["latest"])
    text = json.dumps(view)
    assert "north" not in text
    assert "west" not in text
    found = parsed(SiteMonitor(folder).metrics())
    assert found[("fedrema_site_rounds", ("node", "south"))] == 3
    assert found[("fedrema_site_metric", ("metric", "accuracy"), ("node", "south"))] == view["results"][-1]["received"]


def test_a_changed_audit_log_is_shown_as_damaged(place):
    folder = place.path.parent / "nodes" / "north"
    follower = AuditFollower(folder)
    follower.refresh()
    lines = (folder / "audit.jsonl").read_bytes().splitlines(keepends=True)
    assert (follower.problem, follower.end.line) == ("", len(lines))
    AuditLog(folder, "north").append(Entry(Event.STARTED))
    follower.refresh()
    assert (follower.problem, follower.end.line) == ("", len(lines) + 1)
    cases = {
        "Line 2 was changed": [lines[0], lines[1].replace(b"north", b"south"), *lines[2:]],
        "Line 2 does not follow": [lines[0], *lines[2:]],
        "The log ends at line 1, but audit.head names line": lines[:1],
    }
    for sentence, content in cases.items():
        (folder / "audit.jsonl").unlink()
        (folder / "audit.jsonl").write_bytes(b"".join(content))
        follower.refresh()
        assert follower.problem.startswith(sentence)
        assert SiteMonitor(NodeFolder.open(folder)).view()["audit"]["problem"].startswith(sentence)
        assert parsed(SiteMonitor(NodeFolder.open(folder)).metrics())[("fedrema_audit_log_intact",)] == 0


def test_damaged_results_are_left_out(place):
    folder = place.path.parent / "nodes" / "north"
    whole = (folder / FILE).read_bytes()
    again = json.dumps({**json.loads(whole.splitlines()[0]), "loss": 9.5}).encode()
    (folder / FILE).write_bytes(whole + b'{"round": "x"}\n\xff\n' + again + b'\n{"round": 4, "ti')
    results = read_results(folder)
    assert [each.round for each in results] == [1, 2, 3]
    assert results[0].loss == 9.5  # a repeated round replaces the first one


def test_the_pages_are_served_with_their_data(place):
    class Watched(Browser):
        def __init__(self, folder):
            self.app, self.cookies = monitor_app(folder, "127.0.0.1", Protection()), {}

    operator = Watched(place.path.parent)
    page = operator("GET", "/")
    assert page.status_code == 200
    assert '"state":"finished"' in page.text
    assert page.headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in page.text
    assert '"live":true' in operator("GET", "/run/").text
    assert operator("GET", "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    for path in ("/config.json", "/server.key", "/../server.key", "/run/../server.key", "/keys/north.pub"):
        assert operator("GET", path).status_code == 404
    site = Watched(place.path.parent / "nodes" / "west")
    assert '"name":"west"' in site("GET", "/").text
    assert "fedrema_site_rounds" in site("GET", "/metrics").text
    assert site("GET", "/run/").status_code == 404
    assert site("POST", "/metrics").status_code == 405


def test_without_flower_one_sentence_says_so(place, monkeypatch):
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: None)
    for folder in (place.path, place.path.parent / "nodes" / "west"):
        with pytest.raises(BadInput, match="needs Flower for a deployment's folder: pip install"):
            monitor_app(folder, "127.0.0.1", Protection())


def test_metrics_of_runs(tmp_path):
    run = write_run(tmp_path / "one" / "run", ended=False, rounds=10)
    found = parsed(metrics_of_runs(LiveRuns(tmp_path)))
    labels = (("method", "fedavg"), ("run", "one/run"), ("seed", str(run.settings["seed"])))
    assert found[("fedrema_run_rounds_completed", *labels)] == 3
    assert found[("fedrema_run_rounds", *labels)] == 10
    assert found[("fedrema_run_state", *labels, ("state", "stopped"))] == 1
    assert found[("fedrema_run_state", *labels, ("state", "running"))] == 0
    assert found[("fedrema_run_metric", labels[0], ("metric", "accuracy"), *labels[1:])] == run.rounds[-1].accuracy


@pytest.mark.parametrize("value", [0.0, 1.5, -3, 1e300, float("inf"), float("-inf"), 2**40, True])
def test_values_and_any_label_survive_prometheus(value):
    found = parsed([Metric("a_b", "gauge", "What\nit is \\ about.").add(value, name=NASTY, other="").add(None)])
    assert found == {("a_b", ("name", NASTY), ("other", "")): float(value)}


def test_invalid_names_of_metrics_are_errors():
    for name, kind in (("a b", "gauge"), ("a", "counter"), ("a_total", "gauge"), ("1a", "gauge")):
        with pytest.raises(ValueError, match="is not the name of a"):
            Metric(name, kind, "")
