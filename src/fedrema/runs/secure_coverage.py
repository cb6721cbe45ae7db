"""What secure aggregation covers for a method, without any data."""

from fedrema.core import LocalTraining, Method, Simulation
from fedrema.models.body_and_head import Net
from fedrema.models.networks import Network, build_net
from fedrema.runs.trained_clients import dummy_federation
from fedrema.simulation.secure_aggregation import Coverage
from fedrema.simulation.simulator import Simulator
from fedrema.tasks import Task


def dummy_coverage(method: Method) -> tuple[Coverage, Net]:
    """Return what secure aggregation covers for a method, with a small network that has batch norm, and that network.

    Batch norm, because some methods treat it in a different way.
    """
    federation = dummy_federation((1, 8, 8), Task("multiclass", 10))
    net = build_net(Network(net="mlp-bn", hidden=4), federation.sample_shape, federation.task.outputs, 0)
    local, simulation = LocalTraining(epochs=1), Simulation(rounds=1, device="cpu", backend="loop")
    simulator = Simulator(method, net, federation, local, simulation)
    return simulator.coverage(simulator.start()), net
