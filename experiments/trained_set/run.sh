#!/usr/bin/env bash
# What training all parameters takes: gradients alone in either dtype, AdamW on the device and in host memory, simulated.
# Low-rank adapters, the default, are in ../paper_group_size and ../ours_exact. With AdamW the second step is simulated:
# the optimizer's state is there from its beginning.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
common="claim=trained_set context=2Mi tracking.mode=disabled mode=simulate"
for prompt_grad in detached exact; do
  all="python -m longstraw.run adapter=none prompt_grad=$prompt_grad"
  $all optimizer=none $common
  $all optimizer=none optimizer.gradient_dtype=model $common
  $all steps=2 $common
  $all optimizer.device=cpu steps=2 $common
done
cat runs/trained_set/*/*/records.jsonl >experiments/trained_set/records.jsonl
