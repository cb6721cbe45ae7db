"""The page of a user's own method shows what the method declares, as it does for the methods of fedrema."""

import numpy as np
import pytest

import fedrema
from fedrema.page.clients import clients_part
from fedrema.page.document import main_part
from fedrema.page.reading import DownsampledRun
from fedrema.page.relations import relations_part
from fedrema.reporting.tables import comparison_markdown
from tests.fixtures import make_federation
from tests.page.test_document import unpacked

METHOD = "tests.page.own_method:Neighbours"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    federation = make_federation(counts=(20, 20, 20, 20, 20))
    folder = tmp_path_factory.mktemp("own") / "run"
    settings = {"rounds": 9, "epochs": 1, "lr": 0.05, "batch": 10, "record": "relations", "record_every": 1}
    fedrema.run(METHOD, federation=federation, out=folder, **settings)
    return DownsampledRun(folder)


def test_period_and_traces(run):
    found = main_part([run])
    (group,), (shown,) = found["groups"], found["runs"]
    assert group["label"] == "Neighbours"
    # 1 / (1 + t/4) > 0.4 up to round 5: 0.44; in round 6 it is exactly 0.4.
    assert group["statistics"]["alone_rounds"] == [5, None]
    assert group["curves"]["accuracy"]["period_end"] == 5
    assert found["periods"] == {"alone_rounds": "alone rounds"}
    assert group["reports"]["period"]["title"] == "solo phase"
    assert [trace["title"] for trace in group["reports"]["traces"]] == ["own weight"]
    assert shown["series"]["own"]["rounds"] == list(range(1, 10))
    assert shown["series"]["own"]["values"][:2] == pytest.approx([0.8, 1 / 1.5])
    assert (shown["threshold"], shown["in_period"]) == (0.4, False)


def test_weights_between_clients_are_shown_as_a_graph(run):
    (found,) = relations_part([run])["runs"]
    assert found["graph"]["source"] == "weights"
    assert set(found["matrices"]) == {"S", "weights"}
    matrices = {matrix["name"]: matrix for matrix in main_part([run])["groups"][0]["reports"]["matrices"]}
    assert matrices["weights"]["title"] == "Weights of models"
    assert matrices["S"]["kind"] == "similarity"
    order = found["clients"]
    recorded = run.relations()[9]["weights"]
    np.testing.assert_allclose(unpacked(found["matrices"]["weights"])[-1], recorded[np.ix_(order, order)], atol=1e-4)


def test_tables_have_a_column_for_the_period(run):
    heading, _, row = comparison_markdown([run]).splitlines()[:3]
    assert heading.endswith("| worst tenth | alone rounds | seconds |")
    assert row.split("|")[-3].strip() == "5.0"


def test_single_clients(run):
    (found,) = clients_part([run])["runs"]
    assert found["score"]["shape"] == [9, 5]
    assert found["traces"] == {}
