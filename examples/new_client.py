"""Personalise for a new client: train without it, then create a model for it from its own samples."""

from pathlib import Path

import numpy as np

import fedrema
from fedrema.runs.new_clients import personalize

everyone = fedrema.make_federation(dataset="digits", clients=20, samples=60, s=0.1, test_share=0.5)
newcomer = everyone.client == 19
np.savez("newcomer.npz", x=everyone.x[newcomer], y=everyone.y[newcomer], split=everyone.test[newcomer])
there = fedrema.Federation.from_arrays(
    everyone.x[~newcomer], everyone.y[~newcomer], everyone.client[~newcomer], everyone.test[~newcomer], classes=10
)
run = fedrema.run("fedrema", federation=there, rounds=30, lr=0.05, batch=10, out="runs/nineteen", overwrite=True)

welcome = personalize(run.path, Path("newcomer.npz"))
for stage, accuracy in welcome.accuracy.items():
    print(f"{stage:>10}: {accuracy:.0%}")
print("learns most from", ", ".join(sorted(welcome.peers, key=welcome.peers.get, reverse=True)[:5]))
