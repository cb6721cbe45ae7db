#!/bin/sh
# Starts this node. Requires pip install 'fedrema[deploy]', the samples that node.toml names, and fedrema deploy approve.
cd "$(dirname "$0")" && exec fedrema deploy client .
