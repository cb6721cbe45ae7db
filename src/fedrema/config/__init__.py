"""A run's settings: dataclasses, presets, and their conversion from and to TOML, JSON and dictionaries."""
