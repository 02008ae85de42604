#!/usr/bin/env bash
# The paper's longest context, eight optimizer steps on one retained prompt, simulated.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
python -m longstraw.run sweep=paper_stress tracking.mode=disabled mode=simulate
cat runs/paper_stress/*/*/records.jsonl >experiments/paper_stress/records.jsonl
