"""The Flower app of a client, under the name by which the app folders of federations import it."""

from fedrema.deploy.flower_client_app import app

__all__ = ["app"]
