#!/usr/bin/env bash
# GLM-5.2 end to end on 32 ranks, the retained prompt detached and with both terms of the gradient, simulated.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
python -m longstraw.run sweep=glm_full tracking.mode=disabled mode=simulate
cat runs/glm_full/*/*/records.jsonl >experiments/glm_full/records.jsonl
