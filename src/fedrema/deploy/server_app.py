"""The Flower app of the server, under the name by which the app folders of federations import it."""

from fedrema.deploy.flower_server_app import app

__all__ = ["app"]
