#!/usr/bin/env bash
# Groups from a running inference server: run.sh vllm|text URL; minutes on two cores, about 4 GB beside the server's.
#
# vllm: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_CPU_KVCACHE_SPACE=1 vllm serve CHECKPOINT --served-model-name smollm2 \
#           --dtype bfloat16 --enable-lora --max-lora-rank 16 --max-loras 2 --logprobs-mode processed_logprobs \
#           --generation-config vllm --max-model-len 512 --enforce-eager
# text: transformers serve CHECKPOINT --device cpu
#
# CHECKPOINT is the folder that `python -m longstraw.fetch smollm2_135m` names.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=experiments/served_rollouts
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
common=(hardware=cpu model=smollm2_135m adapter=lora rollout=server "server.url=$2" claim=served_rollouts)
if [[ $1 == vllm ]]; then
  python -m longstraw.run "${common[@]}" model.dtype=bfloat16 context=256 response_length=16 group_size=6 chunk=128 \
    data=jsonl "data.path=$here/prompts.jsonl" reward=reward:vowels server.seeds=false temperature=0.8 \
    optimizer.lr=2e-3 steps=6
else
  python -m longstraw.run "${common[@]}" context=384 response_length=16 group_size=4 chunk=128 data=lookup \
    server.api=text server.sync_every=null steps=2
fi
