#!/bin/sh
# Starts the server, or resumes the run. Requires pip install 'fedrema[deploy]'.
cd "$(dirname "$0")" && exec fedrema deploy server .
