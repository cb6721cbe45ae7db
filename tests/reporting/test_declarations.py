"""Methods declare everything that they trace: reports show nothing else."""

import dataclasses

import numpy as np
import pytest

import fedrema
from fedrema.core.reports import HEAD_SIMILARITY
from fedrema.methods import registry
from tests.fixtures import make_federation

SETTINGS = {"rounds": 2, "epochs": 1, "lr": 0.05, "batch": 10, "hidden": 4, "record": "relations", "record_every": 1}


def declared(kind):
    reports = kind.reports
    period = {reports.period.name} if reports.period else set()
    return period | {trace.name for trace in reports.traces}


@pytest.mark.parametrize("name", sorted(registry()))
def test_traces_and_matrices_are_those_that_the_method_declares(name, tmp_path):
    kind = registry()[name]
    run = fedrema.run(name, federation=make_federation(), out=tmp_path / "run", **SETTINGS)
    assert set(run.rounds[0].trace) == declared(kind)
    for trace in kind.reports.traces:
        values = run.rounds[0].trace[trace.name]
        assert np.shape(values) == ((len(run.names),) if trace.per_client else ()), trace.name
    matrices = {matrix.name: matrix for matrix in (*kind.reports.matrices, HEAD_SIMILARITY)}
    recorded = run.relations()[1]
    assert set(recorded) == set(matrices)
    for matrix, values in recorded.items():
        if matrices[matrix].kind != "counts":
            assert values.min() >= -1e-6, matrix
            assert values.max() <= 1 + 1e-6, matrix
        if matrices[matrix].kind == "weights":
            np.testing.assert_allclose(values.sum(axis=1), 1, atol=1e-5)
        if matrices[matrix].state is not None:
            np.testing.assert_array_equal(run.state().server[matrices[matrix].state], run.relations()[2][matrix])


@pytest.mark.parametrize("name", sorted(registry()))
def test_other_ways_of_scoring_have_titles(name):
    kind = registry()[name]
    assert {alternative.name for alternative in kind.reports.alternatives} == set(kind().beside())


def test_periods_name_a_trace_and_a_setting():
    for kind in registry().values():
        period = kind.reports.period
        if period is not None:
            assert period.measure in {trace.name for trace in kind.reports.traces}
            assert period.threshold in {field.name for field in dataclasses.fields(kind)}
