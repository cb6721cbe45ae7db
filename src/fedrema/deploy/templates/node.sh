#!/bin/sh
# Starts this node. Requires pip install 'fedrema[deploy]', and the samples that node.toml names.
cd "$(dirname "$0")" && exec fedrema deploy client .
