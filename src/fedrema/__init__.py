"""Personalised federated learning: FedReMa and its baselines, fast, on your own data."""

__version__ = "0.1.0"
