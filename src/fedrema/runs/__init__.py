"""A run and its folder: settings, records, checkpoints, models."""
