#!/usr/bin/env bash
# SmolLM2-135M learns a task by GRPO from its own samples, on two cores; then a step beside transformers'.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=experiments/grpo_smollm2
run=$(mktemp -d)/run
python -m longstraw.fetch smollm2_135m >/dev/null
OMP_NUM_THREADS=2 python -m longstraw.run model=smollm2_135m hardware=cpu data=lookup data.keys=3 context=96 \
  rollout=sample response_length=8 group_size=8 groups_per_step=4 steps=60 optimizer.lr=3e-4 evaluate.every=20 \
  hydra.run.dir="$run"
cp "$run/records.jsonl" "$run/evaluations.jsonl" "$here/"
python -m analysis.learning "$here" --figure "$here/curve.svg"
OMP_NUM_THREADS=1 PYTHONPATH=. python "$here/beside_transformers.py"
