"""CPU time of secure aggregation without a network: what masking adds to a round on a node and on the server.

python benchmarks/time_masking.py [NODES] [PARAMETERS] [MISSING]

MISSING nodes fail after they have distributed their shares, which is the most expensive case for the server. Training
and transfers are not included. The result is compared with the sum without masks.
"""

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from fedrema.core.fixed_point import FixedPoint, QuantisedSum
from fedrema.deploy.masking import MaskingSession, Rules, SumId, UnmaskedRounds
from fedrema.deploy.run_config import Plan
from fedrema.deploy.tls import make_node_key, read_public_key, signature
from fedrema.deploy.unmasking import MaskedSum


def main(nodes: int = 100, parameters: int = 159_010, missing: int = 5) -> None:
    """Measure and print."""
    names = [f"node-{number:04}" for number in range(nodes)]
    before, rules = {"w": torch.zeros(parameters)}, Rules(Plan.secure_threshold, 0, 3, "")
    generator, spent = torch.Generator().manual_seed(0), defaultdict(float)

    def timed(what, call, *arguments):
        start = time.process_time()
        result = call(*arguments)
        spent[what] += time.process_time() - start
        return result

    plain, sessions = QuantisedSum(FixedPoint(), before), {}
    with tempfile.TemporaryDirectory() as folder:
        peers = {}
        for name in names:
            (Path(folder) / f"{name}.pub").write_bytes(make_node_key(Path(folder) / f"{name}.key"))
            peers[name] = read_public_key(Path(folder) / f"{name}.pub")

        def signed_by(name):
            return lambda text: signature(Path(folder) / f"{name}.key", text)[1]

        for number, name in enumerate(names):
            params = {"w": torch.randn(1, parameters, generator=generator) * 0.01}
            contribution = QuantisedSum(FixedPoint(), before)
            timed("a node: quantise", contribution.add, params, torch.tensor([100]))
            if number >= missing:
                plain.add(params, torch.tensor([100]))
            record = UnmaskedRounds(Path(folder) / name)
            arguments = (name, SumId(1, b"", b""), rules, contribution, signed_by(name), peers, record)
            sessions[name] = timed("a node: keys", MaskingSession, *arguments)
        server = MaskedSum(rules, QuantisedSum(FixedPoint(), before), {name: sessions[name].keys for name in names})
        for name in names:
            shares = timed("a node: share", sessions[name].share, server.neighbourhood(name))
            server.add_encrypted(name, shares)
        for name in names[missing:]:
            server.add_vector(name, timed("a node: mask", sessions[name].mask, server.encrypted_for(name)))
        for name in names[missing:]:
            server.add_shares(name, timed("a node: unmask", sessions[name].unmask, server.survivors))
        summed = timed("the server: unmask the sum", server.unmasked)
    if not torch.equal(summed.totals["w"], plain.totals["w"]):
        sys.exit("The sum is not the one without masks.")
    holders = len(server.holders[names[0]])
    print(f"{nodes} nodes, {missing} of them missing, {parameters} parameters, {holders - 1} neighbours: CPU seconds")
    for what, seconds in spent.items():
        print(f"{what}: {seconds / (nodes if what.startswith('a node') else 1):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
