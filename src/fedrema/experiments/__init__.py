"""Experiments as data: a file says what is compared, the runner plays what is missing."""
