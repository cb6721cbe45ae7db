"""The Flower app of the server."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrema.deploy.conductor import Conductor
from fedrema.deploy.plan import read_run_config

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Conduct the federation that the run configuration describes."""
    logging.basicConfig(level=logging.INFO)
    settings, plan = read_run_config(context.run_config)
    Conductor(grid, settings, plan).conduct()
