"""The Flower app of a node, under the name by which the app folders of federations import it."""

from fedrema.deploy.flower_client_app import app

__all__ = ["app"]
