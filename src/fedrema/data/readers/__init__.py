"""Readers of tables, images and federated datasets in other formats."""
