"""Predictions from raw rows and images: with a run, with an export, in Python and on the command line."""

import csv
import re

import numpy as np
import pytest
import torch
from PIL import Image

import fedrema
from fedrema.cli import main
from fedrema.data.from_source import federation_from
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.export import export_models
from fedrema.runs.prediction import open_models
from fedrema.tasks import TASKS, Task

CITIES = ("Bern", "Basel", "Genf")


def write_table(file, task="regression", rows=90, seed=0, with_target=True):
    """Write a table with missing numbers, a category and a target for a task."""
    generator = np.random.default_rng(seed)
    header = ["age", "city", "site", "weight"]
    targets = {"multilabel": ["cough", "fever"]}.get(task, ["outcome"])
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*header, *(targets if with_target else [])])
        for row in range(rows):
            age, weight = generator.normal(50, 10), generator.normal(70, 5)
            site = ("north", "south", "west")[row % 3]
            slope = 1 if site == "north" else -1
            city = CITIES[generator.integers(3)]
            score = slope * (age - 50) / 10 + (city == "Bern")
            value = {
                "regression": [f"{20 + 3 * score:.4f}"],
                "count": [generator.poisson(np.exp(score / 2))],
                "ordinal": [int(np.clip(round(score) + 2, 0, 4))],
                "binary": ["yes" if score > 0 else "no"],
                "multiclass": [("low", "middle", "high")[int(np.clip(round(score) + 1, 0, 2))]],
                "multilabel": [int(score > 0), int(weight > 70)],
            }[task]
            shown = "" if generator.random() < 0.1 else f"{weight:.2f}"
            writer.writerow([f"{age:.2f}", city, site, shown, *(value if with_target else [])])
    return file


def train(folder, file, task="regression", method="fedrema", **settings):
    target = "cough,fever" if task == "multilabel" else "outcome"
    federation = federation_from(file, target=target, task=task, **settings)
    return fedrema.run(method, federation=federation, rounds=3, out=folder / f"run-{method}", precision="float64")


@pytest.mark.parametrize("task", TASKS)
def test_an_export_predicts_raw_rows_like_the_run(tmp_path, task):
    run = train(tmp_path, write_table(tmp_path / "data.csv", task), task)
    export_models(run)
    new = write_table(tmp_path / "new.csv", task, rows=12, seed=1, with_target=False)
    by_run = open_models(run.path).predict(new)
    by_export = open_models(run.path / "models").predict(new)
    assert torch.equal(by_run.outputs, by_export.outputs)
    assert by_run.csv() == by_export.csv() == run.predict(new).csv()
    assert by_run.clients[:3] == ["north", "south", "west"]
    if by_run.probabilities is not None and task != "multilabel":
        assert by_run.probabilities.sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize("method", sorted(registry()))
def test_predictions_of_raw_test_rows_are_those_that_were_scored(tmp_path, method):
    kind = registry()[method]
    task = "regression" if kind().supports(Task("regression")) else "binary"
    file = write_table(tmp_path / "data.csv", task)
    run = train(tmp_path, file, task, method)
    federation = federation_from(file, target="outcome", task=task)
    found = open_models(run.path).predict(file)
    # The federation holds the samples in the order of clients, and the table in its own.
    order = np.argsort(np.array(found.clients), kind="stable")
    tested = order[federation.test]
    last = run.rounds[-1].primary
    if task == "regression":
        error = np.array(found.values)[tested] - federation.y[federation.test]
        value = np.sqrt(np.mean(error**2))
    else:
        names = np.array(federation.class_names)[federation.y[federation.test]]
        value = np.mean(np.array(found.values)[tested] == names)
    assert value == pytest.approx(last.value, abs=1e-9)


def test_embedded_categories_train_and_predict(tmp_path):
    run = train(tmp_path, write_table(tmp_path / "data.csv"), categories="embed")
    assert run.manifest.settings["embed"] == "0,4,0,0"
    export_models(run)
    new = write_table(tmp_path / "new.csv", rows=5, seed=1)
    assert run.predict(new).csv() == open_models(run.path / "models").predict(new).csv()


def test_a_client_can_be_named_for_all_rows(tmp_path):
    run = train(tmp_path, write_table(tmp_path / "data.csv"))
    new = tmp_path / "new.csv"
    new.write_text("age;city;weight\n44,5;Bern;70\n51;Paris;\n")
    found = run.predict(new, client="south")
    assert found.clients == ["south", "south"]
    assert len(found.values) == 2


def test_frames_are_predicted_like_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    run = train(tmp_path, write_table(tmp_path / "data.csv"))
    new = write_table(tmp_path / "new.csv", rows=7, seed=1)
    assert run.predict(pandas.read_csv(new)).values == run.predict(new).values


def test_new_rows_of_a_frame_name_their_client_in_the_same_column(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": np.arange(40.0), "ill": ["no", "yes"] * 20, "ward": ["n"] * 20 + ["s"] * 20})
    federation = fedrema.Federation.from_dataframe(frame, target="ill", client="ward")
    run = fedrema.run("fedavg", federation=federation, rounds=1, out=tmp_path / "run")
    assert run.predict(frame.drop(columns="ill")[18:22]).clients == ["n", "n", "s", "s"]


def test_arrays_and_npz_files_are_predicted(tmp_path):
    run = fedrema.run("fedavg", dataset="digits", clients=4, rounds=2, out=tmp_path / "run")
    x = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
    file = tmp_path / "new.npz"
    np.savez(file, x=x, client=np.array(["0", "1", "2", "3", "0"]))
    found = run.predict(file)
    assert found.clients == ["0", "1", "2", "3", "0"]
    wanted = run.personal_model("1")(torch.from_numpy(x[1:2])).argmax(1)
    assert found.values[1] == str(int(wanted))
    assert run.predict(x, client="0").values[0] == found.values[0]
    federation = fedrema.make_federation(clients=4)
    federation.save(tmp_path / "saved.npz")
    assert run.predict(tmp_path / "saved.npz").clients == [federation.names[row] for row in federation.client]


def test_images_are_predicted_by_the_client_of_their_folder(tmp_path):
    generator = np.random.default_rng(0)
    for client in ("a", "b"):
        for kind, level in (("dark", 40), ("light", 200)):
            folder = tmp_path / "images" / client / kind
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = generator.normal(level, 20, (10, 10)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    federation = federation_from(tmp_path / "images")
    run = fedrema.run("fedavg", federation=federation, rounds=5, out=tmp_path / "run")
    found = run.predict(tmp_path / "images")
    assert set(found.clients) == {"a", "b"}
    assert found.labels[0] == "a/dark/0.png"
    assert np.mean([value in label for value, label in zip(found.values, found.labels, strict=True)]) > 0.9
    single = run.predict(tmp_path / "images" / "a" / "light" / "0.png", client="b")
    assert single.values == ["light"]
    assert single.class_names == ("dark", "light")


def test_the_command_prints_or_writes_csv(tmp_path, capsys):
    run = train(tmp_path, write_table(tmp_path / "data.csv", "binary"), "binary")
    new = write_table(tmp_path / "new.csv", "binary", rows=4, seed=1, with_target=False)
    assert main(["predict", str(run.path), str(new)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "sample,client,prediction,probability of no,probability of yes"
    assert main(["predict", str(run.path), str(new), "--out", str(tmp_path / "p.csv")]) == 0
    assert (tmp_path / "p.csv").read_text() == printed
    assert capsys.readouterr().out == f"4 predictions of 3 clients: {tmp_path / 'p.csv'}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("age,city,site\n1,Bern,north\n", r"new.csv has no column 'weight'; the run needs age, city, weight"),
        ("age,city,weight\n1,Bern,2\n", "no column 'client' or 'site' that names the client of each row"),
        ("age,city,weight,site\n1,Bern,2,east\n", "has no model of client 'east'; it has north, south, west"),
        ("age,city,weight,site\nold,Bern,2,north\n", "age"),
        ("age,city,weight,site\n", "has no rows"),
        ("", "is empty"),
    ],
)
def test_bad_tables_are_refused(tmp_path, capsys, content, message):
    run = train(tmp_path, write_table(tmp_path / "data.csv"))
    new = tmp_path / "new.csv"
    new.write_text(content)
    out = tmp_path / "p.csv"
    assert main(["predict", str(run.path), str(new), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not out.exists()


def test_models_that_are_not_sufficient_are_refused(tmp_path):
    file = write_table(tmp_path / "data.csv", "binary")
    run = train(tmp_path, file, "binary", "fedproto")
    export_models(run)
    with pytest.raises(BadInput, match="fedproto computes predictions in its own way: use the folder of the run"):
        open_models(run.path / "models")
    assert len(run.predict(file).values) == 90


def test_the_model_card_has_no_mean_over_classes_for_a_client_with_one_class(tmp_path):
    y = np.r_[np.arange(20) % 2, np.zeros(12), np.arange(20) % 2, np.arange(12) % 2].astype(int)
    client, split = np.repeat(["one", "two"], 32), np.tile(np.r_[np.zeros(20, bool), np.ones(12, bool)], 2)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    federation = fedrema.Federation.from_arrays(x, y, client, split)
    run = fedrema.run(
        "fedavg", federation=federation, rounds=1, metrics="balanced_accuracy,f1", out=tmp_path / "run", device="cpu"
    )
    assert main(["export", str(run.path)]) == 0
    lines = (run.path / "models" / "MODEL_CARD.md").read_text().splitlines()
    cells = {
        line.split(" | ")[0]: line.strip("| ").split(" | ") for line in lines if line.startswith(("| one", "| two"))
    }
    assert cells["| one"][1] == cells["| two"][1] == "12"
    assert cells["| one"][-2:] == ["–", "–"]
    assert "–" not in cells["| two"][-2:]


def test_the_model_card_states_data_metrics_settings_and_limitations(tmp_path):
    file = write_table(tmp_path / "data.csv", "binary")
    run = train(tmp_path, file, "binary", test_share=0.5)
    export_models(run)
    card = (run.path / "models" / "MODEL_CARD.md").read_text()
    for heading in ("# Model card", "## Data", "## Metrics", "## Training", "## Limitations"):
        assert f"{heading}\n" in card
    assert "one of 2 classes (no, yes)" in card
    assert "| city | category | encoding onehot; categories 3: Basel, Bern, Genf |" in card
    clients = run.rounds[-1].metrics["accuracy"].clients
    for name, accuracy in zip(run.names, clients, strict=True):
        assert re.search(rf"\| {name} \| 15 \| {100 * accuracy:.1f} \[[\d.]+, [\d.]+\] \|", card)
    export_models(run, overwrite=True)
    assert sorted(path.name for path in (run.path / "models").iterdir()) == [
        "MODEL_CARD.md", "README.md", "index.json", "north.safetensors", "south.safetensors", "west.safetensors"
    ]  # fmt: skip
