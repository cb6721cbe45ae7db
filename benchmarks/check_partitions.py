"""Is the partition of docs/results.md an easy one? Two checks on CIFAR-10, for a CPU.

python benchmarks/check_partitions.py images
    How hard the test images of ten partitions are for one network (15 minutes).
python benchmarks/check_partitions.py generator
    The released generator's partition against ours, with a small network (2 minutes).
"""

import argparse

import numpy as np
import torch
from torch.nn import functional

import fedrema
from fedrema.data import Pool, load_pool, to_float
from fedrema.models.networks import alexnet

PAPER = {"dataset": "cifar10", "samples": 600, "s": 0.2}


def test_images(pool: Pool, partitions: int) -> list[np.ndarray]:
    """Return the indices in the pool of each partition's test images."""
    place = {image.tobytes(): number for number, image in enumerate(pool.x)}
    federations = [fedrema.make_federation(**PAPER, data_seed=seed) for seed in range(partitions)]
    return [np.array([place[image.tobytes()] for image in each.x[each.test]]) for each in federations]


def images(quick: bool) -> None:
    """Train AlexNet on images that are in no test split, and score it on every test split."""
    pool = load_pool("cifar10")
    parts = test_images(pool, 2 if quick else 10)
    free = np.setdiff1d(np.arange(len(pool.y)), np.concatenate(parts))
    chosen = np.random.default_rng(0).permutation(free)[: 200 if quick else 25_000]
    x, y = to_float(torch.from_numpy(pool.x)), torch.from_numpy(pool.y)
    torch.manual_seed(0)
    net = alexnet((3, 32, 32), 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(1 if quick else 4):
        order = np.random.default_rng(epoch).permutation(chosen)
        for start in range(0, len(order) - 99, 100):
            batch = torch.from_numpy(order[start : start + 100])
            optimizer.zero_grad()
            functional.cross_entropy(net(x[batch]), y[batch]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10)
            optimizer.step()
    with torch.no_grad():
        right = [torch.cat([net(x[b]).argmax(1) == y[b] for b in torch.from_numpy(part).split(500)]) for part in parts]
    scores = [100 * float(each.float().mean()) for each in right]
    print("per partition:", [round(score, 2) for score in scores])
    print(f"mean {np.mean(scores):.2f}, standard deviation {np.std(scores, ddof=1):.2f}")


def released_partition(pool: Pool, split: int) -> fedrema.Federation:
    """Partition like the released generator: each class in the order of the dataset, from its 2001st image on."""
    by_label = [np.flatnonzero(pool.y == label) for label in range(10)]
    used = [2000] * 10
    index, client = [], []
    for k in range(20):
        dominant = [(2 * (k // 4) + offset) % 10 for offset in range(3)]
        for labels, count in ((range(10), 12), (dominant, 160)):
            for label in labels:
                index.append(by_label[label][used[label] : used[label] + count])
                used[label] += count
                client += [k] * count
    rows = np.concatenate(index)
    return fedrema.Federation.from_arrays(pool.x[rows], pool.y[rows], np.array(client), classes=10, data_seed=split)


def generator(quick: bool) -> None:
    """Compare the two partitions over several splits into train and test."""
    pool = load_pool("cifar10")
    for method, rounds in (("local", 6), ("fedavg", 20)):
        found: dict[str, list[float]] = {"released": [], "ours": []}
        for seed in range(1 if quick else 4):
            both = {
                "released": released_partition(pool, seed),
                "ours": fedrema.make_federation(**PAPER, data_seed=seed),
            }
            for name, federation in both.items():
                run = fedrema.run(
                    method, federation=federation, net="mlp", hidden=64, rounds=1 if quick else rounds,
                    out=f"runs/partitions/{method}-{name}-{seed}", overwrite=True,
                )  # fmt: skip
                found[name].append(100 * run.summary["best_accuracy"])
        for name, scores in found.items():
            print(f"{method:7} {name:9} {np.mean(scores):.1f}", [round(score, 1) for score in scores])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["images", "generator"])
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    asked = parser.parse_args()
    {"images": images, "generator": generator}[asked.check](asked.quick)
