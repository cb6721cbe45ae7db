"""Tables and figures of runs; only reads their folders."""
