#!/usr/bin/env bash
# The peak of a rank against the context on eight ranks, and against the ranks at 2Mi, simulated. The point of both lines,
# 2Mi on eight ranks, is in ../paper_group_size, and 4,456,448 positions are in ../paper_stress.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
common="claim=context_and_ranks tracking.mode=disabled mode=simulate"
python -m longstraw.run context=256Ki $common
python -m longstraw.run context=1Mi $common
python -m longstraw.run context=2Mi hardware.gpus_per_node=4 $common
python -m longstraw.run context=2Mi hardware.nodes=2 $common
cat runs/context_and_ranks/*/*/records.jsonl >experiments/context_and_ranks/records.jsonl
