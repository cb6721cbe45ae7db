#!/bin/sh
# Starts the server, and goes on where it stopped. Needs: pip install 'fedrema[deploy]'
cd "$(dirname "$0")" && exec fedrema deploy server .
