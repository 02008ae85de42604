#!/usr/bin/env bash
# Both arms on the three tasks with golden and with sampled answers, five starts each; the figure and the table.
# TASKS, ANSWERS and SEEDS take a part of it: the committed rows are TASKS=duplicate ANSWERS=golden SEEDS="1 2 3".
set -euo pipefail
cd "$(dirname "$0")/../.."
here=experiments/detaching_tiny
{
  echo task,learn,arm,seed,lr,step,cpu_seconds,success,cosine,norm_ratio
  for task in ${TASKS:-shifted gap duplicate chain}; do
    for answers in ${ANSWERS:-golden grpo}; do
      for seed in ${SEEDS:-1 2 3 4 5}; do
        OMP_NUM_THREADS=1 python "$here/train.py" --task "$task" --learn "$answers" --seed "$seed" --steps 400
      done
    done
  done
} >"$here/runs.csv"
python "$here/figure.py"
