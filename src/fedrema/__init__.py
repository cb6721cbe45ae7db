"""Personalised federated learning: FedReMa and its baselines, fast, on your own data."""
