"""Write the tables of what methods transmit, what secure aggregation covers, and refusals, in docs/security.md.

`make figures` calls it. The rows follow from the roles of parameters and from the reply of a node with dummy samples,
which is what the server of a deployment checks every reply against.
"""

from pathlib import Path

from make_figures import fill

from fedrema.cli.arguments import parse_settings
from fedrema.core import Role
from fedrema.deploy.refusals import Refusal
from fedrema.deploy.server import CentralServer
from fedrema.methods import registry
from fedrema.reporting.tables import markdown_lines
from fedrema.runs.secure_coverage import dummy_coverage
from fedrema.runs.trained_clients import dummy_federation
from fedrema.simulation.secure_aggregation import parts
from fedrema.tasks import Task

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
NETWORK = "mlp-bn"
"""A network with batch norm, because one method treats it in a different way."""


def transmitted() -> str:
    """Return a table of methods: what leaves a node, and what stays there."""
    rows = []
    for name in registry():
        settings = parse_settings(name, ["--clients", "3", "--net", NETWORK])
        central = CentralServer(settings, dummy_federation((1, 8, 8), Task("multiclass", 10)), 3)
        state, net = central.simulator.start(), central.net
        roles = central.simulator.roles(state.params)
        sent = [each for each, role in roles.items() if role is not Role.PRIVATE]
        if sorted(sent) != sorted(central.expected.params):
            raise SystemExit(f"{name} sends other parameters than its roles say.")
        kept = [each for each, role in roles.items() if role is Role.PRIVATE] + list(state.memory)
        extras = [f"`{each}`" for each in central.expected.extras]
        rows.append((f"`{name}`", *(", ".join(each) or "–" for each in (parts(sent, net), extras, parts(kept, net)))))
    titles = ("method", "parameters that are sent", "additional tensors that are sent", "stays on the node")
    return "\n".join(markdown_lines(titles, rows, texts=4))


def covered() -> str:
    """Return a table of methods: what secure aggregation covers, and what the server still receives of each node."""
    rows = []
    for name, kind in registry().items():
        coverage, net = dummy_coverage(kind())
        summed, seen = ", ".join(parts(coverage.summed, net)), ", ".join(coverage.seen(net))
        refused = ("refused", "–", "–")
        rows.append((f"`{name}`", *((coverage.kind, summed, seen or "–") if coverage.summed else refused)))
    titles = ("method", "coverage", "the server learns only the sum of", "it still receives from each node")
    return "\n".join(markdown_lines(titles, rows, texts=4))


def refusals() -> str:
    """Return a table of everything that a node sends instead of a reply."""
    rows = [(f"`{each.code}`", str(each)) for each in Refusal]
    return "\n".join(markdown_lines(("code", "sentence"), rows, texts=2))


if __name__ == "__main__":
    fill(PAGE, "transmitted", transmitted())
    fill(PAGE, "covered", covered())
    fill(PAGE, "refusals", refusals())
