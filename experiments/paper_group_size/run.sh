#!/usr/bin/env bash
# The paper's table of group sizes, simulated; on the machine itself mode=run measures it.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
python -m longstraw.run sweep=paper_group_size tracking.mode=disabled mode=simulate
cat runs/paper_group_size/*/*/records.jsonl >experiments/paper_group_size/records.jsonl
