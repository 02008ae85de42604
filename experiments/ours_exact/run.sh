#!/usr/bin/env bash
# The paper's table of group sizes with both terms of the gradient, simulated.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
python -m longstraw.run sweep=ours_exact tracking.mode=disabled mode=simulate
cat runs/ours_exact/*/*/records.jsonl >experiments/ours_exact/records.jsonl
