"""The clients of a run, by name."""

import numpy as np
import pytest
import torch

import fedrema


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    generator = np.random.default_rng(0)
    y = generator.choice(["ill", "well"], 90)
    x = generator.normal(size=(90, 3)).astype("float32") + 3 * (y == "ill")[:, None]
    owner = generator.choice(["north", "<south>", "west"], 90)
    federation = fedrema.Federation.from_arrays(x, y, owner)
    run = fedrema.run("fedrema", federation=federation, rounds=3, out=tmp_path_factory.mktemp("runs") / "run")
    return run, federation, x


def test_a_client_has_its_samples_and_its_metrics(trained):
    run, federation, _ = trained
    assert list(run.clients) == run.names == list(federation.names)
    for row, client in enumerate(run.clients.values()):
        assert client.train_samples + client.test_samples == int((federation.client == row).sum())
        assert client.accuracy == run.rounds[-1]["client_accuracy"][row]
        assert client.metrics["auc"] == run.rounds[-1]["client_auc"][row]


def test_a_client_predicts_with_its_own_model(trained):
    run, _, x = trained
    client = run.clients["north"]
    predicted = client.predict(x)
    outputs = client.model()(torch.from_numpy(x)).double()
    assert torch.allclose(predicted.outputs, outputs.detach()[:, : predicted.outputs.shape[1]])
    assert len(predicted) == 90
    assert np.asarray(predicted).tolist() == predicted.values
    assert set(predicted.values) == {"ill", "well"}
    assert client.parameters().keys() == run.personal_parameters("north").keys()


def test_an_unknown_client_is_named(trained):
    run, _, _ = trained
    with pytest.raises(fedrema.BadInput, match=r"^There is no client 'east' in .*; it has <south>, north, west.$"):
        run.clients["east"]
    assert "east" not in run.clients
    assert run.clients.get("east") is None


def test_a_notebook_shows_escaped_names(trained):
    run, federation, _ = trained
    for shown in (run._repr_html_(), run.clients._repr_html_(), federation._repr_html_()):
        assert "<south>" not in shown
        assert shown.count("<table") == shown.count("</table>") == 1
    assert "&lt;south&gt;" in run.clients._repr_html_()
    assert "ill (" in federation._repr_html_()
    assert "90 samples" in repr(federation)
    assert "'north' of" in repr(run.clients["north"])
    assert "'north'" in repr(run.clients)
