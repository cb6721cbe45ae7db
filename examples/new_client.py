"""Personalise for a new client: train without it, then create a model for it from its own samples."""

from pathlib import Path

import numpy as np

import fedrema
from fedrema.runs.new_clients import personalize

all_clients = fedrema.make_federation(dataset="digits", clients=20, samples=60, s=0.1, test_share=0.5)
is_new = all_clients.client == 19
np.savez("new_client.npz", x=all_clients.x[is_new], y=all_clients.y[is_new], split=all_clients.test[is_new])
others = fedrema.Federation.from_arrays(
    all_clients.x[~is_new], all_clients.y[~is_new], all_clients.client[~is_new], all_clients.test[~is_new], classes=10
)
run = fedrema.run("fedrema", federation=others, rounds=30, lr=0.05, batch=10, out="runs/nineteen", overwrite=True)

personalized = personalize(run.path, Path("new_client.npz"))
for stage, accuracy in personalized.scores.items():
    print(f"{stage:>10}: {accuracy:.0%}")
print("learns most from", ", ".join(sorted(personalized.peers, key=personalized.peers.get, reverse=True)[:5]))
