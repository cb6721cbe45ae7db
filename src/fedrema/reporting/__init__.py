"""Tables and pictures of runs; reads their folders, never runs anything."""
