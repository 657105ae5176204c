#!/bin/sh
# Every figure of the README and docs/results from one command: see bench/all.py --help.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python}" bench/all.py "$@"
