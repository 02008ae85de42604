#!/usr/bin/env bash
# Predicted seconds of the paper's cases; names of models choose some of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
PYTHONPATH=. python experiments/time/predict.py "$@" >experiments/time/predicted.csv
