"""Measure the defaults for own data, and write the table of docs/own-data.md: `python tools/make_defaults.py`.

It trains FedAvg with the default network on generated and real data, with the defaults and with the former ones, which
takes minutes on two cores.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from make_figures import DOCS, fill
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedrema
from fedrema.config.settings import make_settings
from fedrema.data import Federation, build_federation
from fedrema.reporting.tables import markdown_lines

FORMER = {"batch": 100, "lr": 0.01, "drop_incomplete": True}
ROUNDS = (5, 20)
HEADINGS = ["data", "clients", "training samples each", "classes", "batch, rate", "former", "chosen", "pooled"]


def blobs(classes: int, features: int, clients: int, each: int, skew: float | None = None, scale: float = 1.0):
    """Return Gaussian blobs, `each` samples per client; `skew` is the Dirichlet parameter of the labels."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(classes, features)) * 0.7
    shares = random.dirichlet([skew or 1e6] * classes, clients)
    y = np.concatenate([random.choice(classes, each, p=share) for share in shares])
    x = scale * (centres[y] + random.normal(size=(len(y), features)))
    return x.astype(np.float32), y, np.repeat(np.arange(clients), each)


def divided(x: np.ndarray, y: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide a table among clients at random."""
    order = np.random.default_rng(0).permutation(len(y))
    return x[order], y[order], np.arange(len(y)) % clients


def federations() -> Iterator[tuple[str, Federation]]:
    """Yield every data set by its title."""
    cancer, wine, digits = load_breast_cancer(), load_wine(), load_digits()
    tables = {
        "Gaussian blobs, 20 features": blobs(40, 20, 10, 172),
        "the same, skewed labels (Dirichlet 0.2)": blobs(40, 20, 10, 172, skew=0.2),
        "blobs, 6 features": blobs(4, 6, 4, 60),
        "blobs, 8 features": blobs(3, 8, 10, 13),
        "breast cancer, standardised": divided(StandardScaler().fit_transform(cancer.data), cancer.target, 5),
        "breast cancer, as it is": divided(cancer.data, cancer.target, 5),
        "wine, standardised": divided(StandardScaler().fit_transform(wine.data), wine.target, 6),
        "digits, uint8": divided((digits.data * 15.9375).astype(np.uint8), digits.target, 10),
        "digits, floats 0 to 16": divided(digits.data, digits.target, 10),
        "blobs, 20 features × 10": blobs(5, 20, 5, 300, scale=10.0),
        "blobs, 30 features": blobs(10, 30, 4, 5000),
        "blobs, 40 features, skewed labels": blobs(100, 40, 20, 500, skew=0.2),
    }
    for title, (x, y, client) in tables.items():
        yield title, Federation.from_arrays(np.asarray(x, x.dtype if x.dtype == np.uint8 else np.float32), y, client)
    yield "digits, grouped", build_federation(make_settings("fedavg", {}).data)


def accuracies(federation: Federation, out: Path, **settings: object) -> tuple[fedrema.Run, str]:
    """Train, and return the run and its accuracies in percent."""
    run = fedrema.run("fedavg", federation=federation, rounds=max(ROUNDS), out=out, device="cpu", **settings)
    return run, ", ".join(f"{100 * run.rounds[number - 1]['accuracy']:.0f}" for number in ROUNDS)


def pooled(federation: Federation) -> str:
    """Return the accuracy of a logistic regression that sees all training samples."""
    x, test = federation.x.reshape(len(federation.y), -1).astype(np.float64), federation.test
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x[~test], federation.y[~test])
    return f"{100 * model.score(x[test], federation.y[test]):.0f}"


def main() -> None:
    """Measure everything and write the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for title, federation in federations():
            _, former = accuracies(federation, Path(folder) / f"{len(rows)}-former", **FORMER)
            run, chosen = accuracies(federation, Path(folder) / f"{len(rows)}-chosen")
            settings, counts = run.settings, run.config["federation"]["train_counts"]
            how = f"{settings['batch']}, {settings['lr']:.2g}"
            sizes = [str(len(federation)), f"{np.median(counts):.0f}", str(federation.classes)]
            rows.append([title, *sizes, how, former, chosen, pooled(federation)])
            print(*rows[-1], sep=" | ", flush=True)
    fill(DOCS / "own-data.md", "defaults", "\n".join(markdown_lines(HEADINGS, rows)))


if __name__ == "__main__":
    main()
