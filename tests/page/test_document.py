"""The parts of the page's document, against numbers computed by hand."""

import base64
import hashlib
import json
from importlib import resources

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.page.clients import clients_part, evenly_spaced
from fedrema.page.document import DASHES, in_order, main_part
from fedrema.page.encode import packed, plain
from fedrema.page.reading import DownsampledRun, spread
from fedrema.page.relations import RelationsFile, relations_part
from fedrema.page.render import as_text, page, write_page
from fedrema.reporting.matrices import order_by_similarity
from fedrema.reporting.plots import STROKES
from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import FederationFacts
from fedrema.simulation.records import MetricRecord, NodeReports, RoundRecord
from tests.reporting.folders import manifest, round_record, write_run, write_two_groups


def unpacked(found):
    small = np.frombuffer(base64.b64decode(found["data"]), "<u2").astype(float).reshape(found["shape"])
    return np.where(small == 65535, np.nan, small / 65534 * found["highest"])


def test_numbers_survive_packing():
    values = np.array([[0.0, 0.25, 1.0], [np.nan, 0.9, 0.5]])
    np.testing.assert_allclose(unpacked(packed(values, 1.0)), values, atol=1 / 65534)
    counts = np.array([0.0, 7.0, 1234.0])
    np.testing.assert_array_equal(np.rint(unpacked(packed(counts))), counts)
    assert np.isnan(unpacked(packed(np.full(2, np.nan)))).all()
    assert unpacked(packed(np.zeros(2))).tolist() == [0, 0]


def test_json_contains_null_instead_of_nan():
    found = plain({"a": np.float32("nan"), 1: (np.int64(3), float("inf")), "b": np.array([1.5])})
    assert found == {"a": None, "1": [3, None], "b": [1.5]}


def test_evenly_spaced_selections_keep_both_ends():
    assert evenly_spaced(range(5), 9) == [0, 1, 2, 3, 4]
    assert evenly_spaced(range(101), 5) == [0, 25, 50, 75, 100]


def test_absent_clients_have_no_numbers():
    np.testing.assert_array_equal(spread([0.5, None], [2, 0], 3), [np.nan, np.nan, 0.5])
    np.testing.assert_array_equal(spread(None, [0], 2), [np.nan, np.nan])


def test_groups_curves_and_differences(tmp_path):
    write_two_groups(tmp_path)
    runs = in_order([DownsampledRun(path.parent) for path in sorted(tmp_path.rglob("config.json"))])
    found = main_part(runs)
    assert [group["label"] for group in found["groups"]] == ["FedAvg", "FedReMa"]
    assert [(run["group"], run["seed"]) for run in found["runs"]] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    fedrema = found["groups"][1]
    assert fedrema["statistics"]["honest_accuracy"] == pytest.approx([0.82, 0.02])
    assert fedrema["curves"]["accuracy"] == {
        "rounds": [1, 2, 3], "mean": [50, 70, 80], "low": [50, 70, 80], "high": [50, 70, 80],
        "period_end": pytest.approx((1 + 2 + 2) / 3),
    }  # fmt: skip
    (row,) = found["differences"]["honest_accuracy"]["rows"]
    assert found["differences"]["honest_accuracy"]["reference"] == "FedReMa"
    assert (row["label"], row["pairs"], row["mean"]) == ("FedAvg", 3, pytest.approx(-0.04))
    assert row["low"] == pytest.approx(-0.04 - 4.302653 * 0.02 / np.sqrt(3))  # t of 2 degrees of freedom
    assert [run["status"]["state"] for run in found["runs"]] == ["finished"] * 6
    assert found["notes"] == []


def test_a_note_warns_of_different_data(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", method="fedrema", fingerprint="b" * 64)
    found = main_part([DownsampledRun(tmp_path / "a"), DownsampledRun(tmp_path / "b")])
    assert not found["comparable"]
    assert found["notes"] == ["The groups ran on different data: their accuracies are not comparable."]


def test_single_clients(tmp_path):
    run = write_run(tmp_path / "run", "fedrema", accuracies=(), ended=False, rounds=3)
    records = [
        round_record(1, 0.375, [0.5, 0.25], participants=[0, 1], client_loss=[2.0, 1.0]),
        RoundRecord(
            2,
            participants=[1],
            dropped=[0],
            client_loss=[0.5],
            metrics={"accuracy": MetricRecord(0.75, clients=[None, 0.75])},
            trained={"accuracy": MetricRecord(1.0, clients=[None, 1.0])},
            trace={"set_sizes": [7]},
        ),
        RoundRecord(3, nodes=NodeReports({"south": "it is late"})),
    ]
    for record in records:
        run.directory.append(record)
    run.directory.write_label_counts(np.array([[3, 0], [1, 2]]), np.array([[1, 1], [0, 0]]))
    (found,) = clients_part([DownsampledRun(tmp_path / "run")])["runs"]
    assert found["rounds"] == [1, 2, 3]
    np.testing.assert_allclose(unpacked(found["score"]), [[0.5, 0.25], [np.nan, 0.75], [np.nan] * 2], atol=1e-4)
    np.testing.assert_allclose(unpacked(found["trained"])[1], [np.nan, 1.0], atol=1e-4)
    np.testing.assert_allclose(unpacked(found["loss"])[:2], [[2, 1], [np.nan, 0.5]], atol=1e-4)
    np.testing.assert_array_equal(np.rint(unpacked(found["presence"])), [[2, 2], [1, 2], [0, 1]])
    np.testing.assert_array_equal(np.rint(unpacked(found["traces"]["set_sizes"]))[1], [np.nan, 7])
    np.testing.assert_allclose(unpacked(found["final"]), [0.5, 0.5], atol=1e-4)
    np.testing.assert_array_equal(np.rint(unpacked(found["labels"]["train"])), [[3, 0], [1, 2]])


def test_matrices_are_ordered_by_similarity_and_clustered(tmp_path):
    clients, group = 6, np.array([0, 1, 0, 1, 0, 1])
    names = [f"c{row}" for row in range(clients)]
    directory = RunDirectory(tmp_path / "run")
    federation = FederationFacts("f", names, 2, [], (8, 8), [], [])
    directory.create(manifest("fedrema", {"seed": 0, "rounds": 2}, federation))
    for number in (1, 2):
        directory.append(round_record(number))
    alike = np.where(group[:, None] == group, 0.9, 0.1).astype(np.float32)
    np.fill_diagonal(alike, 1)
    chosen = (alike > 0.5).astype(np.float32)
    directory.write_relations({1: {"S": alike, "sets": chosen, "G": chosen}, 2: {"S": alike, "G": 2 * chosen}}, 2)
    (found,) = relations_part([DownsampledRun(tmp_path / "run")])["runs"]
    ordered = group[found["clients"]]
    assert np.count_nonzero(np.diff(ordered)) == 1  # all of one group, then all of the other
    similar = unpacked(found["matrices"]["S"])
    np.testing.assert_allclose(similar[0], alike[np.ix_(found["clients"], found["clients"])], atol=1e-4)
    assert np.isnan(unpacked(found["matrices"]["sets"])[1]).all()
    assert found["graph"]["source"] == "G"
    clusters = np.array(found["graph"]["cluster"])
    assert len(set(clusters)) == 2
    assert all(len(set(clusters[ordered == one])) == 1 for one in (0, 1))
    places = np.array([found["graph"]["x"], found["graph"]["y"]]).T[ordered == 0]
    apart = np.linalg.norm(places - places.mean(axis=0), axis=1)
    assert apart.max() > 0.25  # without edges to the others, the layout alone would contract them to a point


def test_matrices_of_many_clients_are_thinned_and_a_note_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrema.page.relations.KEPT_CLIENTS", 3)
    monkeypatch.setattr("fedrema.page.relations.KEPT_ROUNDS", 2)
    run = write_run(tmp_path / "run", ended=False)
    config = run.config | {"federation": run.config["federation"] | {"names": list("abcde")}}
    run.directory.write_json(run.directory.config_file, config)
    run.directory.write_relations({number: {"S": np.eye(5, dtype=np.float32)} for number in range(1, 8)}, 3)
    (found,) = relations_part([DownsampledRun(tmp_path / "run")])["runs"]
    assert (len(found["clients"]), found["rounds"], found["matrices"]["S"]["shape"]) == (3, [1, 7], [2, 3, 3])
    assert found["notes"] == [
        "3 of 5 clients are shown, evenly spaced in the order of similarity.",
        "2 of 7 recorded rounds are available, evenly spaced.",
    ]


def test_a_damaged_file_of_matrices_is_refused_and_a_missing_one_is_empty(tmp_path):
    (tmp_path / "relations.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(BadInput, match=r"relations\.npz was altered or damaged since fedrema wrote it: restore it"):
        RelationsFile(tmp_path / "relations.npz")
    assert RelationsFile(tmp_path / "missing.npz").rounds == []


def test_without_recorded_matrices_the_dependency_map_comes_from_the_checkpoint(tmp_path):
    made = fedrema.run("fedrema", out=tmp_path / "run", rounds=2, clients=4, samples=20, epochs=1)
    (found,) = relations_part([DownsampledRun(made.path)])["runs"]
    counts = made.state().server["dependencies"].numpy()
    order = found["clients"]
    np.testing.assert_array_equal(np.rint(unpacked(found["matrices"]["G"])[0]), counts[np.ix_(order, order)])
    assert found["notes"] == ["From the checkpoint of round 2."]
    other = fedrema.run("fedavg", out=tmp_path / "other", rounds=1, clients=4, samples=20, epochs=1)
    assert relations_part([DownsampledRun(other.path)])["runs"] == [None]


def test_absent_clients_can_be_ordered():
    similarity = np.full((4, 4), np.nan)
    similarity[:2, :2] = 1.0
    assert sorted(order_by_similarity(similarity).tolist()) == [0, 1, 2, 3]


def test_the_page_is_self_contained(tmp_path):
    write_two_groups(tmp_path)
    write_page([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count('<script type="application/json"') == 4
    own = text.partition('id="plotly-source"')[0]
    assert "http://" not in own
    assert "https://" not in own
    assert "default-src 'none'" in own
    assert len(text) < 2_000_000
    assert str(tmp_path) not in text  # the page may be shared


def test_names_cannot_break_out_of_the_page():
    name = "</script><script>alert(1)</script>\u2028"
    text = as_text({"name": name})
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text)["name"] == name
    assert "alert(1)</script>" not in page({"main": {"name": name}})


def test_the_command_prints_the_path_of_the_report(tmp_path, capsys):
    write_two_groups(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"Report: {tmp_path / 'report.html'}\n"
    assert main(["report", str(tmp_path / "fedavg"), "--out", str(tmp_path / "some.html")]) == 0
    bundle = resources.files("fedrema.page") / "plotly" / "plotly-cartesian.min.js"
    assert (tmp_path / "some.html").stat().st_size > len(bundle.read_bytes())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs at least one folder"),
        (["nowhere"], "nowhere does not exist"),
        (["{runs}", "--out", "page.pdf"], "--out page.pdf is not a page: names ending in .html are valid."),
    ],
)
def test_invalid_requests_are_refused_in_one_sentence(tmp_path, capsys, arguments, words):
    write_run(tmp_path / "run")
    assert main(["report", *(one.replace("{runs}", str(tmp_path)) for one in arguments)]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_open_opens_the_report_in_a_browser(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--open"]) == 0
    assert opened == [(tmp_path / "run" / "report.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["report", str(tmp_path / "run"), "--open"]) == 0
    assert "There is no browser here" in capsys.readouterr().out


def test_the_page_has_every_stroke_of_the_figures():
    assert set(DASHES) == set(STROKES)


def test_own_data_is_not_reported_as_digits(tmp_path):
    y = np.arange(60) % 3
    own = fedrema.Federation.from_arrays(np.eye(3)[y], y, np.repeat(["a", "b"], 30))
    fedrema.run("local", federation=own, rounds=1, out=tmp_path / "run")
    (shown,) = main_part([DownsampledRun(tmp_path / "run")])["runs"]
    assert not {"dataset", "clients", "samples", "partition"} & shown["settings"].keys()
    assert shown["holds"] == {
        "number of clients": 2, "number of classes": 3, "training samples": 48, "test samples": 12
    }  # fmt: skip


def test_the_bundled_plotly_is_the_published_file():
    folder = resources.files("fedrema.page") / "plotly"
    script = (folder / "plotly-cartesian.min.js").read_bytes()
    # npm package plotly.js-cartesian-dist-min 3.7.0
    assert hashlib.sha256(script).hexdigest() == "7c593b9eda0e74a1d07335cf89cbf7a55ffc114909980c3729af835453bdb02a"
    assert b"MIT License" in (folder / "LICENSE").read_bytes()
