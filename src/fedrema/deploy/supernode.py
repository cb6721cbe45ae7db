"""Flower's SuperNode, which ends with the process that started it. `python -m fedrema.deploy.supernode ARGUMENTS`."""

import os

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode.cli.flower_supernode import flower_supernode


def main() -> None:
    """Serve as a node until told to stop."""
    start_parent_process_monitor(os.getppid())
    flower_supernode()


if __name__ == "__main__":
    main()
