#!/bin/sh
# Starts this node. Needs: pip install 'fedrema[deploy]', and its samples where node.toml says.
cd "$(dirname "$0")" && exec fedrema deploy client .
