"""The Flower app of the server, which executes the rounds."""

import logging
import os
from pathlib import Path

import psutil
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrema.base.processes import SUPERVISOR, exit_with_parent
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
        # The app must not continue after the server's command was killed, even while the app was starting.
        if not psutil.pid_exists(int(os.environ.get(SUPERVISOR, os.getpid()))):
            raise SystemExit("the server's command has exited")
        exit_with_parent(os.getppid())
    shorten_pauses()
    with locked_run(Path(str(context.run_config["folder"]))) as lock:
        settings, plan = read_run_config(context.run_config)
        Conductor(grid, settings, plan).conduct(lock)
