"""Used by all other packages: files, random generators, memory, terminal output, users' code."""
