"""The same methods with real clients: a node trains its own model, the central server puts models together."""
