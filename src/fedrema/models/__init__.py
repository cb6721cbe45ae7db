"""Networks, split into a feature extractor (body) and a classifier (head)."""
