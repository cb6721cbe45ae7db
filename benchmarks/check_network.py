"""Cost of a round over the network: fails if our FedAvg takes more than 1.1 times as long as Flower's own.

python benchmarks/check_network.py

A hundred nodes in Flower's simulation engine, one after the other: Flower's FedAvg with a plain PyTorch client, our
FedAvg and our FedReMa, with the same network, samples and single epoch, so that almost nothing but the cost of a round
is left. Seconds per round are medians, the better of two runs; bytes are those of one node in one round.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
SETTINGS = {
    "net": "mlp",
    "hidden": 200,
    "epochs": 1,
    "batch": 20,
    "lr": 0.05,
    "keep-momentum": False,
    "device": "cpu",
    "backend": "loop",
}
SAMPLES, FEATURES, CLASSES = 40, 784, 10
LIMIT = 1.1


def make_samples(file: Path, nodes: int) -> None:
    """Write a federation of equal clients with two classes each."""
    from fedrema.data import Federation

    generator = np.random.default_rng(0)
    client = np.repeat(np.arange(nodes), SAMPLES)
    y = (client % 5 * 2 + generator.integers(0, 2, len(client))) % CLASSES
    x = (generator.normal(size=(len(client), FEATURES)) + y[:, None]).astype(np.float32)
    Federation.from_arrays(x, y, client, classes=CLASSES, test_share=0.5).save(file)


def ours(method: str, file: Path, folder: Path, nodes: int, rounds: int) -> dict[str, float]:
    """Run one of our methods; return seconds per round, and bytes per node and round."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fedrema.config.settings import make_settings
    from fedrema.deploy import flower_client_app
    from fedrema.deploy.flower_conductor import Conductor
    from fedrema.deploy.run_config import Plan, read_run_config, run_config
    from fedrema.runs.run import Run

    plan = Plan(str(folder), str(FEATURES), CLASSES, least_clients=nodes, most_clients=nodes)
    config = run_config(make_settings(method, {**SETTINGS, "rounds": rounds, "federation": str(file)}), plan)
    server, client = ServerApp(), ClientApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        Conductor(grid, *read_run_config(config)).conduct()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        configured = Context(context.run_id, context.node_id, context.node_config, context.state, config)
        return flower_client_app.train(message, configured)

    client.query()(flower_client_app.identify)
    run_simulation(server, client, nodes, backend_config={"client_resources": {"num_cpus": 1}})
    records = Run(folder).rounds
    seconds = [sum(record.seconds.values()) for record in records[1:]]
    up, down = (np.median([record[way] for record in records[1:]]) / nodes for way in ("bytes_up", "bytes_down"))
    return {"seconds": float(np.median(seconds)), "up": up, "down": down, "accuracy": records[-1]["accuracy"]}


def flowers(file: Path, nodes: int, rounds: int) -> dict[str, float]:
    """Run Flower's FedAvg with a client as in its tutorials."""
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ends = ClientApp(), ServerApp(), []

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 200), torch.nn.ReLU(), torch.nn.Linear(200, CLASSES))

    @client.train()
    def train(message: Message, context: Context) -> Message:
        from fedrema.data import DataSettings
        from fedrema.deploy.node_data import partitioned_dataset

        # Read once per process, as our own client does: reading files is not part of the comparison.
        one = partitioned_dataset(DataSettings(federation=str(file))).only(int(context.node_config["partition-id"]))
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        (x, y), (test_x, test_y) = (
            (torch.from_numpy(np.asarray(part.x[0])), torch.from_numpy(np.asarray(part.y[0])).long())
            for part in (one.split("train"), one.split("test"))
        )
        right = float((net(test_x).argmax(1) == test_y).float().mean())
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True)
        for batch, labels in loader:
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(batch), labels).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimiser.step()
        metrics = MetricRecord({"num-examples": len(x), "accuracy": right})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        """Flower's FedAvg, which records the time after each round."""

        def aggregate_train(self, *arguments, **named):  # type: ignore[no-untyped-def]
            result = super().aggregate_train(*arguments, **named)
            ends.append(time.perf_counter())
            return result

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)

    run_simulation(server, client, nodes, backend_config={"client_resources": {"num_cpus": 1}})
    size = sum(value.numel() * 4 for value in network().parameters())
    return {"seconds": float(np.median(np.diff(ends))), "up": size, "down": size, "accuracy": float("nan")}


def main(arguments: list[str]) -> int:
    """Print the table; --quick uses few nodes and rounds, to check that it runs."""
    if arguments and arguments[0] == "one":
        name, file, folder, nodes, rounds = json.loads(arguments[1])
        found = flowers(file, nodes, rounds) if name == "flower" else ours(name, file, Path(folder), nodes, rounds)
        print("\n" + json.dumps(found))
        return 0
    nodes, rounds = (4, 3) if "--quick" in arguments else (100, 10)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.npz"
        make_samples(file, nodes)
        found: dict[str, dict[str, float]] = {}
        for name in ("flower", "fedavg", "fedrema") * 2:  # the better of two, alternating: the machine may be shared
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
            asked = json.dumps([name, str(file), str(Path(folder) / name), nodes, rounds])
            command = [sys.executable, __file__, "one", asked]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode:
                print(ended.stdout[-3000:], ended.stderr[-3000:])
                return 1
            one = json.loads(ended.stdout.splitlines()[-1])
            found[name] = min(one, found.get(name, one), key=lambda each: each["seconds"])
    titles = {"flower": "Flower's FedAvg", "fedavg": "FedAvg", "fedrema": "FedReMa"}
    print(f"| {nodes} nodes | seconds per round | ratio | kB up | kB down |\n|---|---|---|---|---|")
    for name, one in found.items():
        ratio = one["seconds"] / found["flower"]["seconds"]
        print(
            f"| {titles[name]} | {one['seconds']:.2f} | {ratio:.2f} | {one['up'] / 1e3:.0f} | {one['down'] / 1e3:.0f} |"
        )
    return int("--quick" not in arguments and found["fedavg"]["seconds"] > LIMIT * found["flower"]["seconds"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
