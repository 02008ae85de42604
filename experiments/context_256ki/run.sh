#!/usr/bin/env bash
# A prompt of 256Ki bytes through the tiny hybrid on a processor, both prompt gradients, one optimizer step each.
set -euo pipefail
cd "$(dirname "$0")/../.."
python -m longstraw.run -m model=qwen3_6_tiny hardware=cpu context=256Ki group_size=2 chunk=4096 \
    prompt_grad=detached,exact claim=context_256ki
cat runs/context_256ki/*/*/records.jsonl >experiments/context_256ki/records.jsonl
