"""Why does MOON with µ = 5 not learn on CIFAR-10? Compares the two parts of its gradient (CPU, 2 minutes).

python benchmarks/check_contrast.py
"""

import argparse

import torch

import fedrema
from fedrema.core import Batch, LocalTraining, Simulation, cross_entropy
from fedrema.methods.moon import MOON, contrastive_loss
from fedrema.models.networks import Network, build_net
from fedrema.simulation.simulator import Simulator


def norm(gradients: tuple[torch.Tensor, ...]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients])))


def norms(simulator: Simulator, state, round_number: int) -> tuple[float, float, float]:
    """Return ‖h‖ and the norms of the body's gradients of cross-entropy and contrastive loss, for client 0."""
    net = simulator.net
    cohort = simulator.begin(
        simulator.cohort(state, torch.arange(len(simulator.federation))), simulator.moment(round_number)
    )
    client, data = cohort.one(0), simulator.train.of(0)
    batch = Batch(data.x[:100], data.y[:100], data.mask[:100], data.index[:100])
    params = {name: value.clone().requires_grad_() for name, value in client.params.items()}
    body = [value for name, value in params.items() if net.in_body(name)]
    features = net.features(params, batch.x)
    inbox = client.inbox
    contrasted = contrastive_loss(
        features, inbox["z_global"][batch.index], inbox["z_previous"][batch.index], 0.5
    ).mean()
    supervised = cross_entropy(net.classify(params, features), batch)
    parts = [norm(torch.autograd.grad(part, body, retain_graph=True)) for part in (supervised, contrasted)]
    return float(features.detach().norm(dim=1).mean()), parts[0], parts[1]


def main(quick: bool) -> None:
    federation = fedrema.make_federation(dataset="cifar10", clients=5, groups=5, samples=60 if quick else 600, s=0.2)
    net = build_net(Network(net="mlp" if quick else "alexnet"), federation.sample_shape, 10, seed=0)
    settings = Simulation(rounds=1 if quick else 4, device="cpu")
    for mu in (0.0, 1.0, 5.0):
        simulator = Simulator(MOON(mu=mu), net, federation, LocalTraining(), settings)
        state = simulator.start()
        for result in simulator.run(state):
            length, supervised, contrasted = norms(simulator, state, state.round + 1)
            print(
                f"µ = {mu:g} after round {state.round}: training loss {result.record.loss:.2f}, ‖h‖ {length:.2f},"
                f" gradient of the cross-entropy {supervised:.2f}, of the contrast {contrasted:.2f}, times 5"
                f" {5 * contrasted:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    main(parser.parse_args().quick)
