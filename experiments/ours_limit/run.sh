#!/usr/bin/env bash
# The largest contexts that longstraw.plan finds for the paper's machine, simulated: detached, exact, exact in bfloat16.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
common="tracking.mode=disabled mode=simulate"
python -m longstraw.run sweep=ours_limit prompt_grad=detached context=10609Ki $common
python -m longstraw.run sweep=ours_limit prompt_grad=exact context=3296Ki $common
python -m longstraw.run sweep=ours_limit prompt_grad=exact context=4837Ki state.gradient_dtype=bfloat16 $common
cat runs/ours_limit/*/*/records.jsonl >experiments/ours_limit/records.jsonl
