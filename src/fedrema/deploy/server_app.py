"""The Flower app of the server."""

import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.app_utils import start_parent_process_monitor

from fedrema.deploy.conductor import Conductor
from fedrema.deploy.plan import read_run_config
from fedrema.deploy.presence import present

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Conduct the federation that the run configuration describes."""
    logging.basicConfig(level=logging.INFO)
    if os.environ.get("FEDREMA_TIED"):
        start_parent_process_monitor(os.getppid())  # nobody goes on when the server's command has been killed
    with present(Path(str(context.run_config["folder"]))) as lock:
        settings, plan = read_run_config(context.run_config)
        Conductor(grid, settings, plan).conduct(lock)
