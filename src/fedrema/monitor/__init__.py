"""Monitoring over HTTP: who may see it, metrics for Prometheus, and the pages of an operator and of a site."""
