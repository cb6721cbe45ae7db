"""Write the table of what each method transmits in docs/security.md; `make figures` calls it.

The rows follow from the roles of parameters and from the reply of a node with dummy samples, which is what the server
of a deployment checks every reply against.
"""

import re
from pathlib import Path

from make_figures import fill

from fedrema.cli.arguments import parse_settings
from fedrema.core import Role
from fedrema.deploy.server import CentralServer
from fedrema.methods import registry
from fedrema.models.body_and_head import Net
from fedrema.reporting.tables import markdown_lines
from fedrema.runs.trained_clients import dummy_federation
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
        extras = ", ".join(f"`{each}`" for each in central.expected.extras)
        rows.append((f"`{name}`", parts(sent, net), extras or "–", parts(kept, net)))
    titles = ("method", "parameters that are sent", "additional tensors that are sent", "stays on the node")
    return "\n".join(markdown_lines(titles, rows, texts=4))


def parts(names: list[str], net: Net) -> str:
    """Return names of parameters as parts of models: body, head, and what the method adds."""
    found: dict[str, None] = {}
    for name in names:
        where = re.search(r"(?:^|\.)(body|head)\.", name)
        if where is None:
            found[f"`{name}`"] = None
            continue
        part = "batch norm" if name[where.start(1) :] in net.batch_norm else where[1]
        owner = name[: where.start(1)].strip(".")
        found[f"`{owner}` {part}" if owner else part] = None
    return ", ".join(found) or "–"


if __name__ == "__main__":
    fill(PAGE, "transmitted", transmitted())
