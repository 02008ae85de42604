#!/usr/bin/env bash
# Six layers of each published model at full width, random weights in bfloat16, one step of low-rank adapters.
set -euo pipefail
cd "$(dirname "$0")/../.."
common="hardware=cpu context=1Ki response_length=32 chunk=512 adapter=lora mode=run group_size=2 claim=six_layers_full_width"
export OMP_NUM_THREADS=1
/usr/bin/time -v python -m longstraw.run model=qwen3_6_27b model.num_hidden_layers=6 prompt_grad=exact $common
/usr/bin/time -v python -m longstraw.run model=glm_5_2 model.num_hidden_layers=6 model.n_routed_experts=16 \
    prompt_grad=detached $common
cat runs/six_layers_full_width/*/*/records.jsonl >experiments/six_layers_full_width/records.jsonl
