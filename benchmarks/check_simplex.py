"""Time FedPAC's quadratic programs: all clients as one batch, and one after the other with Clarabel.

python benchmarks/check_simplex.py                   20 and 100 clients on the CPU (ten seconds on two cores)
python benchmarks/check_simplex.py --device cuda     the batch on a GPU, Clarabel on the CPU
python benchmarks/check_simplex.py --clients 20 200  other numbers of clients
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedrema.methods.shared.simplex import _by_clarabel, minimise_on_simplex, optimality_gap

GROUPS = 5
FEATURES = 30


def programs(clients: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the programs of clients in five groups, as in `fedrema.methods.fedpac.combination_weights`."""
    generator = torch.Generator().manual_seed(clients)
    centres = 3 * torch.randn(GROUPS, FEATURES, generator=generator, dtype=torch.float64)
    rows = torch.randn(clients, FEATURES, generator=generator, dtype=torch.float64)
    rows = rows + centres[torch.arange(clients) % GROUPS]
    variance = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.01
    gram = (rows @ rows.T).to(device)
    return (torch.diag(variance).to(device) + gram).expand(clients, -1, -1), -gram


def one_by_one(quadratic: Tensor, linear: Tensor) -> Tensor:
    scale = quadratic.abs().max()
    return torch.stack([_by_clarabel(*program) for program in zip(quadratic / scale, linear / scale, strict=True)])


def fastest(solve: Callable[[Tensor, Tensor], Tensor], given: tuple[Tensor, Tensor], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        solve(*given).cpu()  # waits for the GPU
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=5, help="report the fastest of this many")
    asked = parser.parse_args()
    print("clients     batch  Clarabel    gap, batch and Clarabel, relative to the largest entry")
    for clients in asked.clients:
        given = programs(clients, asked.device)
        milliseconds = [1000 * fastest(solve, given, asked.times) for solve in (minimise_on_simplex, one_by_one)]
        gaps = [float(optimality_gap(*given, solve(*given)).max()) for solve in (minimise_on_simplex, one_by_one)]
        batch, clarabel = (gap / float(given[0].abs().max()) for gap in gaps)
        print(f"{clients:7} {milliseconds[0]:6.1f} ms {milliseconds[1]:6.1f} ms   {batch:.0e} {clarabel:.0e}")


if __name__ == "__main__":
    main()
