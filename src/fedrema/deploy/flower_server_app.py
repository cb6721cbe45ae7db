"""The Flower app of the server, which executes the rounds."""

import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrema.base.processes import exit_with_parent
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.flower_transfers import shorten_pauses
from fedrema.deploy.run_config import read_run_config
from fedrema.deploy.run_state import locked_run
from fedrema.deploy.services import EXIT_WITH_PARENT

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Execute the rounds of the federation that the run configuration describes."""
    logging.basicConfig(level=logging.INFO)
    if os.environ.get(EXIT_WITH_PARENT):
        exit_with_parent()  # the app must not continue after the server's command was killed
    shorten_pauses()
    with locked_run(Path(str(context.run_config["folder"]))) as lock:
        settings, plan = read_run_config(context.run_config)
        Conductor(grid, settings, plan).conduct(lock)
