"""The simulated federation: the round loop, its state, and how clients are scored."""
