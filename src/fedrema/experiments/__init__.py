"""Experiments from grid files: rows × columns of settings and seeds, their runs, tables, claims and figures."""
