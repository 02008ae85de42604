#!/usr/bin/env bash
# Bytes sent a step by collective, by what they are for and by verb: counted on the tiny models, by formula on the published.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
here=experiments/bytes_sent
{
  echo "model,cp,ep,context,prompt_grad,verb,collective,label,predicted_bytes,counted_bytes_most,counted_bytes_least"
  for model in qwen3_6_tiny glm_5_2_tiny; do
    for ranks in 2 4; do
      torchrun --nproc-per-node "$ranks" "$here/count.py" "$model" --context 1152 --response 128 --chunk 256
    done
  done
  for prompt_grad in detached exact; do
    for ranks in 8 16; do
      python "$here/count.py" qwen3_6_27b --ranks "$ranks" --context 2100000 --response 8192 --chunk 16384 \
        --adapter lora --prompt-grad "$prompt_grad"
    done
    for ranks in 8 32; do
      python "$here/count.py" glm_5_2 --ranks "$ranks" --context 2100000 --response 8192 --chunk 16384 \
        --adapter lora --prompt-grad "$prompt_grad"
    done
  done
} >"$here/bytes.csv"
