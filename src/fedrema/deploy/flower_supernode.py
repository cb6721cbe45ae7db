"""Flower's SuperNode, which exits with its parent. Usage: `python -m fedrema.deploy.flower_supernode ARGUMENTS`."""

from flwr.supernode.cli.flower_supernode import flower_supernode

from fedrema.base.processes import exit_with_parent


def main() -> None:
    """Run the SuperNode until it is stopped."""
    exit_with_parent()
    flower_supernode()


if __name__ == "__main__":
    main()
