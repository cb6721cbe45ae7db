"""Federations of real clients: nodes train on their own machines, and a central server aggregates their models."""
