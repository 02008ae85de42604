#!/usr/bin/env bash
# Detached against exact gradients on a pretrained model and real text; minutes on two cores, about 4 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=experiments/detached_gradient_smollm2
python -m longstraw.fetch smollm2_135m >/dev/null
{
  python "$here/measure.py" 256 1024
  python "$here/measure.py" 4096 --texts 1 | tail -n +2
} >"$here/gradients.csv"
python "$here/figure.py"
