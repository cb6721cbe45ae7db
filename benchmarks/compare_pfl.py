"""Compare the time of a round of FedAvg with pfl-research's and with a textbook loop's, on the same clients.

python benchmarks/compare_pfl.py             MNIST on the CPU; on a machine with CUDA, CIFAR-10 on the GPU
python benchmarks/compare_pfl.py --rounds 9  more rounds
python benchmarks/compare_pfl.py --quick     few small clients, to test this program

Needs pfl-research (`pip install pfl`), and the datasets in the folder that FEDREMA_DATA names.

- MNIST: 20 clients with 480 training samples each, as in the paper, and its CNN; 5 epochs of 4 batches of 100.
- CIFAR-10, pfl-research's own benchmark: 1,000 users with 50 samples each, of whom 50 participate in a round; its CNN
  with two dropout layers; one epoch of 5 batches of 10. Only with CUDA.

The three programs take turns, one round each, and the first round of each is not counted. All start from the same
weights and use plain SGD with the same settings. A round is local training of all participants and the average of
their models; none is scored. pfl-research does not shuffle samples, and it trains on incomplete batches: its clients
have only the samples that fill whole batches. At the end, each global model is scored on all test samples. The
program fails if the accuracies differ by more than 5 percentage points.
"""

import argparse
import copy
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedrema.base.random import seed_of
from fedrema.bench.ceilings import torch_flags
from fedrema.bench.textbook import plain_module, train_client
from fedrema.core import LocalTraining, Simulation
from fedrema.data import DataSettings, Federation, build_federation
from fedrema.data.federation import to_float
from fedrema.engine.costs import synchronise
from fedrema.methods import find_method
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.networks import Network
from fedrema.reporting.tables import markdown_lines
from fedrema.simulation.simulator import Simulator

LARGEST_DIFFERENCE = 0.05
"""Of the accuracies, for the same training."""


@dataclass(frozen=True)
class Workload:
    title: str
    device: str
    data: DataSettings
    local: LocalTraining
    cohort: int
    """Clients that participate in a round."""
    module: Callable[[], nn.Module]


def pfl_cnn() -> nn.Module:
    """Return the network of pfl-research's CIFAR-10 benchmark."""
    body = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5),
    )  # fmt: skip
    return BodyAndHead(body, nn.Linear(128, 10))


MNIST = Workload(
    title="MNIST, CNN",
    device="cpu",
    data=DataSettings(dataset="mnist", clients=20, samples=600),
    local=LocalTraining(epochs=5, batch=100, lr=0.01, keep_momentum=False),
    cohort=20,
    module=lambda: plain_module(Network(net="cnn"), (1, 28, 28), 10),
)
CIFAR10 = Workload(
    title="CIFAR-10, pfl-research's CNN",
    device="cuda",
    data=DataSettings(dataset="cifar10", clients=1000, samples=60, partition="iid", test_share=1 / 6),
    local=LocalTraining(epochs=1, batch=10, lr=0.1, momentum=0.0, keep_momentum=False),
    cohort=50,
    module=pfl_cnn,
)


class Fedrema:
    """The simulator with the options that `fedrema run` chooses, without scoring."""

    def __init__(self, workload: Workload, module: nn.Module, federation: Federation) -> None:
        never = 10**6
        settings = Simulation(
            rounds=never,
            evaluate_every=never,
            participation=workload.cohort / len(federation),
            device=workload.device,
            record="none",
        )
        net = Net(copy.deepcopy(module), torch.zeros(2, *federation.sample_shape), None)
        self.simulator = Simulator(find_method("fedavg")(), net, federation, workload.local, settings)
        self.state = self.simulator.start()

    def run_round(self) -> None:
        self.simulator.run_round(self.state)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.state.params.common)


class Textbook:
    """A loop over clients, whose models are then averaged."""

    def __init__(self, workload: Workload, module: nn.Module, clients: list[TensorDataset]) -> None:
        self.local, self.cohort, self.clients = workload.local, workload.cohort, clients
        self.device = torch.device(workload.device)
        self.model = copy.deepcopy(module).to(self.device)
        self.generator = np.random.default_rng(0)

    def run_round(self) -> None:
        local, total = self.local, None
        with torch_flags():
            for client in self.generator.choice(len(self.clients), self.cohort, replace=False):
                trained, _ = train_client(
                    *(self.model, self.clients[client], local.epochs, local.batch, local.lr, self.device),
                    momentum=local.momentum,
                )
                found = trained.state_dict()
                total = found if total is None else {name: value + found[name] for name, value in total.items()}
        assert total is not None
        self.model.load_state_dict({name: value / self.cohort for name, value in total.items()})

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class Pfl:
    """pfl-research's simulation of federated averaging, in one process."""

    def __init__(self, workload: Workload, module: nn.Module, clients: list[TensorDataset]) -> None:
        os.environ["PFL_PYTORCH_DEVICE"] = workload.device
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.pytorch import PyTorchTensorDataset
        from pfl.data.sampling import MinimizeReuseUserSampler
        from pfl.hyperparam.base import NNTrainHyperParams
        from pfl.metrics import Weighted
        from pfl.model.pytorch import PyTorchModel

        class Model(nn.Module):
            """The network with the two methods that pfl-research calls."""

            def __init__(self) -> None:
                super().__init__()
                self.network = copy.deepcopy(module)

            def loss(self, x: Tensor, y: Tensor) -> Tensor:
                self.train()
                return functional.cross_entropy(self.network(x), y)

            @torch.no_grad()
            def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
                self.eval()
                return {"loss": Weighted(functional.cross_entropy(self.network(x), y, reduction="sum").item(), len(y))}

        local, device = workload.local, torch.device(workload.device)
        users = {}
        for user, client in enumerate(clients):
            whole = max(len(client) // local.batch, 1) * local.batch
            users[user] = PyTorchTensorDataset(tuple(value[:whole].to(device) for value in client.tensors))
        data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))
        self.backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
        network = Model().to(device)
        self.model = PyTorchModel(
            network,
            local_optimizer_create=partial(torch.optim.SGD, momentum=local.momentum),
            central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        )
        self.training = NNTrainHyperParams(
            local_batch_size=local.batch,
            local_num_epochs=local.epochs,
            local_learning_rate=local.lr,
            local_max_grad_norm=local.clip,
        )
        self.algorithm, self.rounds, self.cohort = FederatedAveraging(), 0, workload.cohort

    def run_round(self) -> None:
        from pfl.algorithm.base import NNAlgorithmParams

        self.rounds += 1  # the algorithm continues after the rounds that it has run
        wanted = NNAlgorithmParams(
            central_num_iterations=self.rounds,
            evaluation_frequency=10**6,  # the first round is evaluated in any case
            train_cohort_size=self.cohort,
            val_cohort_size=None,
        )
        self.algorithm.run(wanted, self.backend, self.model, self.training, send_metrics_to_platform=False)

    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix("network."): value for name, value in self.model.pytorch_model.state_dict().items()}


def compare(workload: Workload, rounds: int) -> bool:
    """Print the table of a workload; return whether all programs have learned equally well."""
    federation = build_federation(workload.data)
    torch.manual_seed(seed_of(0, "compare_pfl"))
    module, device = workload.module(), torch.device(workload.device)
    split = federation.split("train")
    x, y = to_float(torch.from_numpy(split.x)), torch.from_numpy(split.y)
    clients = [TensorDataset(x[row, :count], y[row, :count]) for row, count in enumerate(split.count)]
    programs: dict[str, Fedrema | Textbook | Pfl] = {
        "fedrema": Fedrema(workload, module, federation),
        "textbook loop": Textbook(workload, module, clients),
        "pfl-research": Pfl(workload, module, clients),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, program in programs.items():
            synchronise(device)
            started = time.perf_counter()
            program.run_round()
            synchronise(device)
            if number:
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    scores = {name: score(module, program.weights(), federation) for name, program in programs.items()}
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{workload.title}, {workload.cohort} clients per round, {where}{load}; median of {rounds} rounds:\n")
    rows = [
        [
            name,
            f"{medians[name]:.3g}",
            f"{min(seconds[name]):.3g} to {max(seconds[name]):.3g}",
            f"{medians[name] / medians['fedrema']:.2f}",
            f"{scores[name][0]:.3f}",
            f"{100 * scores[name][1]:.1f}",
        ]
        for name in programs
    ]
    heading = ["program", "s/round", "range", "× time of fedrema", "test loss", "test accuracy, %"]
    print("\n".join(markdown_lines(heading, rows)) + "\n")
    accuracies = [accuracy for _, accuracy in scores.values()]
    return max(accuracies) - min(accuracies) <= LARGEST_DIFFERENCE


def score(module: nn.Module, weights: dict[str, Tensor], federation: Federation) -> tuple[float, float]:
    """Return loss and accuracy of a model on all test samples."""
    model = copy.deepcopy(module).eval()
    model.load_state_dict({name: value.cpu() for name, value in weights.items()})
    x = to_float(torch.from_numpy(federation.x[federation.test]))
    y = torch.from_numpy(federation.y[federation.test])
    with torch.no_grad():
        logits = torch.cat([model(part) for part in x.split(1000)])
    return float(functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


def quick(workload: Workload) -> Workload:
    """Return a workload with few small clients."""
    return replace(
        workload, data=replace(workload.data, clients=4, samples=60), cohort=2 if workload.cohort == 50 else 4
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds must be at least 1")
    if importlib.util.find_spec("pfl") is None:
        print("compare_pfl: pfl-research is not installed: pip install pfl.", file=sys.stderr)
        return 2
    workloads = [MNIST, *([CIFAR10] if torch.cuda.is_available() else [])]
    learned = [compare(quick(each) if asked.quick else each, 1 if asked.quick else asked.rounds) for each in workloads]
    if not torch.cuda.is_available():
        print(f"{CIFAR10.title}: not measured, because this machine has no usable CUDA device.")
    if not all(learned):
        print(f"The accuracies differ by more than {100 * LARGEST_DIFFERENCE:.0f} points.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
