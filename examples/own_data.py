"""Train on your own data: five hospitals with few patients each and different diagnoses."""

import numpy as np

import fedrema

# One row per sample, its label, and the client that holds it.
generator = np.random.default_rng(0)
centres = generator.normal(size=(6, 12))
x, y, client = [], [], []
for hospital, diagnoses in {"north": (0, 1), "east": (0, 1), "south": (2, 3), "west": (2, 3), "island": (4, 5)}.items():
    labels = np.append(generator.choice(diagnoses, 30), generator.integers(0, 6, 6))
    x.append(centres[labels] + 1.2 * generator.normal(size=(len(labels), 12)))
    y.append(labels)
    client += [hospital] * len(labels)

federation = fedrema.Federation.from_arrays(np.concatenate(x).astype("float32"), np.concatenate(y), np.array(client))
run = fedrema.run("fedrema", federation=federation, rounds=30, out="runs/hospitals", overwrite=True)

print(f"everyone together: {run.summary['honest_accuracy']:.0%} right")
for name, accuracy in zip(run.names, run.rounds[-1]["client_accuracy"], strict=True):
    print(f"{name:>8}: {accuracy:.0%}")
